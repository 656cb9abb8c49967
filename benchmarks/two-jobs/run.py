"""Two jobs and two workers: each job with its own half, one after the other, or both sharing who is free."""

import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from jobs import EPOCH_PORTIONS, EPOCHS, TIMED, UNTIMED, job_of
from working import work

from counterpoint.errors import LaunchError
from counterpoint.launchers.pooled import WorkerPool
from counterpoint.launchers.serving import start
from counterpoint.server.hosting import join, read_contact
from counterpoint.server.working.pool import Want
from counterpoint.testing.claims import Options, Result

ROUNDS, WORKERS, LEAST = 6, 2, 0.15
DEADLINE_S = 300.0
ALONE, HALVES, ELASTIC = "one after the other", "at once, fixed halves", "elastic"
WAYS = (ALONE, HALVES, ELASTIC)


def seconds(way, pool, names=TIMED):
    """Return how long all jobs take together, from when the first begins; their servers are there before."""
    most = WORKERS if way == ELASTIC else WORKERS // len(names)
    with ExitStack() as stack:
        contacts = {name: stack.enter_context(start(job_of(name))).contact_path for name in names}
        for name, contact in contacts.items():
            await_servers(name, contact)
        began = time.perf_counter()
        for contact in contacts.values():
            pool.begin(Want(str(contact), most=most))
            if way == ALONE:
                pool.wait(DEADLINE_S)
        for _ in () if way == ALONE else contacts:
            pool.wait(DEADLINE_S)
        took_s = time.perf_counter() - began
        for name, contact in contacts.items():
            require_all(name, contact)
    return took_s


def await_servers(name, contact):
    """The servers of a job are there, as they are for whoever runs them as a service."""
    with join(read_contact(contact), f"first of {name}"):
        pass


def require_all(name, contact):
    """Every portion has been trained; what was given back counts again."""
    wanted = EPOCHS[name] * EPOCH_PORTIONS
    trained = sum(int(path.name.rpartition(".")[2]) for path in contact.parent.glob("trained.*"))
    if trained < wanted:
        raise LaunchError(f"{name} has trained {trained} portions, of {wanted}")


def measure(options: Options) -> Result:
    found, ways = {way: [] for way in WAYS}, list(WAYS)
    with WorkerPool(WORKERS, work) as pool:
        options.tell("nothing yet: every worker has trained once before")
        seconds(HALVES, pool, UNTIMED)
        for number in range(max(3, options.rounds or ROUNDS)):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                options.tell(f"round {number + 1}, {way}")
                found[way].append(seconds(way, pool))
    rows, missed = [], []
    for way, took in found.items():
        each = [1 - a / b for a, b in zip(took, found[ALONE], strict=True)]
        less, spread = statistics.median(each), f"{min(each):.0%} to {max(each):.0%}"
        rows.append(
            (way, f"{statistics.median(took):.1f}", f"{min(took):.1f} to {max(took):.1f}", f"{less:.0%}", spread)
        )
        if way == ELASTIC and not less >= LEAST:
            missed.append(f"elastic takes {less:.0%} less than one after the other, at least {LEAST:.0%} promised")
    columns = ("two jobs", "s in all", "spread", "less than one after the other", "by round")
    return Result(columns, tuple(rows), tuple(missed), found)
