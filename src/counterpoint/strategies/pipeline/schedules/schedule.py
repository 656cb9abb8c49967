"""The interface of a pipeline schedule: from one stage replica to the sequence of its actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias


class PipelineAction(NamedTuple):
    """The computation of one microbatch on one chunk of a stage.

    Args:
        kind: ``F`` forward, ``B`` backward, ``Bi`` and ``Bw`` its input-gradient and its weight-gradient part.
        micro: the microbatch.
        chunk: which of the stage's chunks, counted in the order of the model.
    """

    kind: Literal["F", "B", "Bi", "Bw"]
    micro: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class StageReplica:
    """One replica of one pipeline stage.

    Args:
        stage: index of the stage.
        replicas_per_stage: for each stage of the pipeline, its number of replicas.
        micros: the microbatches of this replica, in order.
        chunks_per_stage: number of chunks of each stage.
    """

    stage: int
    replicas_per_stage: tuple[int, ...]
    micros: tuple[int, ...]
    chunks_per_stage: int = 1

    @property
    def num_stages(self) -> int:
        """Number of stages of the pipeline."""
        return len(self.replicas_per_stage)

    @property
    def warmup(self) -> int:
        """Number of forwards before the first backward, so that later stages have work."""
        return self.warmup_of(self.stage)

    def warmup_of(self, stage: int) -> int:
        """Return the warm-up of a stage with as many microbatches as this replica."""
        return min(warmup(stage, self.replicas_per_stage), len(self.micros))


def warmup(stage: int, replicas_per_stage: Sequence[int]) -> int:
    """Return by how many forwards a replica of a stage is ahead of its backwards, without a limit of microbatches.

    ``floor((R - 1 - sum of replicas of earlier stages) / own replicas)`` with R replicas in total.

    Example:
        >>> [warmup(stage, (3, 2, 1)) for stage in range(3)]
        [1, 1, 0]
    """
    return (sum(replicas_per_stage) - 1 - sum(replicas_per_stage[:stage])) // replicas_per_stage[stage]


ActionGenerator: TypeAlias = Callable[[StageReplica], Iterator[PipelineAction]]


MAX_CHUNKS = 1 << 20
"""More chunks than any model has blocks."""


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """A pipeline schedule with a flush.

    Args:
        name: the value of a pipeline's ``schedule``; schedules for different numbers of chunks may share it.
        actions: generator of the actions of a stage replica.
        in_flight: peak number of microbatches between forward and the end of their backward, summed over chunks.
        chunk_counts: supported numbers of chunks per stage.
        is_v_shaped: whether every other round of chunks is assigned from the last stage to the first.
        bubble_saving: the fraction of the 1F1B bubble that it saves by its formula, with its fewest chunks.
    """

    name: str
    actions: ActionGenerator
    in_flight: Callable[[StageReplica], int]
    chunk_counts: range = range(1, 2)
    is_v_shaped: bool = False
    bubble_saving: float = 0.0

    @property
    def min_chunks(self) -> int:
        """The fewest chunks per stage, which is what the planner considers."""
        return self.chunk_counts.start

    @property
    def is_enumerated(self) -> bool:
        """Whether the planner considers it in all plans, also with replicas of stages, which it estimates as 1F1B.

        A schedule that saves some of the bubble is considered where a plan would be the fastest by its formula.
        """
        return not self.bubble_saving
