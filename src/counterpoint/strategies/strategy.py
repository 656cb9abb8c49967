"""What a strategy is, and the forecast that its closed formulas make."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, Protocol, TypeAlias

from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.edges import Edge
from counterpoint.program.program import Program
from counterpoint.program.recompute_sets import RecomputePolicy

Granularity: TypeAlias = Literal["whole", "prefer_blocks", "blocks", "tensor_parallel"]
"""How finely a model is cut: not at all, into blocks if it can be, into blocks, or into blocks and slices."""


@dataclass(frozen=True, slots=True)
class RankCost:
    """What the formulas say about one rank and one step.

    Args:
        blocks: the blocks it runs.
        num_micros: how many microbatches it runs.
        updates: bytes of gradient it updates, by unit.
        sent: bytes it sends, sums of gradients left out.
        summed: bytes it sends in sums of gradients.
        in_flight: microbatches between forward and backward at most, summed over its chunks.
        updated: the part of each unit that it updates and keeps optimizer state for.
        gradients: the part of each gradient that it holds from one forward to the next.
        heads: the first block of each chunk that it runs; microbatches in flight are counted there.
        versions: how many versions of its weights it holds.
    """

    blocks: tuple[int, ...]
    num_micros: int
    updates: Mapping[Unit, Fraction]
    other_bytes: Fraction = Fraction(0)
    allreduce_bytes: Fraction = Fraction(0)
    in_flight: int = 1
    optimizer_fraction: Fraction = Fraction(1)
    grad_fraction: Fraction = Fraction(1)
    chunk_starts: tuple[int, ...] = (0,)
    weight_versions: int = 1

    def num_chunks(self, unit: Unit) -> int:
        """Return how many of its chunks use a unit."""
        users = [block for block in self.blocks if block in unit]
        return len({max((head for head in self.chunk_starts if head <= block), default=0) for block in users})


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """What the formulas say about all ranks of a plan.

    Args:
        ranks: one forecast per rank.
        num_micros: microbatches of the whole global batch.
        samples_per_micro: how many samples a microbatch has.
        staleness: updates between reading weights and applying their gradient; None for no bound.
        sliced: the blocks whose results are partial on every rank, to be summed.
        apart: whether replicas end the step with weights of their own.
        room: for how many messages of each peer a rank must have room before it waits for them.
        tapes: of how many blocks and microbatches each rank keeps at once what a backward needs; where it recomputes.
        repeats: what is recomputed.
        strands: which values go from block to block.
    """

    ranks: tuple[RankCost, ...]
    num_micros: int
    samples_per_microbatch: int = 1
    staleness: int | None = 0
    tp_blocks: frozenset[int] = frozenset()
    replicas_may_diverge: bool = False
    recv_buffer_depth: int = 0
    max_saved_activations: tuple[int, ...] | None = None
    recompute: RecomputePolicy | None = None
    edges: tuple[Edge, ...] | None = None

    def replicate(self, times: int) -> CostEstimate:
        """Return the forecast for ``times`` copies side by side, each with microbatches of its own."""
        return replace(self, ranks=self.ranks * times, num_micros=self.num_micros * times)

    def sent_bytes(self) -> tuple[Fraction, ...]:
        """Return the bytes each rank sends in one step."""
        return tuple(rank.other_bytes + rank.allreduce_bytes for rank in self.ranks)


class Strategy(Protocol):
    """A pure rewrite of a program, spreading it over one more axis of ranks."""

    @property
    def degree(self) -> int:
        """How many ranks stand along the new axis."""
        ...

    @property
    def axis(self) -> str:
        """The name of the new axis."""
        ...

    @property
    def splits_batch(self) -> bool:
        """Whether the ranks along the axis read different samples."""
        ...

    @property
    def granularity(self) -> Granularity:
        """How finely the model has to be cut for it."""
        ...

    def num_ranks(self, inner: int) -> int:
        """Return how many ranks the rewritten program needs when the given one needs ``inner``."""
        ...

    def split_model(self, model: ModelSpec) -> ModelSpec:
        """Return the model with the blocks that this strategy needs."""
        ...

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program spread over the new axis."""
        ...

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return what the closed formulas say after this strategy; never looks at a program."""
        ...


def ring_fraction(num_ranks: int) -> Fraction:
    """Return the part of a value that each rank sends in a reduce-scatter or an all-gather: ``(n-1)/n``."""
    return Fraction(num_ranks - 1, num_ranks)


def tp_allreduce_bytes(model: ModelSpec, blocks: Iterable[int]) -> int:
    """Return the bytes per sample that sliced blocks sum, forward and backward; nothing is summed into the data."""
    total = 0
    for index in blocks:
        split = model.blocks[index].tp
        if split is not None:
            total += split.output_bytes + (split.input_bytes if index > 0 else 0)
    return total
