"""ZeRO: replicas share out what data parallelism would keep on every one of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Forward,
    Free,
    Group,
    Instruction,
    Recv,
    Update,
    grad,
    weight,
)
from counterpoint.program.program import Instructions, Program, RankProgram
from counterpoint.program.rewrite import (
    backward_runs,
    forward_blocks,
    insert_before_commit,
    map_row,
    order_by_grad_completion,
    replicate,
    widen_commits,
)
from counterpoint.strategies.strategy import CostEstimate, Granularity, RankCost, ring_fraction
from counterpoint.strategies.tree_reduce import uses_tree_reduce


@dataclass(frozen=True, slots=True)
class Zero:
    """Copy the program ``degree`` times; each copy keeps and updates its own share of the states.

    Level 1 shares the optimizer state: gradients are reduce-scattered once before the update, weights gathered
    after it. Level 2 also shares the gradients: they are reduce-scattered after each backward. Level 3 also
    shares the weights: they are gathered before each use and released after it.

    Args:
        degree: ranks along the new axis.
        level: 1, 2 or 3, as above.
        name: what errors call it, where it is part of another strategy.

    Cost:
        Bytes sent per rank and step, with M microbatches and P parameter bytes: level 1 ``2 (n-1)/n P``, level 2
        ``(M+1) (n-1)/n P``, level 3 ``3 M (n-1)/n P`` (a weight used by several blocks is gathered for each, and its
        gradient shared out by each of a stage's chunks).
        Memory per rank: optimizer state ``1/n``; from level 2 gradients ``1/n`` from one forward to the next, whole
        ones only until the last backward of their unit; at level 3 weights ``1/n``.

    Source:
        Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020, section 5.
    """

    degree: int
    level: Literal[1, 2, 3] = 1
    name: str = field(default="", compare=False, repr=False)

    axis: ClassVar[str] = "zero"
    splits_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.level not in {1, 2, 3}:
            raise PlanError(f"zero has the levels 1, 2 and 3, not {self.level}; give level=1, level=2 or level=3")

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        return self.name or f"zero({self.degree}, level={self.level})"

    @property
    def granularity(self) -> Granularity:
        """How finely the model should be cut."""
        return "prefer_blocks" if self.level == 3 else "whole"

    def num_ranks(self, inner: int) -> int:
        """Return ``degree`` times as many ranks."""
        return inner * self.degree

    def split_model(self, model: ModelSpec) -> ModelSpec:
        """Return the model as it is."""
        return model

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program for ``degree`` replicas with one share each.

        Raises:
            PlanError: the program is shared out already, or keeps its weights on servers or the first copy of a tree.
        """
        if uses_tree_reduce(program):
            raise PlanError(
                f"{self} stands behind tree, of whose copies only the first updates, so that there is nothing to share "
                "out; write zero(...) with all ranks, without tree(...)"
            )
        for _, word in program.instructions():
            if isinstance(word, Collective) and word.op == "reduce_scatter":
                raise PlanError(
                    f"{self} stands in a plan that is shared out already; write one zero(...) with all ranks"
                )
            if self.level > 1 and isinstance(word, Collective) and word.codec:
                raise PlanError(
                    f"{self} shares gradients out before they are summed in the code {word.codec}, which is about whole "
                    "ones; write zero(..., level=1), or data(...) without compress and reduce"
                )
            if isinstance(word, ApplyPushes) or (isinstance(word, Recv) and word.tensor.name == "grad"):
                raise PlanError(
                    f"{self} stands in a plan whose weights live on servers; write zero(...) or server(...)"
                )
        if self.degree == 1:
            return program
        stride = program.num_ranks
        copies = widen_commits(replicate(program, self.degree), self.degree)
        if self.level == 1:
            copies = insert_before_commit(
                copies, lambda rank, row: _reduce_scatter_before_update(row, self.shard_group(rank, stride))
            )
        units = tuple(model.units)
        spread = (
            self._shard_rank_program(row, self.shard_group(rank, stride), units)
            for rank, row in enumerate(copies.rank_programs)
        )
        return replace(copies, rows=tuple(spread))

    def shard_group(self, rank: int, stride: int) -> Group:
        """Return the ranks that hold the shares of the same parameters as ``rank``."""
        return tuple(range(rank % stride, stride * self.degree, stride))

    def _shard_rank_program(self, row: RankProgram, group: Group, units: tuple[Unit, ...]) -> RankProgram:
        used = _UnitUse.from_rank_program(row, units)
        if self.level == 3:
            return map_row(row, lambda words: [new for word in words for new in _all_gather_around(word, group, used)])
        if self.level == 2:
            row = map_row(
                row, lambda words: [new for word in words for new in _reduce_scatter_after_backward(word, group, used)]
            )
        return map_row(row, lambda words: _all_gather_after_updates(words, group))

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the forecast with the reduce-scatters and all-gathers of the level."""
        ranks = tuple(self._rank_cost(rank, model) for rank in inner.ranks)
        return replace(inner, ranks=ranks).replicate(self.degree)

    def _rank_cost(self, rank: RankCost, model: ModelSpec) -> RankCost:
        moved = sum(size * self._collectives_per_step(unit, rank) for unit, size in rank.updates.items())
        return replace(
            rank,
            other_bytes=rank.other_bytes + ring_fraction(self.degree) * moved,
            allreduce_bytes=rank.allreduce_bytes / (self.degree if self.level > 1 else 1),
            updates={unit: size / self.degree for unit, size in rank.updates.items()},
            optimizer_fraction=rank.optimizer_fraction / self.degree,
            grad_fraction=rank.grad_fraction / self.degree if self.level > 1 else rank.grad_fraction,
        )

    def _collectives_per_step(self, unit: Unit, rank: RankCost) -> int:
        """Return how often a unit is scattered or gathered in one step."""
        if self.level == 1:
            return 2
        if self.level == 2:
            return rank.num_micros * rank.num_chunks(unit) + 1
        uses = sum(block in rank.blocks for block in unit)
        return rank.num_micros * (2 * uses + rank.num_chunks(unit))


def _reduce_scatter_before_update(row: RankProgram, group: Group) -> list[Instruction]:
    units = [word.unit for word in row.body if isinstance(word, Update)]
    return [Collective("reduce_scatter", grad(unit), group) for unit in order_by_grad_completion(row, units)]


class _UnitUse(NamedTuple):
    """The units that a row's blocks use.

    Args:
        by_block: those of each block.
        done_by: those of whose gradient a run of backwards makes no more behind that of a block.
    """

    by_block: dict[int, list[Unit]]
    completed_by: dict[int, list[Unit]]

    @staticmethod
    def from_rank_program(row: RankProgram, units: Iterable[Unit]) -> _UnitUse:
        """Read off a row which units its blocks use, and behind which block each gradient is complete."""
        units = tuple(units)
        by_block = {block: [unit for unit in units if block in unit] for block in forward_blocks(row)}
        run_of = {block: number for number, run in enumerate(backward_runs(row)) for block in run}
        last: dict[tuple[Unit, int], int] = {}
        for block in sorted(by_block, reverse=True):
            last.update({(unit, run_of[block]): block for unit in by_block[block]})
        done_by = {
            block: [unit for unit in found if last[unit, run_of[block]] == block] for block, found in by_block.items()
        }
        return _UnitUse(by_block, done_by)


def _reduce_scatter_after_backward(word: Instruction, group: Group, used: _UnitUse) -> Iterable[Instruction]:
    yield word
    if isinstance(word, Backward) and word.computes_weight_grad:
        for unit in used.completed_by[word.block]:
            yield Collective("reduce_scatter", grad(unit), group)
            yield Free(grad(unit))


def _all_gather_around(word: Instruction, group: Group, used: _UnitUse) -> Iterable[Instruction]:
    if not isinstance(word, Forward | Backward):
        yield word
        return
    if isinstance(word, Backward) and not word.computes_input_grad:  # it reads no weights
        yield from _reduce_scatter_after_backward(word, group, used)
        return
    for unit in used.by_block[word.block]:
        yield Collective("all_gather", weight(unit), group)
    yield from _reduce_scatter_after_backward(word, group, used)
    for unit in used.by_block[word.block]:
        yield Free(weight(unit))


def _all_gather_after_updates(words: Instructions, group: Group) -> Iterable[Instruction]:
    last = max((index for index, word in enumerate(words) if isinstance(word, Update)), default=-1)
    units = [word.unit for word in words if isinstance(word, Update)]
    for index, word in enumerate(words):
        yield word
        if index == last:
            yield from (Collective("all_gather", weight(unit), group) for unit in units)
