"""Time work repeatedly, after warm-up, under the conditions of training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeAlias, TypeVar, final

import torch

from counterpoint.device.event_clock import EventClock
from counterpoint.device.select import accelerator_for
from counterpoint.launchers.variables import allocator_variables
from counterpoint.runtime.malloc import heap_of_process

T = TypeVar("T")
Clock: TypeAlias = Callable[[], float] | EventClock
"""Tells seconds, or marks a point of a device's work."""


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
    """Return the clock of a device: events, which let it work on while they are passed.

    On a CPU with one thread it reads that thread's CPU time, so that other processes of the machine only matter through
    caches and memory bandwidth.
    """
    if device.type == "cpu":
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    return EventClock(accelerator_for(device))


@final
class Stopwatch:
    """Times pieces of work, one after the other; those on a device are read when all of them are launched.

    Args:
        clock: of the device that works.

    Example:
        >>> watch = Stopwatch(iter([1.0, 3.0, 3.0, 7.0]).__next__)
        >>> first = watch.time_all([list, list])
        >>> watch.read()[first]
        [2.0, 4.0]
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._moments: list[Any] = []  # of the start and the end of each piece

    def time_all(self, works: Iterable[Callable[[], object]]) -> slice:
        """Do some pieces of work; return where their times are."""
        first = len(self._moments) // 2
        for work in works:
            self._moments.append(self.clock())
            work()
            self._moments.append(self.clock())
        return slice(first, len(self._moments) // 2)

    def read(self) -> list[float]:
        """Return the seconds of all pieces; wait for a device."""
        seconds = self.clock.read(self._moments) if isinstance(self.clock, EventClock) else self._moments
        return [ended_s - began_s for began_s, ended_s in zip(seconds[::2], seconds[1::2], strict=True)]


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
