"""Leaving out what the slowest partitions have not computed in time: BigDL's rule, by microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.errors import PlanError
from counterpoint.optim.options import require_counts

MARGIN = 1.01
"""What the time of the slowest that still counts is multiplied with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """When partitions stop computing a step, and when the step is left out for that.

    Args:
        fraction: of partitions' shares that may come too late, in the long run.
        most: of the samples of a batch that may be missing; if more are, nothing is updated.
        warmup: steps of which nothing is left out.
        every: after so many steps the limit is set anew, by the times of these.

    Promise:
        The gradient is that of the mean loss over the samples that were computed in time; which these are depends on
        the clock, so runs differ, and a task that runs again may leave out others.

    Source:
        BigDL's DistriOptimizer: dropPercentage, maxDropPercentage, warmupIterationNum, computeThresholdbatchSize.
    """

    fraction: float = 0.05
    most: float = 0.5
    warmup: int = 20
    every: int = 20

    def __post_init__(self) -> None:
        require_counts(every=self.every)
        if not (0 < self.fraction < 1 and 0 < self.most <= 1 and self.warmup >= 1):
            raise PlanError(
                f"fraction={self.fraction}, most={self.most}, warmup={self.warmup} make no sense; give fractions "
                "between 0 and 1, and 1 step or more without a limit"
            )

    def is_too_few(self, finished: int, whole: int) -> bool:
        """Tell whether a batch lacks more samples than may be missing.

        Example:
            >>> drop = Drop(most=0.25)
            >>> drop.is_too_few(75, 100), drop.is_too_few(74, 100)
            (False, True)
        """
        return finished < (1 - self.most) * whole


def limit_of(seconds: Sequence[float], fraction: float) -> float:
    """Return how long a partition may compute, so that a fraction of those that were measured would have been too slow.

    Args:
        seconds: that shares took, one or more.
        fraction: of them.

    Example:
        >>> round(limit_of([1.0, 2.0, 3.0, 4.0], 0.25), 2)
        3.03
    """
    late = min(int(len(seconds) * fraction), len(seconds) - 1)
    return MARGIN * sorted(seconds)[len(seconds) - 1 - late]


class Limit:
    """The limit of a run, set anew every few steps.

    Args:
        drop: the rule; None for no limit.
    """

    def __init__(self, drop: Drop | None) -> None:
        self.drop = drop
        self.seconds: float | None = None
        self._times: list[float] = []
        self._steps = 0

    def add(self, times: Sequence[float]) -> None:
        """A step is over, in which shares took so long; those of nobody's samples are not told."""
        if self.drop is None:
            return
        self._steps += 1
        self._times += times
        if self._steps >= self.drop.warmup and (self._steps - self.drop.warmup) % self.drop.every == 0 and self._times:
            self.seconds = limit_of(self._times, self.drop.fraction)
            self._times = []
