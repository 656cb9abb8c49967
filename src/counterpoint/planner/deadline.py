"""A moment by which planning has to come to its end."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """How long plans may still be looked at.

    Args:
        until_s: a moment of :func:`time.perf_counter`.

    Example:
        >>> ENDLESS.is_over, Limit.within(0.0).is_over
        (False, True)
    """

    at_s: float = math.inf

    @staticmethod
    def after(seconds: float) -> Deadline:
        """Return the moment so many seconds from now."""
        return Deadline(time.perf_counter() + seconds)

    @property
    def remaining_s(self) -> float:
        """Seconds until then, none if it is over."""
        return max(0.0, self.at_s - time.perf_counter())

    @property
    def is_past(self) -> bool:
        """Whether the moment has come."""
        return self.remaining_s <= 0.0


NO_DEADLINE = Deadline()
