"""A worker on a host of the lab: ``far.py WORKER CONTACT KEY WHAT FOLDER``; it says what it has pushed and pulled."""

import sys
import time
from pathlib import Path

import torch
from turn import await_file, go_on, leave, measured

from counterpoint.server.choices import Adagrad, Constant, Sgd
from counterpoint.server.hosting import join, read_contact
from counterpoint.server.wire.key import read_key

NUM_ROWS, WIDTH, SIZE, BATCH_ROWS = 10_000_000, 32, 1 << 22, 40_000
TOUCHED = (100, 1_000, 10_000, 100_000)
WARM_UP, STEPS = 2, 6


def link_bytes():
    """Return what this host has sent and received."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "eth0":
            return int(figures.split()[8]), int(figures.split()[0])
    raise RuntimeError("this host has no eth0: run me in the lab")


def some_rows(count, draw):
    """Return that many rows, or a few less, ascending."""
    return torch.randint(0, NUM_ROWS, (count,), generator=draw).unique()


def on_table(session, count, draw):
    """Return what a step does: rows are pulled, and a gradient of them is pushed."""

    def step(_):
        rows = some_rows(count, draw)
        values = session.pull("table", rows=rows).wait().values
        session.push("table", values * 0.01, rows=rows).wait()
        return len(rows)

    return step


def on_tensor(session):
    """Return what a step does: the weights are pulled while the gradient before them is on its way."""
    weights = torch.zeros(SIZE)
    gradient, pushing = torch.ones(SIZE), []

    def step(_):
        pulling = session.pull("weights", out=weights)
        pulling.wait()
        while pushing:
            pushing.pop().wait()
        pushing.append(session.push("weights", gradient))
        return 0.0

    return step


def count_bytes(session, folder):
    """Leave what crossed the link in steps that touch few rows and many."""
    found, draw = {}, torch.Generator().manual_seed(1)
    (folder / "ready.worker-0").touch()
    await_file(folder / "go")
    for count in TOUCHED:
        step = on_table(session, count, draw)
        step(0)
        before, began = link_bytes(), time.perf_counter()
        touched = [step(0) for _ in range(STEPS)]
        took, after = time.perf_counter() - began, link_bytes()
        sent, received = (int(now) - then for now, then in zip(after, before, strict=True))
        found[str(count)] = {"touched": sum(touched), "sent": sent, "received": received, "seconds": took}
    leave(folder, "worker-0", found)


def main(worker, contact, key, what, folder):
    torch.set_num_threads(1)
    folder = Path(folder)
    with join(read_contact(Path(contact)), f"worker-{worker}", read_key(Path(key))) as session:
        if what == "dense":
            session.init("weights", torch.zeros(SIZE), Sgd(0.01))
            step = on_tensor(session)
        else:
            session.init_rows("table", NUM_ROWS, WIDTH, torch.float32, Adagrad(0.01), Constant(0.0))
            step = on_table(session, BATCH_ROWS, torch.Generator().manual_seed(int(worker)))
        if what == "bytes":
            count_bytes(session, folder)
        else:
            go_on(folder, step, measured(folder, f"worker-{worker}", step, warm_up=WARM_UP, steps=STEPS))


if __name__ == "__main__":
    main(*sys.argv[1:])
