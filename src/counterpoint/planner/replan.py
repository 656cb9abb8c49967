"""Choose another plan when ranks or hosts come or go: nearly the fastest, and of those the cheapest to move to.

What has to move follows from what each rank keeps between steps under the old and the new plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias

from counterpoint.compiler.compile import CompiledPlan
from counterpoint.errors import PlanError
from counterpoint.model.model_profile import ModelProfile
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.plan.plan import Plan
from counterpoint.planner.choose import MEASURED_TOLERANCE, PlanChoice, rank_and_choose
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.memory_suggestions import PlanningProblem
from counterpoint.planner.pipeline.candidates import DEFAULT_SYNCHRONOUS_SCHEDULES, find_pipeline_plans
from counterpoint.planner.prepare import compile_for, fit_profile
from counterpoint.planner.ranking import Prediction, format_plan
from counterpoint.program.instruction import ApplyPushes, Collective, Forward, TensorRef, Update
from counterpoint.program.program import Instructions, RankProgram
from counterpoint.program.units import sharded_units
from counterpoint.viz.number_format import format_seconds
from counterpoint.world.cluster import Cluster

FractionRange: TypeAlias = tuple[Fraction, Fraction]
"""A part of a parameter or a unit, from 0 to 1."""

FULL_RANGE: FractionRange = (Fraction(0), Fraction(1))
NUM_STATES = 2
"""Values per parameter that an optimizer keeps: two for Adam."""


@dataclass(frozen=True, slots=True)
class OwnedState:
    """What one rank keeps of each parameter between steps, by the parameter's name.

    Args:
        weights: the part of the weight.
        optimizer_states: the part whose optimizer states it keeps.
        param_bytes: the bytes of each whole parameter.
    """

    weights: Mapping[str, FractionRange]
    optimizer_states: Mapping[str, FractionRange]
    param_bytes: Mapping[str, int]


def find_owned_state(compiled: CompiledPlan) -> list[OwnedState]:
    """Return what each rank keeps from one step to the next.

    A rank keeps the weights that it reads or updates, only its shard if it gathers them first, and the states of what
    it updates, only a shard if its gradient is reduce-scattered. Parts are positions in the flat unit.
    """
    model = compiled.model
    units, param_bytes = model.units, {param.name: param.num_bytes for param in model.params}
    rank_programs = compiled.step_variants[-1].program.rank_programs
    return [_owned_by(rank, rank_program, model, units, param_bytes) for rank, rank_program in enumerate(rank_programs)]


def missing_bytes(needed: OwnedState, owned: OwnedState | None) -> int:
    """Return the bytes of weights and states that a rank needs and does not own; None for a rank that owns nothing."""
    present = owned if owned is not None else OwnedState({}, {}, {})
    weights = _missing(needed.weights, present.weights, needed.param_bytes)
    return round(weights + NUM_STATES * _missing(needed.optimizer_states, present.optimizer_states, needed.param_bytes))


def _missing(
    needed: Mapping[str, FractionRange], owned: Mapping[str, FractionRange], sizes: Mapping[str, int]
) -> Fraction:
    total = Fraction(0)
    for name, (low, high) in needed.items():
        first, last = owned.get(name, (low, low))
        total += sizes[name] * (high - low - max(Fraction(0), min(high, last) - max(low, first)))
    return total


def _owned_by(
    rank: int,
    rank_program: RankProgram,
    model: ModelSpec,
    units: Mapping[Unit, tuple[str, ...]],
    sizes: Mapping[str, int],
) -> OwnedState:
    users = {block: [unit for unit in units if block in unit] for block in range(model.num_blocks)}
    sharded = {name for block in model.blocks if block.tp is not None for name, _ in block.tp.sharded_dims}
    shard = (Fraction(rank_program.tp_rank, rank_program.tp_degree), Fraction(1, rank_program.tp_degree))
    weights: dict[str, FractionRange] = {}
    optimizer_states: dict[str, FractionRange] = {}
    for unit, fraction_range in _owned_weights(rank, rank_program.body, users):
        weights.update(_param_ranges(units[unit], fraction_range, sizes))
    for unit, fraction_range in _owned_optimizer_states(rank, rank_program.body):
        optimizer_states.update(_param_ranges(units[unit], fraction_range, sizes))
    return OwnedState(
        _to_full_params(weights, sharded, shard), _to_full_params(optimizer_states, sharded, shard), sizes
    )


def _owned_weights(
    rank: int, instructions: Instructions, users: Mapping[int, list[Unit]]
) -> Iterator[tuple[Unit, FractionRange]]:
    gathered = {unit: _shard_range(rank, group) for unit, group in sharded_units(instructions, users)}
    for instruction in instructions:
        match instruction:
            case Forward(block):
                yield from ((unit, gathered.get(unit, FULL_RANGE)) for unit in users[block])
            case Update(unit):  # also on a server, which has no forwards
                yield unit, gathered.get(unit, FULL_RANGE)
            case ApplyPushes(served_units):
                yield from ((unit, FULL_RANGE) for unit in served_units)
            case _:
                pass


def _owned_optimizer_states(rank: int, instructions: Instructions) -> Iterator[tuple[Unit, FractionRange]]:
    reduce_scattered: dict[Unit, FractionRange] = {}
    for instruction in instructions:
        match instruction:
            case Collective("reduce_scatter", TensorRef("grad", unit), group):
                reduce_scattered[unit] = _shard_range(rank, group)
            case Update(unit):
                yield unit, reduce_scattered.get(unit, FULL_RANGE)
            case ApplyPushes(served_units) if instruction.applies_gradients:
                yield from ((unit, FULL_RANGE) for unit in served_units)
            case _:
                pass


def _shard_range(rank: int, group: tuple[int, ...]) -> FractionRange:
    position = group.index(rank)
    return Fraction(position, len(group)), Fraction(position + 1, len(group))


def _param_ranges(
    names: tuple[str, ...], part: FractionRange, sizes: Mapping[str, int]
) -> Iterator[tuple[str, FractionRange]]:
    """Yield for each parameter of a flat unit its part of a part of the unit."""
    total = sum(sizes[name] for name in names)
    low, high = (edge * total for edge in part)
    start = 0
    for name in names:
        first, last = max(low, Fraction(start)), min(high, Fraction(start + sizes[name]))
        if last > first:
            yield name, ((first - start) / sizes[name], (last - start) / sizes[name])
        start += sizes[name]


def _to_full_params(
    spans: Mapping[str, FractionRange], slices: set[str], own: FractionRange
) -> dict[str, FractionRange]:
    """Return parts of tensor-parallel shards as parts of whole parameters; ``own`` is the shard's start and length."""
    begin, length = own
    return {
        name: (begin + low * length, begin + high * length) if name in slices else (low, high)
        for name, (low, high) in spans.items()
    }


