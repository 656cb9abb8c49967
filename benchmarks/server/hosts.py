"""Servers and workers on hosts of the lab: bytes that cross a worker's link, and what more servers come to."""

import os
import secrets
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from turn import conduct

from benchmarks.lab import Lab
from counterpoint.errors import LaunchError
from counterpoint.server.hosting.contact import Contact, write_contact
from counterpoint.server.job import Asp, Job
from counterpoint.server.wire.place import TcpPlace

HERE, PORT, WORKERS = Path(__file__).parent, 4100, 4
FAST, SLOW = 1000, 550
"""Of the links, in Mbit/s: as promised, and slower, so that the cores of this machine are less short.

On links that are slower still the lab cuts up what the kernel sends in one piece of 64 KiB, which takes more of the
cores than the servers do.
"""
CELLS, SERVERS = (("dense", FAST), ("rows", FAST), ("dense", SLOW), ("rows", SLOW)), (1, 2, 4)
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Noted:
    """What all processes of a job have taken of the cores, and all servers have sent, by a moment."""

    at_s: float
    cores_s: float
    sent_bytes: int


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

    def note(self):
        children = family([one.process.pid for one in self.running])
        sent = sum(self.lab.traffic(f"h{index}").sent_bytes for index in range(self.num_servers))
        return Noted(time.perf_counter(), sum(map(cores_s, children)), sent)

    def check(self):
        for one in self.running:
            if one.process.poll() is not None:
                raise LaunchError(f"{one.name} ended with {one.process.poll()}:\n{one.ended().last_lines()}")


def family(pids):
    """Return these processes and all that have come of them."""
    found, parents = set(pids), {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def cores_s(pid):
    """Return how long a process has computed."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return 0.0


@contextmanager
def far(num_servers, num_workers, rate=FAST):
    with (
        tempfile.TemporaryDirectory(prefix="counterpoint-") as folder,
        Lab(hosts=num_servers + num_workers, rate=f"{rate}mbit") as lab,
    ):
        yield Far(lab, Path(folder), num_servers)


def row_bytes():
    """Return what crosses a worker's link in steps that touch few rows of a table and many."""
    with far(1, 1) as job:
        job.work(0, "bytes", job.folder)
        found, _ = conduct(job.folder, ["worker-0"], job.check)
    return found["worker-0"]


def carried(model, rate, num_servers):
    """Return what all workers have come to in a second together, each step a pull and a push, and what it took."""
    with far(num_servers, WORKERS, rate) as job:
        for worker in range(WORKERS):
            job.work(worker, model, job.folder)
        noted, names = [], [f"worker-{worker}" for worker in range(WORKERS)]

        def check():
            job.check()
            if not noted and (job.folder / "go").exists():
                noted.append(job.note())

        found, _ = conduct(job.folder, names, check)
        noted.append(job.note())
    first, last = noted
    steps_per_s = sum(one["steps"] / one["elapsed"] for one in found.values())
    lasted_s = last.at_s - first.at_s
    link_bytes = lasted_s * num_servers * rate * 1e6 / 8
    return {
        "steps_per_s": steps_per_s,
        "cores": (last.cores_s - first.cores_s) / lasted_s,
        "links": (last.sent_bytes - first.sent_bytes) / link_bytes,
        "sent_bytes_per_step": (last.sent_bytes - first.sent_bytes) / lasted_s / steps_per_s,
    }


def scaling(rounds, tell):
    """Return turns by model, rate of the links and number of servers."""
    found = {}
    for number in range(rounds):
        for model, rate in CELLS:
            for servers in SERVERS:
                tell(f"round {number + 1}, {model} at {rate} Mbit/s, {servers} servers")
                found.setdefault((model, rate, servers), []).append(carried(model, rate, servers))
    return found
