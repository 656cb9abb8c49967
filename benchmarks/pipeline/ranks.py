"""One rank of one contender: runs some steps whenever it is its turn, and writes seconds, losses and memory as JSON."""

import json
import statistics
import sys
import time
from pathlib import Path

import contenders
import torch
from turn_taking import wait_for_turns

WARM_UP, STEPS = 3, 3


def field_bytes(path, name):
    with Path(path).open() as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def peak_bytes():
    """Return the peak memory of this process, in which currently shared pages count proportionally."""
    rollup = "/proc/self/smaps_rollup"
    shared = field_bytes(rollup, "Rss") - field_bytes(rollup, "Pss")
    return field_bytes("/proc/self/status", "VmHWM") - shared


def main(kind, name, folder, size):
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(1)
    shape = contenders.SHAPES[size]
    rank, folder, side = contenders.rank_from_env(), Path(folder), getattr(contenders, kind)(name, shape)
    losses, seconds = [], []
    for number, _ in enumerate(wait_for_turns(folder, rank, side.drain_incoming)):
        took = []
        for _ in range(STEPS if number else WARM_UP):
            batch = contenders.draw_batch(shape, draw)
            began = time.perf_counter()
            losses.append(side.step(batch))
            took.append(time.perf_counter() - began)
        if number:
            seconds.append(statistics.median(took))
    found = {"seconds": seconds, "losses": losses, "bytes": peak_bytes()}
    side.close()
    (folder / f"found.{rank}").write_text(json.dumps(found))
    (folder / "done").write_bytes(b"d")


if __name__ == "__main__":
    main(*sys.argv[1:])
