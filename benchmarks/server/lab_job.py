"""Servers and workers on simulated hosts: bytes on a worker's link, and scaling with more servers."""

import os
import secrets
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from timed_run import run_contenders

from benchmarks.lab import Lab
from counterpoint.errors import LaunchError
from counterpoint.ps.consistency import Asp
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.process.job_file import JobEndpoint, write_job_file
from counterpoint.rpc.address import TcpAddress

HERE, PORT, WORKERS = Path(__file__).parent, 4100, 4
FAST, SLOW = 1000, 550
"""Link rates in Mbit/s: that of the claim, and a slower one that needs less CPU time.

At even lower rates the lab splits the kernel's segments of 64 KiB, which takes more CPU time than the servers.
"""
CASES, SERVERS = (("dense", FAST), ("rows", FAST), ("dense", SLOW), ("rows", SLOW)), (1, 2, 4)
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class UsageSample:
    """CPU seconds used by all processes of a job, and bytes sent by its servers, at one time."""

    at_s: float
    cores_s: float
    sent_bytes: int


class LabJob:
    """A job's coordinator and servers, and its workers, each on a separate host."""

    def __init__(self, lab, folder, num_servers):
        self.lab, self.folder, self.num_servers = lab, folder, num_servers
        self.key = folder / "key"
        self.key.touch(0o600)
        self.key.write_text(secrets.token_hex(32))
        self.contact = folder / "job.json"
        place = TcpAddress(lab.addresses["h0"], PORT)
        job = JobConfig("bench", Asp(), num_servers=num_servers, is_logged=False, is_replicated=False)
        write_job_file(JobEndpoint(job, place), self.contact)
        self.running = [self._serve("h0", "coordinator")]
        for index in range(num_servers):
            host = f"h{index}"
            listen = f"tcp:{lab.addresses[host]}:0"
            self.running.append(self._serve(host, "server", "--name", f"server-{index}", "--listen", listen))

    def _serve(self, host, *words):
        told = ("--job", str(self.contact), "--key-file", str(self.key))
        command = [sys.executable, "-m", "counterpoint", "serve", *words, *told]
        return self.lab.start(host, command, {"OMP_NUM_THREADS": "1"})

    def start_worker(self, worker, *words):
        """Start a worker on a separate host, and return the host."""
        host = f"h{self.num_servers + worker}"
        command = [
            sys.executable,
            str(HERE / "lab_worker.py"),
            str(worker),
            str(self.contact),
            str(self.key),
            *map(str, words),
        ]
        self.running.append(self.lab.start(host, command, {"OMP_NUM_THREADS": "1"}))
        return host

    def sample_usage(self):
        children = process_tree([one.process.pid for one in self.running])
        sent = sum(self.lab.traffic(f"h{index}").sent_bytes for index in range(self.num_servers))
        return UsageSample(time.perf_counter(), sum(map(cpu_s, children)), sent)

    def check(self):
        for one in self.running:
            if one.process.poll() is not None:
                raise LaunchError(f"{one.name} ended with {one.process.poll()}:\n{one.ended().last_lines()}")


def process_tree(pids):
    """Return these processes and all their descendants."""
    found, parents = set(pids), {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def cpu_s(pid):
    """Return the CPU seconds of a process."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return 0.0


@contextmanager
def lab_job(num_servers, num_workers, rate=FAST):
    with (
        tempfile.TemporaryDirectory(prefix="counterpoint-") as folder,
        Lab(hosts=num_servers + num_workers, rate=f"{rate}mbit") as lab,
    ):
        yield LabJob(lab, Path(folder), num_servers)


def measure_row_bytes():
    """Return the bytes on a worker's link for steps with few and with many rows of a table."""
    with lab_job(1, 1) as job:
        job.start_worker(0, "bytes", job.folder)
        found, _ = run_contenders(job.folder, ["worker-0"], job.check)
    return found["worker-0"]


def measure_throughput(model, rate, num_servers):
    """Return the steps per second of all workers, each a pull and a push, and the resources used."""
    with lab_job(num_servers, WORKERS, rate) as job:
        for worker in range(WORKERS):
            job.start_worker(worker, model, job.folder)
        noted, names = [], [f"worker-{worker}" for worker in range(WORKERS)]

        def check():
            job.check()
            if not noted and (job.folder / "go").exists():
                noted.append(job.sample_usage())

        found, _ = run_contenders(job.folder, names, check)
        noted.append(job.sample_usage())
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


def measure_scaling(cases, all_servers, rounds, tell):
    """Return runs by model, link rate and number of servers."""
    found = {}
    for number in range(rounds):
        for model, rate in cases:
            for servers in all_servers:
                tell(f"round {number + 1}, {model} at {rate} Mbit/s, {servers} servers")
                found.setdefault((model, rate, servers), []).append(measure_throughput(model, rate, servers))
    return found
