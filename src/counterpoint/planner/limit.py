"""A moment by which planning has to come to its end."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limit:
    """How long plans may still be looked at.

    Args:
        until_s: a moment of :func:`time.perf_counter`.

    Example:
        >>> ENDLESS.is_over, Limit.within(0.0).is_over
        (False, True)
    """

    until_s: float = math.inf

    @staticmethod
    def within(seconds: float) -> Limit:
        """Return the moment so many seconds from now."""
        return Limit(time.perf_counter() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds until then, none if it is over."""
        return max(0.0, self.until_s - time.perf_counter())

    @property
    def is_over(self) -> bool:
        """Whether the moment has come."""
        return self.left_s <= 0.0


ENDLESS = Limit()
