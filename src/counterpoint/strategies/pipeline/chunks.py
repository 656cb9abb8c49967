"""Which strands a stage takes from others and gives them, forward and backward.

Which blocks of a model lie where in a pipeline: the chain of its chunks, and the stages that run them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from counterpoint.model.spec import ModelSpec
from counterpoint.program.edges import Edge
from counterpoint.program.instruction import TensorRef


@dataclass(frozen=True, slots=True)
class StageEdges:
    """The strands of a model whose blocks lie in stages. Inside a stage nothing is sent.

    Values go straight from the stage that makes them to each stage that reads them, once; so do their gradients back,
    when all blocks of a stage that read them have added to them.

    Args:
        strands: of the model.
        stage_of: for each block its stage.
    """

    edges: tuple[Edge, ...]
    stage_of: tuple[int, ...]

    @staticmethod
    def of(model: ModelSpec, runs: Sequence[tuple[Sequence[int], int]]) -> StageEdges:
        """Return the strands between runs of blocks, each given with its stage."""
        stage_of = {block: stage for run, stage in runs for block in run}
        return StageEdges(model.edges, tuple(stage_of[block] for block in range(model.num_blocks)))

    def consumer_stages(self, edge: Edge) -> list[int]:
        """Return the other stages that read a strand, in the order of their first blocks that do."""
        own = self.stage_of[edge.producer]
        return [stage for stage in dict.fromkeys(self.stage_of[block] for block in edge.consumers) if stage != own]

    def recv_forward(self, run: range, micro: int) -> list[tuple[TensorRef, int]]:
        """Return what blocks of a stage read, and the stages that it comes from."""
        stage = self.stage_of[run[0]]
        found = [(strand, self.stage_of[strand.producer]) for strand in self.edges if _overlaps(strand.consumers, run)]
        return [(strand.activation(micro), maker) for strand, maker in found if maker != stage]

    def send_forward(self, run: range, micro: int) -> list[tuple[TensorRef, int]]:
        """Return what blocks make for other stages, and these."""
        made = [strand for strand in self.edges if strand.producer in run]
        return [(strand.activation(micro), stage) for strand in made for stage in self.consumer_stages(strand)]

    def recv_backward(self, run: range, micro: int) -> list[tuple[TensorRef, int]]:
        """Return the gradients that come back to blocks, and the stages that they come from."""
        made = [strand for strand in self.edges if strand.producer in run and strand.grad_bytes is not None]
        return [(strand.gradient(micro), stage) for strand in made for stage in self.consumer_stages(strand)]

    def send_backward(self, run: range, micro: int) -> list[tuple[TensorRef, int]]:
        """Return the gradients that are complete on a stage behind these blocks, and the stages that they go to."""
        stage = self.stage_of[run[0]]
        found = []
        for strand in self.edges:
            maker = self.stage_of[strand.producer]
            first = next((block for block in strand.consumers if self.stage_of[block] == stage), None)
            if maker != stage and first in run and strand.grad_bytes is not None:
                found.append((strand.gradient(micro), maker))
        return found

    def sent_bytes(self, stage: int) -> int:
        """Return the bytes per sample that a stage sends, forward and backward."""
        total = 0
        for strand in self.edges:
            readers = self.consumer_stages(strand)
            if self.stage_of[strand.producer] == stage:
                total += strand.num_bytes * len(readers)
            elif stage in readers:
                total += strand.grad_bytes or 0
        return total

    @property
    def max_edges_between(self) -> int:
        """How many strands go from one stage to another one at most; 1 where only neighbours have one each."""
        counts: dict[tuple[int, int], int] = {}
        for strand in self.edges:
            for stage in self.consumer_stages(strand):
                pair = (self.stage_of[strand.producer], stage)
                counts[pair] = counts.get(pair, 0) + 1
        return max(counts.values(), default=0)

    @property
    def only_adjacent(self) -> bool:
        """Whether all that stages send goes to the next one."""
        return all(strand.is_adjacent for strand in self.edges if self.consumer_stages(strand))


def _overlaps(blocks: Sequence[int], run: range) -> bool:
    return any(block in run for block in blocks)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chain of chunks, each a run of blocks; a chunk's place in it is its position.

    Args:
        runs: the blocks of each position.
        stages: the stage that runs each position.

    Example:
        >>> chunks = Chunks.of((1, 1, 1, 1), num_stages=2, is_v_shaped=True)
        >>> chunks.stages, chunks.blocks_of(0)
        ((0, 1, 1, 0), (0, 3))
    """

    block_ranges: tuple[range, ...]
    stages: tuple[int, ...]

    @staticmethod
    def of(counts: Sequence[int], *, num_stages: int, is_v_shaped: bool) -> Chunks:
        """Return chunks of so many blocks each, dealt out to the stages in rounds.

        Args:
            counts: how many blocks each has.
            num_stages: the stages.
            is_folded: whether every other round goes from the last stage to the first one, so that chunks lie in a V.
        """
        rounds = (divmod(position, num_stages) for position in range(len(counts)))
        return Chunks.on_given_stages(
            counts, [num_stages - 1 - at if is_v_shaped and by % 2 else at for by, at in rounds]
        )

    @staticmethod
    def on_given_stages(counts: Sequence[int], stages: Sequence[int]) -> Chunks:
        """Return chunks of so many blocks each on the stages that are told."""
        stops = accumulate(counts, initial=0)
        return Chunks(tuple(range(start, stop) for start, stop in pairwise(stops)), tuple(stages))

    def count(self, stage: int) -> int:
        """Return how many chunks a stage runs."""
        return self.stages.count(stage)

    def global_index(self, stage: int, chunk: int) -> int:
        """Return where a stage's chunk stands in the chain."""
        return [position for position, owner in enumerate(self.stages) if owner == stage][chunk]

    def stage_of(self, index: int) -> int:
        """Return the stage that runs the chunk at a position."""
        return self.stages[index]

    def chunks_of(self, stage: int) -> tuple[range, ...]:
        """Return the blocks of each chunk of a stage."""
        return tuple(run for position, run in enumerate(self.block_ranges) if self.stage_of(position) == stage)

    def blocks_of(self, stage: int) -> tuple[int, ...]:
        """Return all blocks of a stage."""
        return tuple(block for run in self.chunks_of(stage) for block in run)

    def edges(self, model: ModelSpec) -> StageEdges:
        """Return what goes between the stages."""
        return StageEdges.of(model, [(run, self.stage_of(position)) for position, run in enumerate(self.block_ranges)])
