"""One rank of one turn of one side: it trains and prints seconds, losses and memory as JSON."""

import json
import sys
import time
from pathlib import Path

import sides
import torch

WARM_UP, STEPS = 3, 16


def field_bytes(path, name):
    with Path(path).open() as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def peak_bytes():
    """Return the most memory that this process has had at once, of what it shares now only its part."""
    rollup = "/proc/self/smaps_rollup"
    shared = field_bytes(rollup, "Rss") - field_bytes(rollup, "Pss")
    return field_bytes("/proc/self/status", "VmHWM") - shared


def main(kind, name):
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(1)
    side = getattr(sides, kind)(name)
    losses, seconds = [], []
    for number in range(WARM_UP + STEPS):
        drawn = torch.randint(0, sides.SHAPE.num_tokens, (sides.BATCH, sides.SHAPE.context + 1), generator=draw)
        began = time.perf_counter()
        losses.append(side.step((drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())))
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - began)
    found = {"rank": sides.own_rank(), "seconds": seconds, "losses": losses, "bytes": peak_bytes()}
    side.close()
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
