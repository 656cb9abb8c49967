"""Gradient buckets that all members of a group agree on: which gradients, in which order, and of which size.

The order is that in which the first member's gradients became ready; it is broadcast once (1). If the plan asks for
tuning, a few bucket sizes are tried in turn during training (2), and the members adopt the one whose slowest member is
fastest (3)::

    step   0      1 .. 4     5 6 7  8 9 10  ...  n      n+1 ...
          (1)     warm-up    size 0 size 1  ...  (3)    best size
                             '----- (2) 3 rounds ---'

Both (1) and (3) are small collectives that are started after the last bucket of a backward; their wait is that of its
reductions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

import torch
from torch import Tensor

from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.strategies.buckets import BucketConfig, ReadyGrad, assign_buckets, format_bytes

MIN_SPEEDUP_RATIO = 0.97
"""A candidate is adopted only if its step time is at most this fraction of the current one."""
StepTime: TypeAlias = float | Callable[[], float]
"""Seconds of a step, or what returns them once a device has ended it."""


@dataclass(slots=True)
class BucketAutotuner:
    """Tries candidates in turn while training continues, and records step times.

    All members of a group count the same steps, so that all use the same candidate in each step.

    Args:
        num_candidates: the first one is the current setting.
        warm_up: steps before the first trial.
        num_rounds: trials of each candidate.
        num_steps: steps of a trial; the first of them is not measured.
        seconds: step times, by candidate; a function returns one that a device has measured.
    """

    num_candidates: int
    warm_up: int = 4
    num_rounds: int = 3
    num_steps: int = 3
    step: int = 0
    seconds: dict[int, list[StepTime]] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether all have been tried; True for a single candidate."""
        return (
            self.num_candidates < 2
            or self.step >= self.warm_up + self.num_rounds * self.num_candidates * self.num_steps
        )

    @property
    def candidate(self) -> int:
        """The candidate of the next step.

        Example:
            >>> autotuner = BucketAutotuner(2, warm_up=1, num_rounds=2, num_steps=2)
            >>> [(autotuner.candidate, autotuner.record(1.0))[0] for _ in range(9)]
            [0, 0, 0, 1, 1, 0, 0, 1, 1]
        """
        step = self.step - self.warm_up
        return 0 if step < 0 or self.is_done else step // self.num_steps % self.num_candidates

    def record(self, seconds: StepTime) -> None:
        """Record the time of a step."""
        step = self.step - self.warm_up
        if step >= 0 and step % self.num_steps and not self.is_done:
            self.seconds.setdefault(self.candidate, []).append(seconds)
        self.step += 1

    def medians(self) -> list[float]:
        """Return the median step time of each candidate; wait for the device that has not ended the last of them."""
        times = (self.seconds.get(candidate, [0.0]) for candidate in range(self.num_candidates))
        return [median(time if isinstance(time, float) else time() for time in of_one) for of_one in times]


def choose_fastest(medians: Sequence[float]) -> int:
    """Return the candidate to adopt: the first, unless another is faster by more than noise.

    Example:
        >>> choose_fastest([1.0, 0.98, 1.2]), choose_fastest([1.0, 0.95, 0.9])
        (0, 2)
    """
    best = min(range(len(medians)), key=lambda candidate: medians[candidate])
    return best if medians[best] <= MIN_SPEEDUP_RATIO * medians[0] else 0


ElementRange: TypeAlias = tuple[int, int]
"""First element of a range in a flat buffer, and one past its last."""


def merge_ranges(ranges: Iterable[ElementRange]) -> list[ElementRange]:
    """Merge adjacent ranges.

    Example:
        >>> merge_ranges([(4, 6), (0, 2), (2, 4), (8, 9)])
        [(0, 6), (8, 9)]
    """
    merged: list[ElementRange] = []
    for start, stop in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def subtract_ranges(ranges: Iterable[ElementRange], removed: Sequence[ElementRange]) -> Iterator[ElementRange]:
    """Yield the parts of ranges that were not removed; each removed range lies within one of them.

    Example:
        >>> list(subtract_ranges([(0, 10), (20, 30)], [(2, 4), (20, 25)]))
        [(0, 2), (4, 10), (25, 30)]
    """
    for low, high in ranges:
        for start, stop in sorted(removed):
            if low <= start and stop <= high:
                if low < start:
                    yield low, start
                low = stop
        if low < high:
            yield low, high


