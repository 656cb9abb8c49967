"""Servers and workers on hosts of the lab: bytes that cross a worker's link, and what more servers come to."""

import secrets
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from turn import conduct

from benchmarks.lab import Lab
from counterpoint.errors import LaunchError
from counterpoint.server.hosting.contact import Contact, write_contact
from counterpoint.server.job import Asp, Job
from counterpoint.server.wire.place import TcpPlace

HERE, RATE, PORT, WORKERS = Path(__file__).parent, "1gbit", 4100, 4
MODELS, SERVERS = ("dense", "rows"), (1, 2, 4)


class Far:
    """A job's coordinator and servers, each on a host of its own, and workers on others."""

    def __init__(self, lab, folder, num_servers):
        self.lab, self.folder, self.num_servers = lab, folder, num_servers
        self.key = folder / "key"
        self.key.touch(0o600)
        self.key.write_text(secrets.token_hex(32))
        self.contact = folder / "job.json"
        place = TcpPlace(lab.addresses["h0"], PORT)
        job = Job("bench", Asp(), num_servers=num_servers, is_logged=False, is_replicated=False)
        write_contact(Contact(job, place), self.contact)
        self.running = [self._serve("h0", "coordinator")]
        for index in range(num_servers):
            host = f"h{index}"
            listen = f"tcp:{lab.addresses[host]}:0"
            self.running.append(self._serve(host, "server", "--name", f"server-{index}", "--listen", listen))

    def _serve(self, host, *words):
        told = ("--job", str(self.contact), "--key-file", str(self.key))
        command = [sys.executable, "-m", "counterpoint", "serve", *words, *told]
        return self.lab.start(host, command, {"OMP_NUM_THREADS": "1"})

    def work(self, worker, *words):
        """A worker begins on a host of its own; returns the host."""
        host = f"h{self.num_servers + worker}"
        command = [
            sys.executable,
            str(HERE / "far.py"),
            str(worker),
            str(self.contact),
            str(self.key),
            *map(str, words),
        ]
        self.running.append(self.lab.start(host, command, {"OMP_NUM_THREADS": "1"}))
        return host

    def check(self):
        for one in self.running:
            if one.process.poll() is not None:
                raise LaunchError(f"{one.name} ended with {one.process.poll()}:\n{one.ended().last_lines()}")


@contextmanager
def far(num_servers, num_workers):
    with (
        tempfile.TemporaryDirectory(prefix="counterpoint-") as folder,
        Lab(hosts=num_servers + num_workers, rate=RATE) as lab,
    ):
        yield Far(lab, Path(folder), num_servers)


def row_bytes():
    """Return what crosses a worker's link in steps that touch few rows of a table and many."""
    with far(1, 1) as job:
        job.work(0, "bytes", job.folder)
        return conduct(job.folder, ["worker-0"], job.check)["worker-0"]


def steps_per_s(model, num_servers):
    """Return how many steps a second all workers have made together, each a pull and a push."""
    with far(num_servers, WORKERS) as job:
        for worker in range(WORKERS):
            job.work(worker, model, job.folder)
        found = conduct(job.folder, [f"worker-{worker}" for worker in range(WORKERS)], job.check)
    return sum(one["steps"] / one["elapsed"] for one in found.values())


def scaling(rounds, tell):
    """Return steps a second by model and number of servers."""
    found = {}
    for number in range(rounds):
        for model in MODELS:
            for servers in SERVERS:
                tell(f"round {number + 1}, {model}, {servers} servers")
                found.setdefault((model, servers), []).append(steps_per_s(model, servers))
    return found