@dataclass(frozen=True, slots=True)
class ReplanResult:
    """A plan after a change of ranks.

    Args:
        plan: the new one.
        moved_bytes: weights and optimizer states that ranks need under it and do not own under the old one.
        step_s: the predicted seconds of a step.
        reason: which plan it was preferred to, and why.
    """

    plan: Plan
    moved_bytes: int
    step_s: float
    reason: str


def replan(  # noqa: PLR0913 - both clusters and options by keyword
    plan: Plan,
    model: ModelSpec,
    old_cluster: Cluster,
    new_cluster: Cluster,
    batch_size: int,
    *,
    survivors: Mapping[int, int] | None = None,
    profile: ModelProfile | None = None,
) -> ReplanResult:
    """Return the plan for a changed cluster: of those within 2 % of the fastest the cheapest to move to.

    Of equally cheap plans the simplest is chosen; the old plan, if it still fits the ranks, moves nothing.

    Args:
        plan: the old plan.
        model: in its finest blocks.
        old_cluster: where the old plan ran.
        new_cluster: the present one; its levels, or else its speeds, say how many ranks there are.
        batch_size: samples of one global batch, as before.
        survivors: the old rank of each new rank that existed before; by default ranks keep their numbers.
        profile: measured times of the model's layers, by which plans are ranked and partitioned; None to use operation
            counts.

    Raises:
        PlanError: the new cluster does not say how many ranks it has, no plan fits it, or the profile is of another
            model.
    """
    num_ranks = new_cluster.num_ranks or len(new_cluster.speeds)
    if not num_ranks:
        raise PlanError(
            "the new cluster does not say how many ranks it has; give it levels, or a speed for each of its ranks"
        )
    old_ranks = survivors if survivors is not None else {rank: rank for rank in range(min(num_ranks, plan.num_ranks))}
    problem = PlanningProblem(model, new_cluster, batch_size, profile)
    before = _owned_under(plan, replace(problem, cluster=old_cluster))
    choice = rank_and_choose(_candidates(plan, num_ranks, problem), problem)
    nearly_fastest = _nearly_fastest(choice)
    after = {prediction.plan: _owned_under(prediction.plan, problem) for prediction in nearly_fastest}
    moved = {candidate: _moved_bytes(before, owned, old_ranks) for candidate, owned in after.items()}
    positions = {candidate: index for index, candidate in enumerate(choice.by_simplicity)}
    chosen = min(
        nearly_fastest, key=lambda prediction: (moved[prediction.plan], positions.get(prediction.plan, len(positions)))
    )
    return ReplanResult(chosen.plan, moved[chosen.plan], chosen.step_s, _explain_choice(chosen, nearly_fastest, moved))


