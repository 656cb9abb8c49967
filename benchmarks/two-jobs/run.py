"""Two jobs and two workers: sequential with fixed halves, concurrent with fixed halves, or elastic."""

import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from jobs import QUICK, SIZES, TIMED, UNTIMED, make_job
from train_job import train_job

from counterpoint.elastic.worker_allocation import JobDemand
from counterpoint.errors import LaunchError
from counterpoint.launchers.server_processes import start_servers
from counterpoint.launchers.worker_pool import WorkerPool
from counterpoint.ps.process import join, read_job_file
from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult

ROUNDS, WORKERS, MIN_TIME_SAVED = 6, 2, 0.15
DEADLINE_S = 300.0
SEQUENTIAL, FIXED_HALVES, ELASTIC = "one after the other", "at once, fixed halves", "elastic"
MODES = (SEQUENTIAL, FIXED_HALVES, ELASTIC)


def time_jobs(way, pool, names):
    """Return the seconds of all jobs together, with servers started before."""
    most = WORKERS if way == ELASTIC else WORKERS // len(names)
    with ExitStack() as stack:
        contacts = {name: stack.enter_context(start_servers(make_job(name))).contact_path for name in names}
        for name, contact in contacts.items():
            wait_for_servers(name, contact)
        began = time.perf_counter()
        for contact in contacts.values():
            pool.add_job(JobDemand(str(contact), max_workers=most))
            if way == SEQUENTIAL:
                pool.wait(DEADLINE_S)
        for _ in () if way == SEQUENTIAL else contacts:
            pool.wait(DEADLINE_S)
        took_s = time.perf_counter() - began
        for name, contact in contacts.items():
            check_all_trained(name, contact)
    return took_s


def wait_for_servers(name, contact):
    """Wait until the servers of a job are running."""
    with join(read_job_file(contact), f"first of {name}"):
        pass


def check_all_trained(name, contact):
    """Raise unless every data slice has been trained; slices that were returned and repeated count twice."""
    wanted = SIZES[name].epochs * SIZES[name].slices_per_epoch
    trained = sum(int(path.name.rpartition(".")[2]) for path in contact.parent.glob("trained.*"))
    if trained < wanted:
        raise LaunchError(f"{name} has trained {trained} of {wanted} data slices")


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    found, ways = {way: [] for way in MODES}, list(MODES)
    with WorkerPool(WORKERS, train_job) as pool:
        options.report_progress("warm-up: every worker trains once")
        time_jobs(FIXED_HALVES, pool, QUICK if options.is_quick else UNTIMED)
        for number in range(options.num_rounds(ROUNDS)):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                options.report_progress(f"round {number + 1}, {way}")
                found[way].append(time_jobs(way, pool, QUICK if options.is_quick else TIMED))
    rows, missed = [], []
    for way, took in found.items():
        each = [1 - a / b for a, b in zip(took, found[SEQUENTIAL], strict=True)]
        less, spread = statistics.median(each), f"{min(each):.0%} to {max(each):.0%}"
        rows.append(
            (way, f"{statistics.median(took):.1f}", f"{min(took):.1f} to {max(took):.1f}", f"{less:.0%}", spread)
        )
        if way == ELASTIC and not less >= MIN_TIME_SAVED:
            missed.append(
                f"elastic takes {less:.0%} less than one after the other, at least {MIN_TIME_SAVED:.0%} required"
            )
    columns = ("two jobs", "s in all", "spread", "less than one after the other", "by round")
    return BenchmarkResult(columns, tuple(rows), tuple(missed), found)
