"""A curve of any length in bounded memory: a run may take a million steps, a picture needs a thousand points."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

MOST = 2000


@dataclass(slots=True)
class Curve:
    """Points in order of x; when they are too many, neighbours become their mean. Changes with every point.

    Args:
        most: how many points are kept at most, an even number.
        stride: how many values one kept point stands for.
        points: ``(x of the last value, mean of the values)``.
        open: values that do not fill a point yet.
    """

    most: int = MOST
    stride: int = 1
    points: list[tuple[float, float]] = field(default_factory=list)
    open: list[tuple[float, float]] = field(default_factory=list)

    def add(self, x: float, y: float) -> None:
        """The value is on the curve; one that is not finite is not drawn."""
        if not math.isfinite(y):
            return
        self.open.append((x, y))
        if len(self.open) == self.stride:
            self.points.append(mean(self.open))
            self.open.clear()
        if len(self.points) == self.most:
            self.points = [mean(list(pair)) for pair in list(pairwise(self.points))[::2]]
            self.stride *= 2

    def drawn(self) -> tuple[tuple[float, float], ...]:
        """Return all points, the last value included."""
        return tuple(self.points) + ((mean(self.open),) if self.open else ())


def mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the last x and the mean of the y."""
    return points[-1][0], math.fsum(y for _, y in points) / len(points)
