"""The time by which planning has to end."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """Moment after which no further plan is evaluated.

    Args:
        at_s: a value of :func:`time.perf_counter`.

    Example:
        >>> NO_DEADLINE.is_past, Deadline.after(0.0).is_past
        (False, True)
    """

    at_s: float = math.inf

    @staticmethod
    def after(seconds: float) -> Deadline:
        """Return the deadline that is ``seconds`` from now."""
        return Deadline(time.perf_counter() + seconds)

    @property
    def remaining_s(self) -> float:
        """Seconds until then; 0 if it is past."""
        return max(0.0, self.at_s - time.perf_counter())

    @property
    def is_past(self) -> bool:
        """Whether the deadline has passed."""
        return self.remaining_s <= 0.0


NO_DEADLINE = Deadline()
