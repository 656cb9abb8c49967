"""What an order of a pipeline is given, and what it yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias


class PipelineAction(NamedTuple):
    """One thing that a stage does with one microbatch on one of its chunks.

    Args:
        kind: ``F`` forward, ``B`` backward, ``Bi`` and ``Bw`` its input and its weight part.
        micro: the microbatch.
        chunk: which of the stage's chunks, counted from the one that comes first in the model.
    """

    kind: Literal["F", "B", "Bi", "Bw"]
    micro: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class StageReplica:
    """One replica of one stage.

    Args:
        stage: index of the stage.
        replicas: how many replicas each stage has.
        micros: the microbatches this replica runs, in order.
        chunks: how many chunks each stage runs.
    """

    stage: int
    replicas: tuple[int, ...]
    micros: tuple[int, ...]
    chunks: int = 1

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.replicas)

    @property
    def warmup(self) -> int:
        """Forwards that a replica runs before its first backward so that later stages have work."""
        return self.warmup_of(self.stage)

    def warmup_of(self, stage: int) -> int:
        """Return the warmup of a stage that runs as many microbatches as this one."""
        return min(warmup(stage, self.replicas), len(self.micros))


def warmup(stage: int, replicas: Sequence[int]) -> int:
    """Return how many forwards a replica of a stage is ahead of its backwards, however many microbatches there are.

    ``floor((R - 1 - sum of replicas of earlier stages) / own replicas)`` with R replicas in all.

    Example:
        >>> [warmup(stage, (3, 2, 1)) for stage in range(3)]
        [1, 1, 0]
    """
    return (sum(replicas) - 1 - sum(replicas[:stage])) // replicas[stage]


ActionGenerator: TypeAlias = Callable[[StageReplica], Iterator[PipelineAction]]


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """One order of a pipeline.

    Args:
        turns: the generator that says what a stage does when.
        in_flight: how many microbatches are between forward and the end of their backward at most, summed over chunks.
        chunks: for how many chunks per stage it is made.
        is_folded: whether every other pass through the stages goes backwards, so that chunks lie in a V.
    """

    actions: ActionGenerator
    in_flight: Callable[[StageReplica], int]
    chunk_counts: range = range(1, 2)
    is_v_shaped: bool = False
