"""Worker on a simulated host: ``lab_worker.py WORKER JOB_FILE KEY MODE FOLDER``; reports bytes pushed and pulled."""

import sys
import time
from itertools import cycle
from pathlib import Path

import torch
from timed_run import keep_stepping, time_steps, wait_for_file, write_result

from counterpoint.ps.process import join, read_job_file
from counterpoint.ps.update_rules import Adagrad, ConstantInit, Sgd
from counterpoint.rpc.job_key import read_key

NUM_ROWS, WIDTH, BATCH_ROWS = 10_000_000, 32, 40_000
LAYERS, LAYER_SIZE = 4, 1 << 20
"""Layers of 4 MiB each, large enough to be split over all servers."""
ROW_COUNTS = (100, 1_000, 10_000, 100_000)
WARM_UP, STEPS = 2, 10
NUM_DRAWN = WARM_UP + STEPS + 1
"""Number of steps with separate rows, drawn before the start as those of a dataset; later steps reuse them."""


def link_bytes():
    """Return the bytes that this host has sent and received."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "eth0":
            return int(figures.split()[8]), int(figures.split()[0])
    raise RuntimeError("this host has no eth0; run this script in benchmarks.lab")


def draw_rows(count, draw):
    """Return at most ``count`` distinct random rows, sorted."""
    return torch.randint(0, NUM_ROWS, (count,), generator=draw).unique()


def table_step(session, count, draw):
    """Return a step that pulls rows and pushes a gradient for them."""

    def step(_):
        rows = draw_rows(count, draw)
        values = session.pull("table", rows=rows).wait().values
        session.push("table", values * 0.01, rows=rows).wait()
        return len(rows)

    return step


def prefetching_table_step(session, count, draw):
    """Return a step as in training: the next step's rows are pulled before this step's gradient is pushed."""
    drawn = cycle([draw_rows(count, draw) for _ in range(NUM_DRAWN)])
    rows = next(drawn)
    pulling, pushing = session.pull("table", rows=rows), []

    def step(_):
        nonlocal rows, pulling
        values, pushed = pulling.wait().values, rows
        rows = next(drawn)
        pulling = session.pull("table", rows=rows)
        while pushing:
            pushing.pop().wait()
        pushing.append(session.push("table", values * 0.01, rows=pushed))
        return 0.0

    return step


def dense_step(session):
    """Return a step as in training: a layer's weights are pulled as soon as its gradient is pushed."""
    names = [f"layer-{index}" for index in range(LAYERS)]
    weights = {name: torch.zeros(LAYER_SIZE) for name in names}
    for name in names:
        session.init(name, weights[name], Sgd(0.01))
    gradient, pulling, pushing = torch.ones(LAYER_SIZE), {}, []

    def step(_):
        for name in names:
            if name in pulling:
                pulling.pop(name).wait()
        while pushing:
            pushing.pop().wait()
        for name in reversed(names):
            with session.batch():
                pushing.append(session.push(name, gradient))
                pulling[name] = session.pull(name, out=weights[name])
        return 0.0

    return step


def count_bytes(session, folder):
    """Write the bytes sent over the link by steps with few and with many rows."""
    results, draw = {}, torch.Generator().manual_seed(1)
    (folder / "ready.worker-0").touch()
    wait_for_file(folder / "go")
    for count in ROW_COUNTS:
        step = table_step(session, count, draw)
        step(0)
        before, started_s = link_bytes(), time.perf_counter()
        num_rows = [step(0) for _ in range(STEPS)]
        seconds, after = time.perf_counter() - started_s, link_bytes()
        sent, received = (int(now) - then for now, then in zip(after, before, strict=True))
        results[str(count)] = {"touched": sum(num_rows), "sent": sent, "received": received, "seconds": seconds}
    write_result(folder, "worker-0", results)


def main(worker, contact, key, what, folder):
    torch.set_num_threads(1)
    folder = Path(folder)
    with join(read_job_file(Path(contact)), f"worker-{worker}", read_key(Path(key))) as session:
        if what == "dense":
            step = dense_step(session)
        else:
            session.init_rows("table", NUM_ROWS, WIDTH, torch.float32, Adagrad(0.01), ConstantInit(0.0))
        if what == "bytes":
            count_bytes(session, folder)
            return
        if what == "rows":
            step = prefetching_table_step(session, BATCH_ROWS, torch.Generator().manual_seed(int(worker)))
        keep_stepping(folder, step, time_steps(folder, f"worker-{worker}", step, warm_up=WARM_UP, steps=STEPS))


if __name__ == "__main__":
    main(*sys.argv[1:])
