"""One rank of one turn of one side: it trains and prints seconds, losses and memory as JSON.

Called with the side, the workload, threads, and ``kept`` where glibc keeps what is freed.
"""

import ctypes
import json
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from sides import SIDES, own_rank
from workloads import WORKLOADS, batches

from counterpoint.runtime.heap import KEEPING, PARAMETERS

WARM_UP, COMPARED = 4, 20
PAUSE_S = 0.02


class Memory:
    """The bytes of this process at many times, of what it shares its part; the kernel keeps no peak of that."""

    def __init__(self):
        self.seen = []

    def look(self):
        with Path("/proc/self/smaps_rollup").open() as lines:
            found = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        self.seen.append((time.monotonic(), found))

    @contextmanager
    def watched(self):
        """Look again and again inside; never while steps are timed."""
        over = threading.Event()

        def watch():
            while not over.wait(PAUSE_S):
                self.look()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.look()


def keep_freed_memory():
    """Set up glibc as a training here does."""
    libc = ctypes.CDLL(None)
    for name, value in KEEPING.items():
        libc.mallopt(PARAMETERS[name], value)


def main(name, letter, threads, allocator):
    if allocator == "kept":
        keep_freed_memory()
    torch.set_num_threads(int(threads))
    workload, memory = WORKLOADS[letter], Memory()
    given = batches(workload, WARM_UP + max(workload.steps, COMPARED))
    timed = slice(WARM_UP, WARM_UP + workload.steps)
    with memory.watched():
        side = SIDES[name](workload)
        losses = [side.step(batch) for batch in given[: timed.start]]
    seconds = []
    for batch in given[timed]:
        began = time.perf_counter()
        losses.append(side.step(batch))
        seconds.append(time.perf_counter() - began)
    with memory.watched():
        losses += [side.step(batch) for batch in given[timed.stop :]]
        means = [side.mean(loss) for loss in losses[:COMPARED]]
        side.close()
    sys.stdout.write(f"{json.dumps({'rank': own_rank(), 'seconds': seconds, 'losses': means, 'bytes': memory.seen})}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