def candidate_sizes(sizes: BucketConfig) -> list[BucketConfig]:
    """Return the bucket sizes to try: the given one, larger and smaller ones, and a single bucket."""
    single_bucket = BucketConfig(2**62, 2**62, 0.0, sizes.tune)
    sizes_bytes = [4 * sizes.bucket_bytes, sizes.bucket_bytes // 4, sizes.bucket_bytes // 16]
    return [
        sizes,
        *(BucketConfig(size, sizes.first_bytes, sizes.cycle_ms, sizes.tune) for size in sizes_bytes),
        single_bucket,
    ]


BucketAssignment: TypeAlias = tuple[tuple[int, ...], ...]
"""The gradients of each bucket, by index, in the order in which buckets are started."""

LOG = logging.getLogger("counterpoint.buckets")


@dataclass(frozen=True, slots=True)
class GradSize:
    """What is known of a gradient before any backward: its flat gradient, and its size."""

    flat_index: int
    num_bytes: int


class BucketPlan:
    """The buckets of one group, equal on all members.

    Args:
        fabric: this rank's connection to the others.
        group: the members.
        sizes: of buckets, from the plan.
        grad_sizes: of every gradient that may be in a bucket; equal on all members.
        label: what is reduced, for errors and the log.
    """

    def __init__(
        self, fabric: Fabric, group: Group, sizes: BucketConfig, grad_sizes: Sequence[GradSize], label: str
    ) -> None:
        self.fabric = fabric
        self.group = group
        self.grad_sizes = tuple(grad_sizes)
        self.label = label
        self.candidates = [sizes]
        self.assignments: list[BucketAssignment] = [()]
        self.chosen = 0
        self.is_ordered = not grad_sizes
        self.autotuner = BucketAutotuner(1)
        self._pending: tuple[Tensor, Work] | None = None

    @property
    def is_tuning(self) -> bool:
        """Whether sizes are being tried."""
        return not self.autotuner.is_done

    @property
    def assignment(self) -> BucketAssignment:
        """The buckets of the next backward; none before the order is known."""
        return self.assignments[self.chosen if self.autotuner.is_done else self.autotuner.candidate]

    def start_sync(self, ready_s: Sequence[float]) -> None:
        """Start to agree on the order, or on the fastest size; all members call it at the same point of a step.

        Args:
            ready_s: when each gradient became ready in this step, on this rank; nan if it did not.
        """
        if not self.is_ordered:  # (1)
            times = torch.tensor([-1.0 if math.isnan(time_s) else time_s for time_s in ready_s], dtype=torch.float64)
            work = self.fabric.broadcast(f"order of {self.label}", times, self.group, self.group[0])
            self._pending = times, work
        elif self.autotuner.is_done and len(self.candidates) > 1:  # (3); the slowest member counts
            seconds = torch.tensor(self.autotuner.medians(), dtype=torch.float64)
            self._pending = seconds, self.fabric.all_reduce(f"seconds of {self.label}", seconds, self.group, "max")

    def finish_sync(self) -> None:
        """Wait for what was started; all members call it at a point where they wait anyway."""
        if self._pending is None:
            return
        values, work = self._pending
        work.wait()
        self._pending = None
        (self._adopt_fastest if self.is_ordered else self._assign_in_order)(values.tolist())

    def _assign_in_order(self, ready_s: Sequence[float]) -> None:
        """Assign gradients to buckets in the order in which the first member's became ready."""
        ready = [
            ReadyGrad(index, grad_size.flat_index, grad_size.num_bytes, time_s)
            for index, (grad_size, time_s) in enumerate(zip(self.grad_sizes, ready_s, strict=True))
            if time_s >= 0
        ]
        self.is_ordered = bool(ready)
        planned = self.candidates[0]
        sizes_of = {
            assign_buckets(ready, sizes): sizes
            for sizes in reversed(candidate_sizes(planned) if planned.tune else [planned])
        }
        first = assign_buckets(ready, planned)
        self.assignments = [first, *(assignment for assignment in reversed(sizes_of) if assignment != first)]
        self.candidates = [planned, *(sizes_of[assignment] for assignment in self.assignments[1:])]
        self.autotuner = BucketAutotuner(len(self.assignments))

    def _adopt_fastest(self, seconds: Sequence[float]) -> None:
        """Adopt the size with the lowest step time."""
        self.chosen = choose_fastest(seconds)
        before, after = self.candidates[0], self.candidates[self.chosen]
        if self.chosen and self.fabric.rank == self.group[0]:
            LOG.info(
                "%s: buckets of %s instead of %s, %d instead of %d of them: %.1f ms a step instead of %.1f",
                self.label, format_bucket_size(after), format_bucket_size(before),
                len(self.assignments[self.chosen]), len(self.assignments[0]),
                1e3 * seconds[self.chosen], 1e3 * seconds[0],
            )  # fmt: skip
        self.candidates, self.assignments, self.chosen = [after], [self.assignments[self.chosen]], 0
        self.autotuner = BucketAutotuner(1)


def format_bucket_size(sizes: BucketConfig) -> str:
    """Return the size of buckets as text."""
    return format_bytes(sizes.bucket_bytes) if sizes.bucket_bytes < 2**62 else "any size"
