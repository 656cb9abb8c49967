"""Which of a few ways to do the same is the fastest, by trying them in turns while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

MARGIN = 0.97
"""What is tried must take at most this part of the time of what there is, or it is not worth a change."""


@dataclass(slots=True)
class Trials:
    """Steps in which ways are tried, and what they took; the steps are counted, so it changes.

    All members of a group count the same steps, so that each step is done in the same way by all of them.

    Args:
        num_ways: how many there are; the first is what there is before.
        warm_up: steps before the first trial.
        num_rounds: how often each is tried.
        num_steps: steps of a trial; the first of them does not count.
        seconds: what was measured, by way.
    """

    num_ways: int
    warm_up: int = 4
    num_rounds: int = 3
    num_steps: int = 3
    step: int = 0
    seconds: dict[int, list[float]] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether all have been tried; with a single way there is nothing to try."""
        return self.num_ways < 2 or self.step >= self.warm_up + self.num_rounds * self.num_ways * self.num_steps

    @property
    def way(self) -> int:
        """The way of the next step.

        Example:
            >>> trials = Trials(2, warm_up=1, num_rounds=2, num_steps=2)
            >>> [(trials.way, trials.take(1.0))[0] for _ in range(9)]
            [0, 0, 0, 1, 1, 0, 0, 1, 1]
        """
        at = self.step - self.warm_up
        return 0 if at < 0 or self.is_over else at // self.num_steps % self.num_ways

    def take(self, seconds: float) -> None:
        """A step is done and took so long."""
        at = self.step - self.warm_up
        if at >= 0 and at % self.num_steps and not self.is_over:
            self.seconds.setdefault(self.way, []).append(seconds)
        self.step += 1

    def medians(self) -> list[float]:
        """Return what a step took in each way."""
        return [median(self.seconds.get(way, [0.0])) for way in range(self.num_ways)]


def fastest(medians: Sequence[float]) -> int:
    """Return the way to go on with: the first, unless another one is faster by more than noise.

    Example:
        >>> fastest([1.0, 0.98, 1.2]), fastest([1.0, 0.95, 0.9])
        (0, 2)
    """
    best = min(range(len(medians)), key=lambda way: medians[way])
    return best if medians[best] <= MARGIN * medians[0] else 0
