"""What is trained: D and the MLP of the data-parallel benchmark, cut into the workers' own batches."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "data-parallel"))

from workloads import NUM_ROWS, RANKS, WIDTH, WORKLOADS, batches, build_model

__all__ = [
    "WORKLOAD_KEYS",
    "NUM_ROWS",
    "RANKS",
    "STEPS",
    "TABLE",
    "WARM_UP",
    "WIDTH",
    "batch_size",
    "build_model",
    "worker_batches",
    "workload",
]

WORKLOAD_KEYS = {"D": "D", "MLP": "A"}
"""What is said here, and its letter there."""
STEPS = {"D": 600, "MLP": 10}
"""Seconds of either, since the speed of a shared machine changes within less."""
WARM_UP = {"D": 24, "MLP": 3}
NUM_DISTINCT_BATCHES = {"D": 20, "MLP": 8}
"""A worker's batches, after which the first comes again: all rows have been looked up when steps are timed."""
TABLE = "table.weight"


def workload(name):
    return WORKLOADS[WORKLOAD_KEYS[name]]


def batch_size(name):
    """Return the samples of one worker's batch."""
    return workload(name).size // RANKS


def worker_batches(name, worker):
    """Return a function from the number of a step to the worker's inputs and targets."""
    size, count = batch_size(name), NUM_DISTINCT_BATCHES[name]
    low = worker * size
    parts = [(one[low : low + size], two[low : low + size]) for one, two in batches(workload(name), count)]
    return lambda step: parts[step % count]
