"""Find the rank for which the others wait, and since when, from the busy times of all ranks in every step.

All ranks of a commit know the same times, so that they find the same without a message.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from counterpoint.training.callbacks.callback import SlowRank

WINDOW = 10
"""Number of the last steps by which a rank is judged."""
SLOW_STEPS, FAST_STEPS = 8, 2
"""Of the last ``WINDOW`` steps, so many have to be slow for a rank to be, and so few for it to be no longer."""
WORSE = 2.0
"""A rank that is slow is reported again if it takes longer than the others by so many times as much."""
MIN_RATIO, MIN_DIFFERENCE_S = 1.25, 2e-3
"""A step of a rank is slow if it takes longer than that of the others in the median, by both of these."""


class SlowRankDetector:
    """Watches the busy times of the ranks that commit together."""

    def __init__(self) -> None:
        self.steps: deque[tuple[int, Mapping[int, float], frozenset[int]]] = deque(maxlen=WINDOW)
        self.reported: dict[int, SlowRank] = {}  # of the ranks that are slow

    def add(self, step: int, busy_s: Mapping[int, float]) -> list[SlowRank]:
        """Add a step; return what has changed with it."""
        if len(busy_s) < 2:
            return []
        self.steps.append((step, busy_s, find_slow(busy_s)))
        changes = []
        for rank in sorted(self.reported.keys() | {rank for _, _, slow in self.steps for rank in slow}):
            reported = self.reported.get(rank)
            slow_steps = self.find_slow_steps(rank, 0.0 if reported is None else WORSE * reported.excess_s)
            if len(slow_steps) >= SLOW_STEPS:
                self.reported[rank] = self.describe(rank, slow_steps[0], None)
                changes.append(self.reported[rank])
            elif reported is not None and len(self.steps) == WINDOW:
                slow_steps = self.find_slow_steps(rank, 0.0)
                if len(slow_steps) <= FAST_STEPS:
                    fast = next(number for number, _, slow in self.steps if rank not in slow)
                    changes.append(self.describe(rank, reported.since_step, fast))
                    del self.reported[rank]
        return changes

    def find_slow_steps(self, rank: int, excess_s: float) -> list[int]:
        """Return those of the last steps in which a rank took longer than the others, by more than so many seconds."""
        return [
            number
            for number, busy_s, slow in self.steps
            if rank in slow and busy_s[rank] - median_of_others(sorted(busy_s.values()), busy_s[rank]) > excess_s
        ]

    def describe(self, rank: int, since_step: int, until_step: int | None) -> SlowRank:
        """Return the event of a rank, with the medians of the last steps since then."""
        times = [busy_s for number, busy_s, _ in self.steps if number >= since_step]
        own = median(busy_s[rank] for busy_s in times)
        others = median(median_of_others(sorted(busy_s.values()), busy_s[rank]) for busy_s in times)
        return SlowRank(rank, since_step, until_step, own, others)


def find_slow(busy_s: Mapping[int, float]) -> frozenset[int]:
    """Return the ranks that take longer than the others in one step."""
    ordered = sorted(busy_s.values())
    least = ordered[len(ordered) // 2 - 1]  # no median of the others is less
    if not is_slow(ordered[-1], least):
        return frozenset()
    return frozenset(
        rank for rank, own in busy_s.items() if is_slow(own, least) and is_slow(own, median_of_others(ordered, own))
    )


def is_slow(own: float, others: float) -> bool:
    """Return whether a busy time is longer than that of the others."""
    return own > MIN_RATIO * others and own - others > MIN_DIFFERENCE_S


def median_of_others(ordered: Sequence[float], own: float) -> float:
    """Return the median of sorted numbers without one of them.

    Example:
        >>> median_of_others([1.0, 2.0, 9.0], 9.0)
        1.5
    """
    index, last = bisect_left(ordered, own), len(ordered) - 2
    low, high = (ordered[at + (at >= index)] for at in (last // 2, (last + 1) // 2))
    return (low + high) / 2
