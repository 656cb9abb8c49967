"""Many simulated worlds, in as many processes as there are cores: ``make soak``, or ``make soak SEEDS=40000:100000``.

It says how far it is; whoever stops it begins there again.
"""

import argparse
import multiprocessing
import os
import sys
import time

import torch

from counterpoint.testing.ps_simulator.simulate import simulate

CHUNK, SAID_EVERY = 50, 1000


def broken(seeds):
    """Return the seeds of a range in which something was not as it must be, each with what was found."""
    torch.set_num_threads(1)
    return [(seed, result) for seed in seeds if (result := simulate(seed).violations)]


def parsed(text):
    """Return ``low:high`` as a range."""
    low, _, high = text.partition(":")
    return range(int(low), int(high))


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main():
    given = argparse.ArgumentParser(prog="soak", description=__doc__)
    given.add_argument("seeds", type=parsed, help="low:high, for example 0:100000")
    given.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = given.parse_args()
    seeds, began, num_broken = options.seeds, time.perf_counter(), 0
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for chunk, worlds in zip(chunks, pool.imap(broken, chunks), strict=True):
            num_broken += len(worlds)
            for seed, result in worlds:
                say(f"seed {seed}: {'; '.join(result)}")
            if chunk.stop % SAID_EVERY == 0 or chunk is chunks[-1]:
                took_s = time.perf_counter() - began
                say(f"seeds {seeds.start} to {chunk.stop}: {num_broken} with violations, {took_s:.0f} s")
    sys.exit(num_broken > 0)


if __name__ == "__main__":
    main()
