"""A host of the lab has its own name, network and memory, and can be killed."""

import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lab import Lab, LabError

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]

PYTHON = (sys.executable, "-c")
OPEN_AND_WAIT = """
import sys
from benchmarks.lab import Lab
with Lab(hosts=2, rate="1gbit") as lab:
    lab.start("h0", ["setsid", "sleep", "1000"])
    print(lab.pid("h0"), lab.pid("h1"), flush=True)
    sys.stdin.read()
"""
SAY = "import os; print(*(os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'GROUP_RANK')), os.uname().nodename)"


def dwellers(networks):
    """The processes that are in one of these network namespaces."""
    result = []
    for namespace in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            if namespace.readlink() in networks:
                result.append(int(namespace.parts[2]))
    return result


def require_all_end(networks):
    """Wait until no process is in these namespaces; a command may enter them while its lab is being killed."""
    while pids := dwellers(networks):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(pid)) as end:
                assert select.select([end], [], [], 10)[0], f"process {pid} outlives its lab"


def networks_of(pids):
    return {Path(f"/proc/{pid}/ns/net").readlink() for pid in pids}


def machine():
    interfaces = sorted(Path("/sys/class/net").iterdir())
    return os.uname().nodename, Path("/etc/hosts").read_bytes(), Path("/proc/self/mounts").read_bytes(), interfaces


def test_names_of_all_hosts_resolve_on_each(lab):
    look = "import socket; print(socket.gethostname(), *map(socket.gethostbyname, ('h0', 'h1')))"
    ended = lab.run({name: [*PYTHON, look] for name in lab.names})
    assert [ended[name].text().split() for name in lab.names] == [
        [name, "10.77.0.1", "10.77.0.2"] for name in lab.names
    ]


def test_a_name_that_is_no_host_is_refused_at_once(lab):
    look = "import socket\ntry: socket.gethostbyname('elsewhere.example')\nexcept OSError: print('unknown')"
    assert lab.run({"h0": [*PYTHON, look]}, deadline_s=10)["h0"].text() == "unknown\n"


def test_hosts_do_not_share_memory(lab):
    lab.run({"h0": ["touch", "/dev/shm/segment"]})["h0"].text()
    seen = lab.run({name: ["ls", "/dev/shm"] for name in lab.names})
    assert [seen[name].out for name in lab.names] == ["segment\n", ""]


def test_the_machine_keeps_its_own_name_files_and_interfaces(permitted):
    before = machine()
    with Lab(hosts=2, rate="1gbit"):
        assert machine() == before
    assert machine() == before


@pytest.mark.parametrize(
    ("interleaved", "expected"),
    [
        (False, ["0 0 0 h0", "1 1 0 h0", "2 0 1 h1", "3 1 1 h1"]),
        (True, ["0 0 0 h0", "1 0 1 h1", "2 1 0 h0", "3 1 1 h1"]),
    ],
    ids=["in-host-order", "interleaved"],
)
def test_each_rank_gets_its_environment(lab, interleaved, expected):
    ended = lab.run_ranks([*PYTHON, SAY], per_host=2, interleaved=interleaved)
    assert [one.text().strip() for one in ended] == expected


@pytest.mark.long
def test_two_gloo_ranks_on_two_hosts_add_up_over_the_wire(lab):
    ended = lab.run_ranks([sys.executable, str(Path(__file__).with_name("all_reduce.py")), "250000"])
    assert [one.text() for one in ended] == ["3.0 h0\n", "3.0 h1\n"]
    assert 1_000_000 < lab.traffic("h0").sent_bytes < 1_150_000


def test_output_and_code_of_a_failed_command_are_kept(lab):
    ended = lab.run({"h1": ["sh", "-c", "echo out; echo err >&2; exit 3"]})["h1"]
    assert (ended.code, ended.out, ended.err) == (3, "out\n", "err\n")
    with pytest.raises(LabError, match=r"h1 ended with 3:\n  out\n  err"):
        ended.text()


def test_a_command_that_times_out_is_named_with_its_last_output(lab):
    commands = {"h0": ["true"], "h1": ["sh", "-c", "echo tired; sleep 1000"]}
    with pytest.raises(
        LabError, match=r"(?s)^h1 had not ended after 0.5 s.*h0 \(ended with 0\).*h1 \(killed\):\n  tired"
    ):
        lab.run(commands, deadline_s=0.5)


def test_a_host_that_is_not_there_is_refused_with_those_that_are(lab):
    with pytest.raises(LabError, match="host 'h7' is not in this lab; it has h0, h1"):
        lab.run({"h7": ["true"]})


@pytest.mark.parametrize("rate", ["fast", "0gbit", "1 gbit"])
def test_a_rate_that_is_none_is_refused_with_examples(rate):
    with pytest.raises(LabError, match="write 500kbit, 100mbit or 1gbit"):
        Lab(hosts=1, rate=rate)


@pytest.mark.long
def test_nothing_is_left_after_the_end(permitted):
    with Lab(hosts=2, rate="1gbit") as lab:
        lab.start("h0", ["setsid", "sleep", "1000"])
        made = networks_of(map(lab.pid, lab.names))
        assert len(dwellers(made)) >= 4
    assert not dwellers(made)


def test_nothing_is_left_after_the_lab_itself_is_killed(permitted):
    command = [*PYTHON, OPEN_AND_WAIT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as opener:
        assert opener.stdout is not None
        made = networks_of(opener.stdout.readline().split())
        assert len(dwellers(made)) >= 2
        opener.kill()
    assert len(made) == 2
    require_all_end(made)


def test_without_root_the_reason_says_so(permitted):
    ask = "import os; from benchmarks.lab import Lab; os.setuid(65534); print(Lab.unavailable_reason())"
    output = subprocess.run([*PYTHON, ask], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert "needs root, and this process has user id 65534" in output
