"""Since when ranks have wanted a turn at their host's cores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SLICE_S: Final = 3e-3
"""So long the kernel leaves a core to one of those that want it, about, if that one does not wait."""


class Lines:
    """Where each rank stands: one that goes on keeps its turn, until it waits or its slice of time ends.

    Args:
        ranks: which.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._came_s = dict.fromkeys(ranks, 0.0)
        self._busy_s = self._came_s.copy()

    def stand(self, rank: int, seconds: float, now: float) -> float:
        """Return since when a rank has wanted a turn that is about to compute for some seconds."""
        if self._busy_s[rank] >= SLICE_S:
            self.leave(rank, now)
        self._busy_s[rank] += seconds
        return self._came_s[rank]

    def leave(self, rank: int, now: float) -> None:
        """The rank has waited until now, and comes anew."""
        self._came_s[rank], self._busy_s[rank] = now, 0.0
