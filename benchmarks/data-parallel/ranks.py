"""One rank of one turn of one side: it trains and prints seconds, losses and memory as JSON.

Called with the side, the workload, threads, and ``kept`` where glibc keeps what is freed.
"""

import ctypes
import json
import sys
import time
from pathlib import Path

import torch
from sides import SIDES, own_rank
from workloads import WORKLOADS, batches

WARM_UP, COMPARED = 4, 20


def keep_freed_memory():
    trim_threshold, mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(mmap_max, 0)


def proportional_bytes():
    """Return the memory of this process, of what it shares its part."""
    with Path("/proc/self/smaps_rollup").open() as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def main(name, letter, threads, memory):
    if memory == "kept":
        keep_freed_memory()
    torch.set_num_threads(int(threads))
    workload = WORKLOADS[letter]
    given = batches(workload, WARM_UP + max(workload.steps, COMPARED))
    side = SIDES[name](workload)
    losses, seconds = [], []
    for number, batch in enumerate(given):
        began = time.perf_counter()
        losses.append(side.step(batch))
        if WARM_UP <= number < WARM_UP + workload.steps:
            seconds.append(time.perf_counter() - began)
    taken = proportional_bytes()
    found = {"seconds": seconds, "losses": [side.mean(loss) for loss in losses[:COMPARED]], "bytes": taken}
    side.close()
    sys.stdout.write(f"{json.dumps({'rank': own_rank(), **found})}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
