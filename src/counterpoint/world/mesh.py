"""The ranks of a plan as a mesh of named axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh: its name and its number of ranks."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes; the first one varies fastest with the rank number.

    Example:
        >>> Mesh((Axis("stage", 4), Axis("data", 2))).coordinates(5)
        {'stage': 1, 'data': 1}
    """

    axes: tuple[Axis, ...]

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the mesh."""
        return math.prod(axis.size for axis in self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank, by axis name."""
        coordinates = {}
        for axis in self.axes:
            rank, coordinates[axis.name] = divmod(rank, axis.size)
        return coordinates

    def describe(self) -> str:
        """Return the axes as text: ``stage=4, data=2``."""
        return ", ".join(f"{axis.name}={axis.size}" for axis in self.axes) or "one rank"


def replicas_per_host(degree: int, stride: int, hosts: Sequence[int]) -> int:
    """Return the largest number of replicas along an axis that always are on one host; 1 if there is none.

    Args:
        degree: number of replicas along the axis.
        stride: distance of their ranks.
        hosts: the host of each rank; empty if unknown.
    """
    if not hosts or len(hosts) % (stride * degree):
        return 1
    for count in range(degree, 1, -1):
        if degree % count == 0 and all(
            len({hosts[first + position * stride] for position in range(count)}) == 1
            for block in range(0, len(hosts), stride * count)
            for first in range(block, block + stride)
        ):
            return count
    return 1
