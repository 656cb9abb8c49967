"""Strangers attack running jobs, as another user of their host and from another host: they get and change nothing."""

import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.lab import Lab, wait_all
from counterpoint.ps.process import JobEndpoint, write_job_file
from counterpoint.rpc.address import TcpAddress
from counterpoint.rpc.job_key import new_key, write_key
from tests.lab.held_job import elastic
from tests.lab.server_job import COUNTERPOINT, HELLO_BYTES, PORT, PROOF_BYTES
from tests.other_user import STRANGER

pytestmark = [pytest.mark.process, pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]
JOB, ATTACK = Path(__file__).with_name("held_job.py"), Path(__file__).with_name("stranger.py")
KINDS = ("shm", "gloo", "elastic", "server", "coordinator")
READY_S, LONG_S = 60.0, 200.0
LISTENING = "0A"


class HeldJob:
    """A job of one kind on the hosts h0 and h1, all of whose files are in a folder that all users share, as /tmp is."""

    def __init__(self, lab, kind):
        self.lab, self.kind = lab, kind
        self.folder = Path(tempfile.mkdtemp(prefix="counterpoint-strangers-"))
        self.folder.chmod(0o1777)
        self.home = self.folder / "home"
        self.home.mkdir(mode=0o700)
        self.gate, self.key = self.home / "gate", self.folder / "job.key"
        self.variables = {"TMPDIR": str(self.folder), "PYTHONPATH": os.pathsep.join(sys.path)}
        self.members, self.trainers = [], []
        write_key(new_key(), self.key)

    def start(self):
        """Start everything that listens, and all that train; of a coordinator alone nobody trains yet."""
        match self.kind:
            case "shm":
                command = [*COUNTERPOINT, "launch", "--on", "local", "-n", "2", "--transport", "shm", str(JOB)]
                self.trainers = [self.lab.start("h0", [*command, "ranks", str(self.gate)], self.variables)]
            case "gloo":
                command = [sys.executable, "-m", "counterpoint.launchers", str(JOB), "ranks", str(self.gate)]
                self.trainers = self.lab.start_ranks(command, ["h0", "h1"], self.variables)
            case "elastic":
                self.serve(num_servers=0)
            case _:
                self.serve(num_servers=2)
        if self.kind in {"elastic", "server"}:
            self.start_workers()
        for trainer in self.trainers:
            trainer.wait_for("training", READY_S)

    def serve(self, num_servers):
        self.num_servers, self.path = num_servers, self.home / "job.json"
        write_job_file(JobEndpoint(elastic(num_servers).job, TcpAddress(self.lab.addresses["h0"], PORT)), self.path)
        common = ["--job", str(self.path), "--key-file", str(self.key), "--folder", str(self.home / "run")]
        self.members = [self.lab.start("h0", [*COUNTERPOINT, "serve", "coordinator", *common], self.variables)]
        for at in range(num_servers):
            words = ["--name", f"server-{at}", "--listen", f"tcp:h{at}:0"]
            self.members.append(
                self.lab.start(f"h{at}", [*COUNTERPOINT, "serve", "server", *common, *words], self.variables)
            )
        for member in self.members:
            member.wait_for("listens at", READY_S)

    def start_workers(self):
        command = [sys.executable, str(JOB), "worker", str(self.num_servers), str(self.path), str(self.key)]
        for at in range(2):
            words = [f"worker-{at}", str(self.gate)]
            self.trainers.append(self.lab.start(f"h{at}", [*command, *words], self.variables))

    def finish(self):
        """Open the gate; return the bits of all that trained, and what everybody has said besides."""
        self.gate.touch()
        if not self.trainers:
            self.start_workers()
        texts = [ended.text() for ended in wait_all(self.trainers, LONG_S)]
        return re.findall(r"bits (\w+)", "\n".join(texts))

    def listening(self, host):
        """Return where the processes of a host listen, as every user of it can read."""
        rows = Path(f"/proc/{self.lab.pid(host)}/net/tcp").read_text().splitlines()[1:]
        fields = [row.split() for row in rows]
        places = [address.split(":") for _, address, _, state, *_ in fields if state == LISTENING]
        return [
            (".".join(str(byte) for byte in reversed(bytes.fromhex(number))), int(port, 16)) for number, port in places
        ]

    def pids(self, host):
        """Return the processes of a host, by the numbers that they have there."""
        command = [sys.executable, "-I", "-c", "import os; print(*filter(str.isdigit, os.listdir('/proc')))"]
        return self.lab.run({host: command})[host].text().split()

    def remove(self):
        """End it, and remove its files."""
        for member in self.members:
            member.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def attack(job):
    """Return what two strangers have got: another user of the first host, and one on a host of the network."""
    outside = [place for host in ("h0", "h1") for place in job.listening(host) if not place[0].startswith("127.")]
    targets = {"h0": sorted({*job.listening("h0"), *outside}), "h2": outside}
    more = {"h0": [str(job.folder), ",".join(job.pids("h0"))], "h2": []}
    running = [
        job.lab.start(
            host,
            [sys.executable, str(ATTACK), str(STRANGER), ",".join(f"{a}:{p}" for a, p in places), *more[host]],
            {"PYTHONPATH": job.variables["PYTHONPATH"]},
        )
        for host, places in targets.items()
    ]
    return targets, [json.loads(ended.text().splitlines()[-1]) for ended in wait_all(running, LONG_S)]


def train_undisturbed(lab, kind):
    """Return the bits of a job of the same kind that nobody attacks."""
    job = HeldJob(lab, kind)
    try:
        job.gate.touch()
        job.start()
        return job.finish()
    finally:
        job.remove()


def require_greetings_only(answers, places):
    """Every place was tried, and none has said more than a greeting and a refusal."""
    assert set(answers) == {f"{host}:{port}" for host, port in places}
    found = [bytes.fromhex(text) for said in answers.values() for text in said.values()]
    assert all(is_greeting(answer) for answer in found), found


def is_greeting(answer):
    """Whether a port has said nothing, or no more than its own greeting and a refusal of zeros."""
    return not answer or (
        answer[:6] in {b"CPWS\1\1", b"CPWS\1\0"}
        and len(answer) in {HELLO_BYTES, HELLO_BYTES + PROOF_BYTES}
        and not any(answer[HELLO_BYTES:])
    )


@pytest.fixture
def held(permitted, request):
    with Lab(hosts=3) as lab:
        job = HeldJob(lab, request.param)
        yield job
        job.remove()


@pytest.mark.parametrize("held", KINDS, indirect=True)
def test_strangers_get_nothing_of_a_job_and_change_no_bit_of_it(held):
    held.start()
    targets, results = attack(held)
    assert all(member.process.poll() is None for member in [*held.members, *held.trainers])
    attacked = held.finish()
    assert [result["got"] for result in results] == [[], []]
    assert [result["uid"] for result in results] == [STRANGER] * 2
    for places, result in zip(targets.values(), results, strict=True):
        require_greetings_only(result["answers"], places)
    if held.kind != "shm":
        assert all(result["connected"] for result in results)
    held.remove()
    expected = train_undisturbed(held.lab, held.kind)
    assert len(attacked) == 2
    assert attacked == expected == [attacked[0]] * 2