def _candidates(plan: Plan, num_ranks: int, problem: PlanningProblem) -> Iterator[Plan]:
    """Yield the old plan, if it fits the ranks, then enumerated plans, then pipelines with replicated stages."""
    if plan.num_ranks == num_ranks:
        yield replace(plan, source=None)
    model, batch_size, profile = problem.model, problem.batch_size, problem.profile
    pipeline_plans = find_pipeline_plans(
        num_ranks, model.without_tp, problem.cluster, batch_size, DEFAULT_SYNCHRONOUS_SCHEDULES, profile=profile
    )
    for candidate in (*enumerate_plans(num_ranks, model), *pipeline_plans):
        yield replace(candidate, passes=plan.passes)


def _nearly_fastest(choice: PlanChoice) -> list[Prediction]:
    eligible = choice.ranking.eligible
    return [prediction for prediction in eligible if prediction.step_s <= MEASURED_TOLERANCE * eligible[0].step_s]


def _owned_under(plan: Plan, problem: PlanningProblem) -> list[OwnedState]:
    """Return what each rank keeps between steps under a plan."""
    profile = fit_profile(plan, problem.model, problem.profile)
    compiled, _ = compile_for(plan, problem.model, problem.cluster, problem.batch_size, profile)
    return find_owned_state(compiled)


def _moved_bytes(before: Sequence[OwnedState], after: Sequence[OwnedState], old_ranks: Mapping[int, int]) -> int:
    return sum(
        missing_bytes(needed, before[old_ranks[rank]] if rank in old_ranks else None)
        for rank, needed in enumerate(after)
    )


def _explain_choice(chosen: Prediction, nearly_fastest: Sequence[Prediction], moved: Mapping[Plan, int]) -> str:
    """Return which plan was preferred to which: the fastest, if it is another one, or else the next cheapest."""
    summary = f"{format_plan(chosen.plan)}: {format_seconds(chosen.step_s)} a step, {moved[chosen.plan]} bytes to move"
    fastest = nearly_fastest[0]
    if fastest.plan != chosen.plan:
        slower, more = 100 * (chosen.step_s / fastest.step_s - 1), moved[fastest.plan]
        return f"{summary}; {slower:.1f} % slower than {format_plan(fastest.plan)}, for which {more} bytes would move"
    others = sorted(
        (prediction for prediction in nearly_fastest if prediction.plan != chosen.plan),
        key=lambda prediction: moved[prediction.plan],
    )
    if not others:
        return f"{summary}; no other plan is within 2 % of it"
    other = others[0]
    return (
        f"{summary}; the fastest, and for {format_plan(other.plan)}, which is within 2 % of it, "
        f"{moved[other.plan]} bytes would move"
    )
