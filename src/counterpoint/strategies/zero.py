"""ZeRO: replicas shard the optimizer state, gradients and weights that data parallelism would replicate.

::

    level 1   backward of all microbatches | reduce_scatter(grad) | update own shard | all_gather(weight)
    level 2   each backward, then reduce_scatter(grad) and free it | update own shard | all_gather(weight)
    level 3   all_gather(weight) before each forward and backward, free it after; after each backward
              reduce_scatter(grad) and free it | update own shard

Units of at most ``persistence_threshold`` elements are treated at level 3 as at level 2: their weights stay whole. The
gathers before computations are awaited; the pass ``prefetch`` starts them during the computation before, ``prefetch:2``
two before. With ``quantized_weights`` these gathers have a codec, with ``quantized_gradients`` the reduce-scatters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import ClassVar, Literal, NamedTuple, TypeGuard

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.compression import SHARD_CODECS
from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Forward,
    Free,
    Group,
    Instruction,
    TensorRef,
    grad,
    weight,
)
from counterpoint.program.program import Instructions, Program, RankProgram
from counterpoint.program.rewrite import (
    backward_runs,
    forward_blocks,
    insert_before_commit,
    map_parts,
    order_by_grad_completion,
)
from counterpoint.strategies.options import changed_options, format_term, require_choice
from counterpoint.strategies.pipeline.partition import split_before
from counterpoint.strategies.pipeline.split_points import find_start, has_explicit_stages, parse_split_points
from counterpoint.strategies.replica_groups import (
    add_after_updates,
    map_replicas,
    receives_grad,
    updated_units,
    uses_tree_reduce,
)
from counterpoint.strategies.strategy import CostEstimate, Granularity, RankCost, Strategy, ring_fraction


@dataclass(frozen=True, slots=True)
class Zero(Strategy):
    """Replicate the program ``degree`` times; each replica keeps and updates its own shard of the states.

    Level 1 shards the optimizer state: gradients are reduce-scattered once before the update, weights gathered
    after it. Level 2 also shards the gradients: they are reduce-scattered after each backward. Level 3 also
    shards the weights: they are gathered before each use and freed after it.

    Args:
        degree: number of ranks along the new axis.
        level: 1, 2 or 3, as above.
        reshard_after_forward: at level 3, ``on`` frees weights after each forward, and gathers them again for the
            backward; ``off`` gathers them once in a step, and frees them after their last backward.
        persistence_threshold: at level 3, weights of units of at most so many elements stay whole on every rank, and
            are gathered once in a step, after the update. Gradients and states are shards as those of other units.
        min_num_params: at level 3, adjacent blocks are merged until their weights have at least so many elements, and
            are then gathered, run and reduced as one.
        quantized_weights: at level 3, ``int8`` or ``int4`` gathers block-wise quantized weights (qwZ).
        quantized_gradients: ``int8`` or ``int4`` reduce-scatters block-wise quantized gradients (qgZ).
        split_points: at level 3, the paths of the modules with which units begin, other than the first of the model:
            blocks between them are gathered, run and reduced as one. By default each block is a unit.
        name: the strategy as the user wrote it, for errors, if it is part of another one.

    Promise:
        The same results as single-process training, up to rounding, without quantized weights and gradients. With
        them, each run of 1024 elements of a parameter has one scale ``s``: its largest magnitude divided by 127 for
        ``int8``, by 7 for ``int4``. Forward and backward read weights that are within ``s/2`` of the ones that are
        updated and saved, alike on all ranks; so does evaluation. An element of a gradient is within half of the sum of
        the ranks' scales of the exact sum, for each reduce-scatter: one a step at level 1, else one for each microbatch
        and chunk. Weights that stay whole, and rows of sparse gradients, are exact. Transports give the same bits.

    Cost:
        Bytes sent per rank and step, with M microbatches and P parameter bytes: level 1 ``2 (n-1)/n P``, level 2
        ``(M+1) (n-1)/n P``, level 3 ``3 M (n-1)/n P`` (a weight used by several blocks is gathered for each of them,
        and its gradient reduce-scattered for each chunk of a stage). In mixed precision, level 3 gathers casts of
        weights: with 2 bytes instead of 4, ``2 M (n-1)/n P``; where ranks hold casts, P is their bytes. With
        ``reshard_after_forward=off`` level 3 sends ``(M+1) (n-1)/n P``, and holds whole weights from their first
        forward to their last backward. Of units within the ``persistence_threshold`` it sends as much as level 2, and
        holds whole weights. Where weights or gradients are quantized, ``int8`` sends a byte of each element, ``int4``
        half of one, and both a scale for each 1024 elements: at level 3 in float32 a fourth or an eighth of ``P``.
        Shards end after multiples of 1024 elements of a parameter. Coding takes about as long as several copies of what
        is gathered or reduced.
        Memory per rank: ``1/n`` of the optimizer state; from level 2 on ``1/n`` of the gradients from one forward to
        the next, and whole ones only until the last backward of their unit; at level 3 ``1/n`` of the weights.

    Source:
        Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020, section 5.
        Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training, 2023 (qwZ and qgZ;
        with ``* data(m)`` between hosts, weights are gathered within a host only, as by its hpZ in the backward).
    """

    degree: int
    level: Literal[1, 2, 3] = 1
    reshard_after_forward: Literal["on", "off"] = "on"
    persistence_threshold: int = 0
    min_num_params: int = 0
    split_points: tuple[str, ...] = ()
    quantized_weights: str = ""
    quantized_gradients: str = ""
    name: str = field(default="", compare=False, repr=False)

    axis: ClassVar[str] = "zero"

    def __post_init__(self) -> None:
        if self.level not in {1, 2, 3}:
            raise PlanError(f"zero has the levels 1, 2 and 3, not {self.level}; give level=1, level=2 or level=3")
        if self.reshard_after_forward not in {"on", "off"}:
            raise PlanError(
                f"zero has no reshard_after_forward={self.reshard_after_forward!r}; give off, which keeps weights from "
                "forward to backward, or on"
            )
        if self.reshard_after_forward == "off" and self.level != 3:
            raise PlanError(
                f"zero(..., level={self.level}) does not shard weights, so there is nothing to reshard; leave out "
                "reshard_after_forward, or give level=3"
            )
        for option, number in self._numbers.items():
            if number < 0:
                raise PlanError(f"{option}={number} is a number of elements; give 0, which is as without it, or more")
        for option in (*self._numbers, "split_points"):
            if getattr(self, option) and self.level != 3:
                raise PlanError(
                    f"zero(..., level={self.level}) does not shard weights, so all of them stay whole; leave out "
                    f"{option}, or give level=3"
                )
        self._check_split_points()
        self._check_codecs()

    def _check_codecs(self) -> None:
        """Check that weights and gradients have codecs that shards can have.

        Raises:
            PlanError: one has another, or whole weights would be rounded.
        """
        for option in ("quantized_weights", "quantized_gradients"):
            if getattr(self, option):
                require_choice("zero", option, getattr(self, option), SHARD_CODECS)
        if self.quantized_weights and self.level != 3:
            raise PlanError(
                f"zero(..., level={self.level}) keeps whole weights, which quantized_weights would round for good; "
                "give level=3, where shards stay exact, or leave it out"
            )

    def _check_split_points(self) -> None:
        """Check that each split point is the path of one module.

        Raises:
            PlanError: one has a stage, or is named twice; or units are to be merged by their size, too.
        """
        points = parse_split_points(self.split_points, f"zero({self.degree})", chunk="unit")
        if has_explicit_stages(points):
            first = points[0]
            raise PlanError(
                f"split_points of zero({self.degree}) has {first.module}:{first.stage}, and stages are those of a "
                f"pipeline; give the paths of modules alone: {first.module}"
            )
        if points and self.min_num_params:
            raise PlanError(
                f"zero({self.degree}) was given min_num_params and split_points, which both say what a unit is; give "
                "one of the two"
            )

    @property
    def _numbers(self) -> dict[str, int]:
        """The options of level 3 that are numbers of elements."""
        return {"persistence_threshold": self.persistence_threshold, "min_num_params": self.min_num_params}

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        codecs = ("quantized_weights", "quantized_gradients")
        changed = changed_options(self, "reshard_after_forward", *self._numbers, "split_points", *codecs)
        return self.name or format_term("zero", self.degree, [f"level={self.level}", *changed])

    @property
    def granularity(self) -> Granularity:
        """How finely the model should be split."""
        return "prefer_blocks" if self.level == 3 else "whole"

    @property
    def split_modules(self) -> tuple[str, ...]:
        """Paths of the modules before which the model has to be split."""
        return self.split_points

    @property
    def merged_by(self) -> str:
        """The option by which blocks are merged to units; empty if each is one."""
        return next((name for name in ("min_num_params", "split_points") if getattr(self, name)), "")

    def split_model(self, model: ModelSpec) -> ModelSpec:
        """Return the model with blocks merged to units, if the strategy asks for it.

        Raises:
            PlanError: a split point is not a module with which a block begins.
        """
        if self.min_num_params:
            return model.merge_blocks(self.min_num_params)
        if not self.split_points:
            return model
        model = split_before(model, self.split_points)
        starts = model.module_starts
        return model.merge_blocks_between({find_start(name, starts, str(self)) for name in self.split_points})

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program for ``degree`` replicas with one shard each.

        Raises:
            PlanError: states are sharded already, or live on servers or on the root of a tree.
        """
        self._check_unsharded(program)
        if self.degree == 1:
            return program
        shard = partial(
            self._shard_rank_program,
            units=tuple(model.units),
            whole={unit for unit in model.units if self._stays_whole(unit, model)},
        )
        return map_replicas(program, self.degree, shard)

    def _stays_whole(self, unit: Unit, model: ModelSpec) -> bool:
        """Return whether every rank keeps the whole weights of a unit."""
        return self.level < 3 or model.unit_elements(unit) <= self.persistence_threshold

    def _check_unsharded(self, program: Program) -> None:
        if uses_tree_reduce(program):
            raise PlanError(
                f"{self} comes after tree, where only the first replica updates, so that there is nothing to shard; "
                "write zero(...) with all ranks, without tree(...)"
            )
        for _, instruction in program.instructions():
            if isinstance(instruction, Collective) and instruction.op == "reduce_scatter":
                raise PlanError(f"{self} is in a plan that is sharded already; write one zero(...) with all ranks")
            if self.level > 1 and isinstance(instruction, Collective) and instruction.codec:
                raise PlanError(
                    f"{self} shards gradients before they are all-reduced with {instruction.codec}, which needs whole "
                    "gradients; write zero(..., level=1), or data(...) without compress and reduce"
                )
            if isinstance(instruction, ApplyPushes) or receives_grad(instruction):
                raise PlanError(f"{self} is in a plan whose weights live on servers; write zero(...) or server(...)")

    def _shard_rank_program(
        self, rank_program: RankProgram, group: Group, units: tuple[Unit, ...], whole: Collection[Unit]
    ) -> RankProgram:
        use = _UnitUse.from_rank_program(rank_program, units, whole)
        if self.level == 1:
            rank_program = _reduce_scatter_before_update(rank_program, group)
        elif not any(use.sharded.values()):
            rank_program = map_parts(
                rank_program, lambda body: [new for one in body for new in _with_reduce_scatter(one, group, use)]
            )
        elif self.reshard_after_forward == "off":
            rank_program = map_parts(rank_program, lambda body: list(_all_gather_once(body, group, use)))
        else:
            rank_program = map_parts(
                rank_program, lambda body: [new for one in body for new in _all_gather_around(one, group, use)]
            )
        if self.quantized_weights or self.quantized_gradients:
            rank_program = map_parts(rank_program, lambda body: map(self._add_codec, body))
        return map_parts(rank_program, lambda body: add_after_updates(body, "all_gather", group, whole))

    def _add_codec(self, instruction: Instruction) -> Instruction:
        """Return a gather of weights that are freed, or a reduce-scatter, with its codec; others as they are."""
        match instruction:
            case Collective("all_gather", TensorRef("weight")) if self.quantized_weights:
                return replace(instruction, codec=self.quantized_weights)
            case Collective("reduce_scatter", TensorRef("grad")) if self.quantized_gradients:
                return replace(instruction, codec=self.quantized_gradients)
            case _:
                return instruction

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the cost with the reduce-scatters and all-gathers of the level."""
        ranks = tuple(self._rank_cost(rank, model) for rank in inner.ranks)
        return replace(inner, ranks=ranks).replicate(self.degree)

    def _rank_cost(self, rank: RankCost, model: ModelSpec) -> RankCost:
        volume = sum(size * self._collectives_per_step(unit, rank, model) for unit, size in rank.updates.items())
        shards_grads = self.level > 1
        return replace(
            rank,
            other_bytes=rank.other_bytes + ring_fraction(self.degree) * volume,
            allreduce_bytes=rank.allreduce_bytes / (self.degree if shards_grads else 1),
            updates={unit: size / self.degree for unit, size in rank.updates.items()},
            optimizer_fraction=rank.optimizer_fraction / self.degree,
            grad_fraction=rank.grad_fraction / self.degree if shards_grads else rank.grad_fraction,
        )

    def _collectives_per_step(self, unit: Unit, rank: RankCost, model: ModelSpec) -> Fraction:
        """Return how many reduce-scatters and all-gathers of a unit one step has; one of casts counts in part."""
        reduced = self._encoded_fraction(unit, model, self.quantized_gradients) or model.reduced_fraction(unit)
        if self.level == 1:
            return reduced + 1
        if self._stays_whole(unit, model):
            return rank.num_micros * rank.num_chunks(unit) * reduced + 1
        uses = sum(block in rank.blocks for block in unit)
        gathered = self._encoded_fraction(unit, model, self.quantized_weights) or Fraction(
            model.unit_bytes(unit, held_as="gathered_weight"), model.unit_bytes(unit) or 1
        )
        if self.reshard_after_forward == "off":
            return gathered + rank.num_micros * rank.num_chunks(unit) * reduced
        return rank.num_micros * (2 * uses * gathered + rank.num_chunks(unit) * reduced)

    @staticmethod
    def _encoded_fraction(unit: Unit, model: ModelSpec, codec: str) -> Fraction:
        """Return the bytes of a unit in a codec as a fraction of those of its weights; 0 without a codec."""
        return Fraction(model.unit_bytes(unit, codec), model.unit_bytes(unit) or 1) if codec else Fraction(0)


class _UnitUse(NamedTuple):
    """The units that the blocks of a rank program use.

    Args:
        sharded: units used by each block whose weights are gathered before it.
        completed_by: units whose gradient is complete, within a run of consecutive backwards, after that of each block.
    """

    sharded: dict[int, list[Unit]]
    completed_by: dict[int, list[Unit]]

    @staticmethod
    def from_rank_program(rank_program: RankProgram, units: tuple[Unit, ...], whole: Collection[Unit]) -> _UnitUse:
        by_block = {block: [unit for unit in units if block in unit] for block in forward_blocks(rank_program)}
        run_of = {block: number for number, run in enumerate(backward_runs(rank_program)) for block in run}
        last: dict[tuple[Unit, int], int] = {}
        for block in sorted(by_block, reverse=True):
            last.update({(unit, run_of[block]): block for unit in by_block[block]})
        completed_by = {
            block: [unit for unit in used if last[unit, run_of[block]] == block] for block, used in by_block.items()
        }
        sharded = {block: [unit for unit in used if unit not in whole] for block, used in by_block.items()}
        return _UnitUse(sharded, completed_by)


def _reduce_scatter_before_update(rank_program: RankProgram, group: Group) -> RankProgram:
    units = order_by_grad_completion(rank_program, updated_units(rank_program.body))
    return insert_before_commit(rank_program, [Collective("reduce_scatter", grad(unit), group) for unit in units])


def _with_reduce_scatter(instruction: Instruction, group: Group, use: _UnitUse) -> Iterator[Instruction]:
    """Yield an instruction, followed by the reductions of the gradients that it completes if it is a backward."""
    yield instruction
    if isinstance(instruction, Backward) and instruction.computes_weight_grad:
        for unit in use.completed_by[instruction.block]:
            yield Collective("reduce_scatter", grad(unit), group)
            yield Free(grad(unit))


def _reads_weights(instruction: Instruction) -> TypeGuard[Forward | Backward]:
    """Return whether an instruction reads weights; the part of a backward that computes their gradients does not."""
    return isinstance(instruction, Forward) or (isinstance(instruction, Backward) and instruction.computes_input_grad)


def _all_gather_once(body: Instructions, group: Group, use: _UnitUse) -> Iterator[Instruction]:
    """Yield the instructions with each unit's weights gathered before their first use, and freed after the last."""
    uses = [use.sharded[one.block] if _reads_weights(one) else [] for one in body]
    first = {unit: index for index, units in reversed([*enumerate(uses)]) for unit in units}
    last = {unit: index for index, units in enumerate(uses) for unit in units}
    for index, instruction in enumerate(body):
        yield from (Collective("all_gather", weight(unit), group) for unit in uses[index] if first[unit] == index)
        yield from _with_reduce_scatter(instruction, group, use)
        yield from (Free(weight(unit)) for unit in uses[index] if last[unit] == index)


def _all_gather_around(instruction: Instruction, group: Group, use: _UnitUse) -> Iterator[Instruction]:
    if not _reads_weights(instruction):
        yield from _with_reduce_scatter(instruction, group, use)
        return
    for unit in use.sharded[instruction.block]:
        yield Collective("all_gather", weight(unit), group)
    yield from _with_reduce_scatter(instruction, group, use)
    for unit in use.sharded[instruction.block]:
        yield Free(weight(unit))
