"""Two jobs and two workers: each job with its own half, one after the other, or both sharing who is free."""

import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from jobs import PORTIONS, job_of
from working import work

from counterpoint.errors import LaunchError
from counterpoint.launchers.pooled import WorkerPool
from counterpoint.launchers.serving import start
from counterpoint.server.hosting import join, read_contact
from counterpoint.server.working.pool import Want
from counterpoint.testing.claims import Options, Result

ROUNDS, WORKERS, LEAST = 3, 2, 0.15
DEADLINE_S, SAID_S, LOOK_S = 300.0, 20.0, 0.02
WAYS = ("one after the other", "at once, fixed halves", "elastic")


def seconds(way, pool):
    """Return how long both jobs take together, from when the first begins; their servers are there before."""
    most = WORKERS if way == "elastic" else WORKERS // 2
    with ExitStack() as stack:
        contacts = {name: stack.enter_context(start(job_of(name))).contact_path for name in PORTIONS}
        for name, contact in contacts.items():
            await_servers(name, contact)
        began = time.perf_counter()
        if way == "one after the other":
            for contact in contacts.values():
                pool.begin(Want(str(contact), most=most))
                pool.wait(DEADLINE_S)
        else:
            for contact in contacts.values():
                pool.begin(Want(str(contact), most=most))
            for _ in contacts:
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
    """Every portion has been trained, as soon as the last worker has said so; what was given back counts again."""
    until, trained = time.monotonic() + SAID_S, 0
    while trained < PORTIONS[name]:
        if time.monotonic() > until:
            raise LaunchError(f"{name} has trained {trained} portions, of {PORTIONS[name]}")
        time.sleep(LOOK_S)
        trained = sum(int(path.name.rpartition(".")[2]) for path in contact.parent.glob("trained.*"))


def measure(options: Options) -> Result:
    found, ways = {way: [] for way in WAYS}, list(WAYS)
    with WorkerPool(WORKERS, work) as pool:
        for number in range(max(3, options.rounds or ROUNDS)):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                options.tell(f"round {number + 1}, {way}")
                found[way].append(seconds(way, pool))
    rows, missed = [], []
    for way, took in found.items():
        less = 1 - statistics.median(a / b for a, b in zip(took, found["one after the other"], strict=True))
        rows.append((way, f"{statistics.median(took):.1f}", f"{min(took):.1f} to {max(took):.1f}", f"{less:.0%}"))
        if way == "elastic" and not less >= LEAST:
            missed.append(f"elastic takes {less:.0%} less than one after the other, at least {LEAST:.0%} promised")
    return Result(
        ("two jobs", "s in all", "spread", "less than one after the other"), tuple(rows), tuple(missed), found
    )
