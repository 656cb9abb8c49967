"""The interface of a strategy, and the cost estimate that strategies compute from closed formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal, Protocol, TypeAlias, cast

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.edges import Edge
from counterpoint.program.program import Program
from counterpoint.program.recompute_sets import RecomputePolicy
from counterpoint.strategies.sync_schedule import StepKind, SyncSchedule

Granularity: TypeAlias = Literal["whole", "prefer_blocks", "blocks", "tensor_parallel"]
"""How finely a model is split: not at all, into blocks where possible, into blocks, or into blocks and TP shards."""


@dataclass(frozen=True, slots=True)
class RankCost:
    """Estimated cost of one rank for one step.

    Args:
        blocks: blocks that the rank runs.
        num_micros: number of microbatches that it runs.
        updates: bytes of gradient that it updates, by unit.
        other_bytes: bytes that it sends, except in all-reduces of gradients.
        allreduce_bytes: bytes that it sends in all-reduces of gradients.
        in_flight: peak number of microbatches between forward and backward, summed over its chunks.
        optimizer_fraction: fraction of each unit that it updates and keeps optimizer state for.
        grad_fraction: fraction of each gradient that it holds between two forwards.
        chunk_starts: first block of each of its chunks; ``in_flight`` is counted at these blocks.
        weight_versions: number of versions of its weights that it holds.
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

    @property
    def updated_bytes(self) -> Fraction:
        """Bytes of gradient that it updates."""
        return sum(self.updates.values(), Fraction(0))

    def num_chunks(self, unit: Unit) -> int:
        """Return how many of the rank's chunks use a unit."""
        users = [block for block in self.blocks if block in unit]
        return len({max((start for start in self.chunk_starts if start <= block), default=0) for block in users})


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """Estimated cost of all ranks of a plan, and the bounds that its program must keep.

    Args:
        ranks: one estimate per rank.
        num_micros: number of microbatches of the global batch.
        samples_per_microbatch: number of samples of one microbatch.
        staleness: number of updates between reading weights and applying their gradient; None if unbounded.
        tp_blocks: tensor-parallel blocks, whose outputs are partial sums on every rank.
        replicas_may_diverge: whether replicas may end a step with different weights.
        recv_buffer_depth: number of messages from each peer that a rank must buffer before it receives them.
        max_saved_activations: per rank, the peak number of (block, microbatch) pairs whose activations are saved for a
            backward; None without recomputation.
        recompute: which forwards are recomputed.
        edges: the edges between blocks.
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
        """Return the estimate of ``times`` replicas, each with its own microbatches."""
        return replace(self, ranks=self.ranks * times, num_micros=self.num_micros * times)

    def add_sent_bytes(self, sent_bytes: Callable[[RankCost], Fraction | int]) -> CostEstimate:
        """Return the estimate with bytes added that each rank sends, except in all-reduces of gradients."""
        ranks = tuple(replace(rank, other_bytes=rank.other_bytes + sent_bytes(rank)) for rank in self.ranks)
        return replace(self, ranks=ranks)

    def sent_bytes(self) -> tuple[Fraction, ...]:
        """Return the bytes that each rank sends in one step."""
        return tuple(rank.other_bytes + rank.allreduce_bytes for rank in self.ranks)


class Strategy(Protocol):
    """A pure rewrite of a program that spreads it over one more axis of ranks.

    The defaults are those of replicas that each run the whole model on their own samples. A strategy is a frozen
    dataclass; the class has to have :meth:`lower` and :meth:`estimate_cost`.

    Attributes:
        degree: number of ranks along the new axis.
        axis: name of the new axis.
        splits_batch: whether the ranks along the axis read different samples.
    """

    __slots__ = ()

    degree: int
    axis: ClassVar[str]
    splits_batch: ClassVar[bool] = True

    @property
    def granularity(self) -> Granularity:
        """How finely the model should be split."""
        return "whole"

    @property
    def sync_schedule(self) -> SyncSchedule:
        """Which kind of step is taken when."""
        return SyncSchedule()

    @property
    def split_modules(self) -> tuple[str, ...]:
        """Paths of the modules before which the model has to be split."""
        return ()

    def variant(self, kind: StepKind) -> Strategy:
        """Return the strategy that builds the program of one kind of step."""
        return self

    def num_ranks(self, inner: int) -> int:
        """Return how many ranks the rewritten program needs if the given one needs ``inner``."""
        return inner * self.degree

    def split_model(self, model: ModelSpec) -> ModelSpec:
        """Return the model with the blocks that this strategy needs."""
        return model

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program spread over the new axis."""
        ...

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the cost after this strategy, from closed formulas; never looks at a program."""
        ...


REQUIRED_MEMBERS = {
    "degree": "the number of ranks along its axis, 1 or more",
    "axis": "the name of its axis of ranks, a text",
    "lower": "lower(program, model) returns the program spread over that axis",
    "estimate_cost": "estimate_cost(inner, model) returns its cost from closed formulas",
}
"""What a strategy has to have itself."""


def require_strategy(value: object) -> Strategy:
    """Return a strategy of the user's own after checking that nothing is missing.

    Raises:
        PlanError: it is a class or a function, or lacks something, which the message lists.
    """
    name = getattr(value, "__name__", type(value).__name__)
    if isinstance(value, type):
        raise PlanError(f"{name} is a class, and a plan has strategies; give one with its number of ranks, {name}(2)")
    if Strategy not in type(value).__mro__:
        raise PlanError(
            f"{name} is not a strategy; give the text of a plan such as 'data(2)', or a frozen dataclass that inherits "
            "from counterpoint.strategies.strategy.Strategy, which has the defaults of most members"
        )
    found = {member: getattr(value, member, None) for member in REQUIRED_MEMBERS}
    is_wrong = {
        "degree": type(found["degree"]) is not int,
        "axis": not isinstance(found["axis"], str),
        **{member: getattr(type(value), member) is getattr(Strategy, member) for member in ("lower", "estimate_cost")},
    }
    missing = [f"{member}: {REQUIRED_MEMBERS[member]}" for member, wrong in is_wrong.items() if wrong]
    if missing:
        raise PlanError("\n".join([f"the strategy {name} lacks {len(missing)} of its members:", *missing]))
    return cast("Strategy", value)


def ring_fraction(num_ranks: int) -> Fraction:
    """Return the fraction of a tensor that each rank sends in a ring reduce-scatter or all-gather: ``(n-1)/n``."""
    return Fraction(num_ranks - 1, num_ranks)


def tp_allreduce_bytes(model: ModelSpec, blocks: Iterable[int]) -> int:
    """Return the bytes per sample of the tensors that tensor-parallel blocks all-reduce, forward and backward.

    The input gradient of block 0 is never reduced, because nothing computes a gradient of the input data.
    """
    total = 0
    for index in blocks:
        tp = model.blocks[index].tp
        if tp is not None:
            total += tp.output_bytes + (tp.input_bytes if index > 0 else 0)
    return total
