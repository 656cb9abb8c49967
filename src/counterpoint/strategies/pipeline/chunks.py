"""Which blocks are on which stage, and which edges connect stages.

A pipeline splits the blocks of a model into chunks of consecutive blocks. With several chunks per stage they are
assigned in rounds; in a V every other round goes from the last stage to the first. Four chunks on two stages::

    chunk       0        1        2        3
    in rounds   stage 0  stage 1  stage 0  stage 1
    in a V      stage 0  stage 1  stage 1  stage 0
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
    """The edges between the stages of a model; within a stage nothing is sent.

    An activation is sent directly from the stage that produces it to each stage that consumes it, once. A stage sends
    its gradient back once all of the stage's blocks that consume the activation have added to it.

    Args:
        edges: all edges of the model.
        stage_of: the stage of each block.
    """

    edges: tuple[Edge, ...]
    stage_of: tuple[int, ...]

    @staticmethod
    def of(model: ModelSpec, runs: Sequence[tuple[Sequence[int], int]]) -> StageEdges:
        """Return the edges between ranges of blocks, each given with its stage."""
        stage_of = {block: stage for run, stage in runs for block in run}
        return StageEdges(model.edges, tuple(stage_of[block] for block in range(model.num_blocks)))

    def consumer_stages(self, edge: Edge) -> list[int]:
        """Return the other stages that consume an edge, in the order of their first blocks that do."""
        own = self.stage_of[edge.producer]
        return [stage for stage in dict.fromkeys(self.stage_of[block] for block in edge.consumers) if stage != own]

    def recv_forward(self, run: range, micro: int) -> list[tuple[TensorRef, int]]:
        """Return the activations that blocks of a stage receive, with the stages that send them."""
        stage = self.stage_of[run[0]]
        inputs = [(edge, self.stage_of[edge.producer]) for edge in self.edges if _intersects(edge.consumers, run)]
        return [(edge.activation(micro), sender) for edge, sender in inputs if sender != stage]

    def send_forward(self, run: range, micro: int) -> list[tuple[TensorRef, int]]:
        """Return the activations that blocks of a stage send, with the stages that receive them."""
        outputs = [edge for edge in self.edges if edge.producer in run]
        return [(edge.activation(micro), stage) for edge in outputs for stage in self.consumer_stages(edge)]

    def recv_backward(self, run: range, micro: int) -> list[tuple[TensorRef, int]]:
        """Return the activation gradients that blocks of a stage receive, with the stages that send them."""
        outputs = [edge for edge in self.edges if edge.producer in run and edge.grad_bytes is not None]
        return [(edge.gradient(micro), stage) for edge in outputs for stage in self.consumer_stages(edge)]

    def send_backward(self, run: range, micro: int) -> list[tuple[TensorRef, int]]:
        """Return the activation gradients that are complete after these blocks, with the stages that receive them."""
        stage = self.stage_of[run[0]]
        sends = []
        for edge in self.edges:
            producer = self.stage_of[edge.producer]
            first = next((block for block in edge.consumers if self.stage_of[block] == stage), None)
            if producer != stage and first in run and edge.grad_bytes is not None:
                sends.append((edge.gradient(micro), producer))
        return sends

    def sent_bytes(self, stage: int) -> int:
        """Return the bytes per sample that a stage sends, forward and backward."""
        total = 0
        for edge in self.edges:
            consumers = self.consumer_stages(edge)
            if self.stage_of[edge.producer] == stage:
                total += edge.num_bytes * len(consumers)
            elif stage in consumers:
                total += edge.grad_bytes or 0
        return total

    @property
    def max_edges_between(self) -> int:
        """Maximum number of edges from one stage to another one."""
        counts: dict[tuple[int, int], int] = {}
        for edge in self.edges:
            for stage in self.consumer_stages(edge):
                pair = (self.stage_of[edge.producer], stage)
                counts[pair] = counts.get(pair, 0) + 1
        return max(counts.values(), default=0)

    @property
    def only_adjacent(self) -> bool:
        """Whether every edge between stages connects adjacent blocks."""
        return all(edge.is_adjacent for edge in self.edges if self.consumer_stages(edge))


def _intersects(blocks: Sequence[int], run: range) -> bool:
    return any(block in run for block in blocks)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of a pipeline in the order of the model, each a range of blocks on a stage.

    Args:
        block_ranges: the blocks of each chunk.
        stages: the stage of each chunk.

    Example:
        >>> chunks = Chunks.of((1, 1, 1, 1), num_stages=2, is_v_shaped=True)
        >>> chunks.stages, chunks.blocks_of(0)
        ((0, 1, 1, 0), (0, 3))
    """

    block_ranges: tuple[range, ...]
    stages: tuple[int, ...]

    @staticmethod
    def of(counts: Sequence[int], *, num_stages: int, is_v_shaped: bool) -> Chunks:
        """Return chunks that are assigned to the stages in rounds.

        Args:
            counts: number of blocks of each chunk.
            num_stages: number of stages.
            is_v_shaped: whether every other round goes from the last stage to the first one.
        """
        rounds = (divmod(index, num_stages) for index in range(len(counts)))
        stages = [num_stages - 1 - offset if is_v_shaped and number % 2 else offset for number, offset in rounds]
        return Chunks.on_given_stages(counts, stages)

    @staticmethod
    def on_given_stages(counts: Sequence[int], stages: Sequence[int]) -> Chunks:
        """Return chunks with these numbers of blocks on these stages."""
        stops = accumulate(counts, initial=0)
        return Chunks(tuple(range(start, stop) for start, stop in pairwise(stops)), tuple(stages))

    def count(self, stage: int) -> int:
        """Return the number of chunks of a stage."""
        return self.stages.count(stage)

    def global_index(self, stage: int, chunk: int) -> int:
        """Return the index among all chunks of a stage's chunk."""
        return [index for index, owner in enumerate(self.stages) if owner == stage][chunk]

    def stage_of(self, index: int) -> int:
        """Return the stage of the chunk at an index."""
        return self.stages[index]

    def chunks_of(self, stage: int) -> tuple[range, ...]:
        """Return the blocks of each chunk of a stage."""
        return tuple(run for index, run in enumerate(self.block_ranges) if self.stages[index] == stage)

    def blocks_of(self, stage: int) -> tuple[int, ...]:
        """Return all blocks of a stage."""
        return tuple(block for run in self.chunks_of(stage) for block in run)

    def edges(self, model: ModelSpec) -> StageEdges:
        """Return the edges between the stages."""
        return StageEdges.of(model, list(zip(self.block_ranges, self.stages, strict=True)))
