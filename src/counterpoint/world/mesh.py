"""The ranks of a plan as a mesh of named axes.

Which ranks are on one host, as far as a plan's axes are concerned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of a mesh: a name and how many ranks stand along it."""

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
        """How many ranks the mesh has."""
        return math.prod(axis.size for axis in self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return where a rank stands, by axis name."""
        found = {}
        for axis in self.axes:
            rank, found[axis.name] = divmod(rank, axis.size)
        return found

    def describe(self) -> str:
        """Return the axes as text: ``stage=4, data=2``."""
        return ", ".join(f"{axis.name}={axis.size}" for axis in self.axes) or "one rank"


def replicas_per_host(degree: int, stride: int, hosts: Sequence[int]) -> int:
    """Return into groups of how many replicas an axis can be cut so that each group is on one host; 1 if into none."""
    if not hosts or len(hosts) % (stride * degree):
        return 1
    for among in range(degree, 1, -1):
        if degree % among == 0 and all(
            len({hosts[first + place * stride] for place in range(among)}) == 1
            for block in range(0, len(hosts), stride * among)
            for first in range(block, block + stride)
        ):
            return among
    return 1
