"""Which of a few ways to do the same is the fastest, by trying them in turns while training goes on.

Ranges of the flat buffers that gradients are summed in, and sizes of buckets that are worth a try.

What the members of a group agree on about their buckets: the order of their gradients, and how large they are.

Both are agreed on by a small collective that is started beside the sums of a step and is there for the next one, so
that nobody waits for it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

import torch
from torch import Tensor

from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.strategies.buckets import BucketConfig, ReadyGrad, assign_buckets, format_bytes

MIN_SPEEDUP_RATIO = 0.97
"""What is tried must take at most this part of the time of what there is, or it is not worth a change."""


@dataclass(slots=True)
class BucketAutotuner:
    """Steps in which ways are tried, and what they took; the steps are counted, so it changes.

    All members of a group count the same steps, so that each step is done in the same way by all of them.

    Args:
        num_ways: how many there are; the first is what there is before.
        warm_up: steps before the first trial.
        num_rounds: how often each is tried.
        num_steps: steps of a trial; the first of them does not count.
        seconds: what was measured, by way.
    """

    num_candidates: int
    warm_up: int = 4
    num_rounds: int = 3
    num_steps: int = 3
    step: int = 0
    seconds: dict[int, list[float]] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether all have been tried; with a single way there is nothing to try."""
        return (
            self.num_candidates < 2
            or self.step >= self.warm_up + self.num_rounds * self.num_candidates * self.num_steps
        )

    @property
    def candidate(self) -> int:
        """The way of the next step.

        Example:
            >>> trials = Trials(2, warm_up=1, num_rounds=2, num_steps=2)
            >>> [(trials.way, trials.take(1.0))[0] for _ in range(9)]
            [0, 0, 0, 1, 1, 0, 0, 1, 1]
        """
        at = self.step - self.warm_up
        return 0 if at < 0 or self.is_done else at // self.num_steps % self.num_candidates

    def record(self, seconds: float) -> None:
        """A step is done and took so long."""
        at = self.step - self.warm_up
        if at >= 0 and at % self.num_steps and not self.is_done:
            self.seconds.setdefault(self.candidate, []).append(seconds)
        self.step += 1

    def medians(self) -> list[float]:
        """Return what a step took in each way."""
        return [median(self.seconds.get(way, [0.0])) for way in range(self.num_candidates)]


def choose_fastest(medians: Sequence[float]) -> int:
    """Return the way to go on with: the first, unless another one is faster by more than noise.

    Example:
        >>> fastest([1.0, 0.98, 1.2]), fastest([1.0, 0.95, 0.9])
        (0, 2)
    """
    best = min(range(len(medians)), key=lambda way: medians[way])
    return best if medians[best] <= MIN_SPEEDUP_RATIO * medians[0] else 0


ElementRange: TypeAlias = tuple[int, int]
"""Elements of a flat buffer, from and to."""


def merge_ranges(ranges: Iterable[ElementRange]) -> list[ElementRange]:
    """Return the same elements as few ranges.

    Example:
        >>> joined([(4, 6), (0, 2), (2, 4), (8, 9)])
        [(0, 6), (8, 9)]
    """
    found: list[ElementRange] = []
    for start, stop in sorted(ranges):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def subtract_ranges(ranges: Iterable[ElementRange], removed: Sequence[ElementRange]) -> Iterator[ElementRange]:
    """Yield what is left of ranges when some have been taken, each of which lies within one of them.

    Example:
        >>> list(left_over([(0, 10), (20, 30)], [(2, 4), (20, 25)]))
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
    """Return the sizes that are worth a try: those given, larger and smaller ones, and everything at once."""
    one = BucketConfig(2**62, 2**62, 0.0, sizes.tune)
    others = [4 * sizes.bucket_bytes, sizes.bucket_bytes // 4, sizes.bucket_bytes // 16]
    return [sizes, *(BucketConfig(size, sizes.first_bytes, sizes.cycle_ms, sizes.tune) for size in others), one]


BucketAssignment: TypeAlias = tuple[tuple[int, ...], ...]
"""The places of each bucket, in the order in which buckets are started."""

LOG = logging.getLogger("counterpoint.buckets")


@dataclass(frozen=True, slots=True)
class GradSize:
    """What is known of a gradient before any backward: in which flat buffer it lies, and its size."""

    flat_index: int
    num_bytes: int


class BucketPlan:
    """The buckets of one group, the same on all members.

    Args:
        fabric: the way to the others.
        group: the members.
        sizes: of buckets, as the plan says.
        weighed: every gradient that may be in one; the same on all members.
        label: what is summed, for errors and the log.
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
        """The buckets of the next backward; none before an order is agreed on."""
        return self.assignments[self.chosen if self.autotuner.is_done else self.autotuner.candidate]

    def start_sync(self, ready_s: Sequence[float]) -> None:
        """Start to agree on what is open; all members call it at the same place of a step.

        Args:
            ready_s: when each gradient was ready in this step, on this rank; nan for those that never were.
        """
        if not self.is_ordered:
            seen = torch.tensor([-1.0 if math.isnan(when) else when for when in ready_s], dtype=torch.float64)
            work = self.fabric.broadcast(f"order of {self.label}", seen, self.group, self.group[0])
            self._pending = seen, work
        elif self.autotuner.is_done and len(self.candidates) > 1:
            seconds = torch.tensor(self.autotuner.medians(), dtype=torch.float64)
            self._pending = seconds, self.fabric.all_reduce(f"seconds of {self.label}", seconds, self.group, "max")

    def finish_sync(self) -> None:
        """What was asked for is agreed on; all members call it, at places where they may wait."""
        if self._pending is None:
            return
        numbers, work = self._pending
        work.wait()
        self._pending = None
        (self._adopt_fastest if self.is_ordered else self._assign_in_order)(numbers.tolist())

    def _assign_in_order(self, ready_s: Sequence[float]) -> None:
        """Cut the gradients that the first member has seen, in the order in which it has."""
        made = [
            ReadyGrad(place, weighed.flat_index, weighed.num_bytes, when)
            for place, (weighed, when) in enumerate(zip(self.grad_sizes, ready_s, strict=True))
            if when >= 0
        ]
        self.is_ordered = bool(made)
        given = self.candidates[0]
        cuts = {
            assign_buckets(made, sizes): sizes for sizes in reversed(candidate_sizes(given) if given.tune else [given])
        }
        first = assign_buckets(made, given)
        self.assignments = [first, *(other for other in reversed(cuts) if other != first)]
        self.candidates = [given, *(cuts[other] for other in self.assignments[1:])]
        self.autotuner = BucketAutotuner(len(self.assignments))

    def _adopt_fastest(self, seconds: Sequence[float]) -> None:
        """Go on with the fastest."""
        self.chosen = choose_fastest(seconds)
        before, after = self.candidates[0], self.candidates[self.chosen]
        if self.chosen and self.fabric.rank == self.group[0]:
            LOG.info(
                "%s: buckets of %s instead of %s, %d instead of %d of them: %.1f ms a step instead of %.1f",
                self.label, format_bucket_size(after), format_bucket_size(before), len(self.assignments[self.chosen]), len(self.assignments[0]),
                1e3 * seconds[self.chosen], 1e3 * seconds[0],
            )  # fmt: skip
        self.candidates, self.assignments, self.chosen = [after], [self.assignments[self.chosen]], 0
        self.autotuner = BucketAutotuner(1)


def format_bucket_size(sizes: BucketConfig) -> str:
    """Return the size of buckets as text."""
    return format_bytes(sizes.bucket_bytes) if sizes.bucket_bytes < 2**62 else "any size"
