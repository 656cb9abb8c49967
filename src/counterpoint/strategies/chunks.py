"""Which blocks of a model lie where in a pipeline: the chain of its chunks, and the stages that run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from counterpoint.model.spec import ModelSpec
from counterpoint.strategies.strands import Strands


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chain of chunks, each a run of blocks; a chunk's place in it is its position.

    Args:
        runs: the blocks of each position.
        stages: the stage that runs each position.

    Example:
        >>> chunks = Chunks.of((1, 1, 1, 1), num_stages=2, is_folded=True)
        >>> chunks.stages, chunks.blocks_of(0)
        ((0, 1, 1, 0), (0, 3))
    """

    runs: tuple[range, ...]
    stages: tuple[int, ...]

    @staticmethod
    def of(counts: Sequence[int], *, num_stages: int, is_folded: bool) -> Chunks:
        """Return chunks of so many blocks each, dealt out to the stages in rounds.

        Args:
            counts: how many blocks each has.
            num_stages: the stages.
            is_folded: whether every other round goes from the last stage to the first one, so that chunks lie in a V.
        """
        rounds = (divmod(position, num_stages) for position in range(len(counts)))
        return Chunks.on_stages(counts, [num_stages - 1 - at if is_folded and by % 2 else at for by, at in rounds])

    @staticmethod
    def on_stages(counts: Sequence[int], stages: Sequence[int]) -> Chunks:
        """Return chunks of so many blocks each on the stages that are told."""
        stops = accumulate(counts, initial=0)
        return Chunks(tuple(range(start, stop) for start, stop in pairwise(stops)), tuple(stages))

    def count(self, stage: int) -> int:
        """Return how many chunks a stage runs."""
        return self.stages.count(stage)

    def position(self, stage: int, chunk: int) -> int:
        """Return where a stage's chunk stands in the chain."""
        return [position for position, owner in enumerate(self.stages) if owner == stage][chunk]

    def stage_of(self, position: int) -> int:
        """Return the stage that runs the chunk at a position."""
        return self.stages[position]

    def on(self, stage: int) -> tuple[range, ...]:
        """Return the blocks of each chunk of a stage."""
        return tuple(run for position, run in enumerate(self.runs) if self.stage_of(position) == stage)

    def blocks_of(self, stage: int) -> tuple[int, ...]:
        """Return all blocks of a stage."""
        return tuple(block for run in self.on(stage) for block in run)

    def strands(self, model: ModelSpec) -> Strands:
        """Return what goes between the stages."""
        return Strands.of(model, [(run, self.stage_of(position)) for position, run in enumerate(self.runs)])
