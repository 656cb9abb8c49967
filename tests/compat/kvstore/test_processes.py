"""Ranks of a launcher, and servers in processes of their own."""

import os
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("rank_script.py")
pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]


def run(kind, **variables):
    """Run the script on two ranks; return how it ended and the processes that it left, too."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "KVSTORE_TEST": str(os.getpid()), **variables}
    command = [sys.executable, "-m", "counterpoint", "run", "-n", "2", str(SCRIPT), kind]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environ)
    return ended, [pid for pid in marked(environ["KVSTORE_TEST"]) if not is_gone(pid)]


def marked(value):
    """Yield the processes that have the variable of this test, and are not this process."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"KVSTORE_TEST={value}".encode() in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


def is_gone(pid):
    """Tell whether the process ends within the time that the kernel takes to end what belongs to a dead one."""
    with suppress(ProcessLookupError):
        return bool(select.select([os.pidfd_open(pid)], [], [], 20)[0])
    return True


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_workers_of_a_launcher_share_values_on_servers(kind):
    ended, left = run(kind)
    expected_lines = [f"[rank {rank}] {rank} 2 [3.5, 3.5] [0.0, 0.0, 0.0, 0.0]" for rank in range(2)]
    assert sorted(ended.stdout.splitlines()) == expected_lines
    assert (ended.returncode, left) == (0, [])


def test_a_rank_that_fails_ends_the_others_and_the_servers():
    ended, left = run("dist_sync-fails")
    assert "rank 1 gives up" in ended.stderr + ended.stdout
    assert ended.returncode != 0
    assert left == []
