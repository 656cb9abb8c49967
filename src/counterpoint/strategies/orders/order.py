"""What an order of a pipeline is given, and what it yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Turn: TypeAlias = tuple[Literal["F", "B"], int]
"""Forward or backward of a whole stage, and the microbatch."""


@dataclass(frozen=True, slots=True)
class Place:
    """One replica of one stage.

    Args:
        stage: index of the stage.
        replicas: how many replicas each stage has.
        micros: the microbatches this replica runs, in order.
    """

    stage: int
    replicas: tuple[int, ...]
    micros: tuple[int, ...]

    @property
    def warmup(self) -> int:
        """Forwards that a replica runs before its first backward so that later stages have work."""
        return min(warmup(self.stage, self.replicas), len(self.micros))


def warmup(stage: int, replicas: Sequence[int]) -> int:
    """Return how many forwards a replica of a stage is ahead of its backwards, however many microbatches there are.

    ``floor((R - 1 - sum of replicas of earlier stages) / own replicas)`` with R replicas in all.

    Example:
        >>> [warmup(stage, (3, 2, 1)) for stage in range(3)]
        [1, 1, 0]
    """
    return (sum(replicas) - 1 - sum(replicas[:stage])) // replicas[stage]


Order: TypeAlias = Callable[[Place], Iterator[Turn]]
