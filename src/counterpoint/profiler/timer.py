"""Time work repeatedly, after warm-up, under the conditions of training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch

from counterpoint.device.select import accelerator_for
from counterpoint.launchers.variables import allocator_variables
from counterpoint.runtime.malloc import heap_of_process

T = TypeVar("T")
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class RepeatPolicy:
    """How often something is measured.

    Args:
        num_warmups: repetitions before the measured ones.
        min_repeats: measured repetitions at least.
        max_repeats: measured repetitions at most.
        budget_s: seconds after which no further repetition starts, once there are ``min_repeats``.
    """

    num_warmups: int = 2
    min_repeats: int = 3
    max_repeats: int = 15
    budget_s: float = 2.0

    def repeat(self, work: Callable[[], T]) -> list[T]:
        """Return the results of the measured repetitions."""
        for _ in range(self.num_warmups):
            work()
        began, results = time.perf_counter(), list[T]()
        while len(results) < self.max_repeats and (
            len(results) < self.min_repeats or time.perf_counter() - began < self.budget_s
        ):
            results.append(work())
        return results


def device_clock(device: torch.device) -> Clock:
    """Return a clock that waits for the device before it reads the time.

    On a CPU with one thread it reads that thread's CPU time, so that other processes of the machine only matter through
    caches and memory bandwidth.
    """
    if device.type == "cpu":
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    accelerator = accelerator_for(device)

    def clock() -> float:
        accelerator.synchronize()
        return time.perf_counter()

    return clock


def column_medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the median of each column."""
    return [median(column) for column in zip(*rows, strict=True)]


@contextmanager
def training_conditions(threads: int) -> Iterator[None]:
    """Compute with a number of threads and retain freed memory as training does; restore both afterwards."""
    previous_threads, heap = torch.get_num_threads(), None if allocator_variables() else heap_of_process()
    torch.set_num_threads(threads)
    if heap is not None:
        heap.retain()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        if heap is not None:
            heap.restore()
        torch.set_num_threads(previous_threads)
