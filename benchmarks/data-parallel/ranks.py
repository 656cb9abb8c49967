"""One rank of one contender's run: trains and prints seconds, losses and memory as JSON.

Arguments: contender, workload, threads, ``kept`` to retain freed memory, and ``quick`` for a few steps only.
"""

import ctypes
import json
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from contenders import CONTENDERS, rank_from_env
from workloads import WORKLOADS, batches

from counterpoint.runtime.malloc import MALLOPT_PARAMETERS, RETAIN_FREED

WARM_UP, NUM_COMPARED, QUICK_STEPS = 4, 20, 2
PAUSE_S = 0.02


class MemorySampler:
    """Samples of this process's proportional set size; the kernel records no peak of it."""

    def __init__(self):
        self.samples = []

    def sample(self):
        with Path("/proc/self/smaps_rollup").open() as lines:
            found = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        self.samples.append((time.monotonic(), found))

    @contextmanager
    def sampling(self):
        """Sample repeatedly inside the block; not used while steps are timed."""
        over = threading.Event()

        def watch():
            while not over.wait(PAUSE_S):
                self.sample()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.sample()


def keep_freed_memory():
    """Configure glibc as a Counterpoint training does."""
    libc = ctypes.CDLL(None)
    for name, value in RETAIN_FREED.items():
        libc.mallopt(MALLOPT_PARAMETERS[name], value)


def main(name, letter, threads, allocator, extent):
    if allocator == "kept":
        keep_freed_memory()
    torch.set_num_threads(int(threads))
    workload, memory = WORKLOADS[letter], MemorySampler()
    num_steps, num_compared = (QUICK_STEPS,) * 2 if extent == "quick" else (workload.steps, NUM_COMPARED)
    given = batches(workload, WARM_UP + max(num_steps, num_compared))
    timed = slice(WARM_UP, WARM_UP + num_steps)
    with memory.sampling():
        side = CONTENDERS[name](workload)
        losses = [side.step(batch) for batch in given[: timed.start]]
    seconds = []
    for batch in given[timed]:
        began = time.perf_counter()
        losses.append(side.step(batch))
        seconds.append(time.perf_counter() - began)
    with memory.sampling():
        losses += [side.step(batch) for batch in given[timed.stop :]]
        means = [side.mean_loss(loss) for loss in losses[:num_compared]]
        side.close()
    sys.stdout.write(
        f"{json.dumps({'rank': rank_from_env(), 'seconds': seconds, 'losses': means, 'bytes': memory.samples})}\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
