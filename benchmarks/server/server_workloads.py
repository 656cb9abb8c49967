"""Workloads: D and the MLP of the data-parallel benchmark, split into the workers' batches."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "data-parallel"))

from workloads import NUM_ROWS, RANKS, WIDTH, WORKLOADS, batches, build_model

__all__ = [
    "NUM_ROWS",
    "RANKS",
    "STEPS",
    "TABLE",
    "WARM_UP",
    "WIDTH",
    "WORKLOAD_KEYS",
    "batch_size",
    "build_model",
    "worker_batches",
    "workload",
]

WORKLOAD_KEYS = {"D": "D", "MLP": "A"}
"""Name here, and key in the data-parallel benchmark."""
STEPS = {"D": 600, "MLP": 10}
"""Enough for several seconds, since the speed of a shared machine changes within seconds."""
WARM_UP = {"D": 24, "MLP": 3}
NUM_DISTINCT_BATCHES = {"D": 20, "MLP": 8}
"""Number of a worker's batches, which repeat: all rows have been used before steps are timed."""
TABLE = "table.weight"


def workload(name):
    return WORKLOADS[WORKLOAD_KEYS[name]]


def batch_size(name):
    """Return the samples of one worker's batch."""
    return workload(name).size // RANKS


def worker_batches(name, worker):
    """Return a function from the step number to the worker's inputs and targets."""
    size, count = batch_size(name), NUM_DISTINCT_BATCHES[name]
    low = worker * size
    parts = [(one[low : low + size], two[low : low + size]) for one, two in batches(workload(name), count)]
    return lambda step: parts[step % count]
