"""What each rank keeps from step to step under a plan, so that plans can be compared by what has to move.

Another plan when ranks or hosts come or go: nearly the fastest, and of those the cheapest to move to.
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
from counterpoint.planner.pipeline.candidates import SYNCHRONOUS_SCHEDULES, find_pipeline_plans
from counterpoint.planner.prepare import compile_for, fit_profile
from counterpoint.planner.ranking import Prediction, format_plan
from counterpoint.program.instruction import ApplyPushes, Collective, Forward, TensorRef, Update
from counterpoint.program.program import Instructions, RankProgram
from counterpoint.program.units import sharded_units
from counterpoint.viz.number_format import format_seconds
from counterpoint.world.cluster import Cluster

FractionRange: TypeAlias = tuple[Fraction, Fraction]
"""A part of something that begins at 0 and ends at 1."""

FULL_RANGE: FractionRange = (Fraction(0), Fraction(1))
NUM_STATES = 2
"""Values that an optimizer keeps per parameter: two for Adam."""


@dataclass(frozen=True, slots=True)
class OwnedState:
    """What one rank keeps of each parameter, by its name.

    Args:
        weights: the part of the weight.
        states: the part of which it keeps the optimizer's states.
        sizes: the bytes of each whole parameter.
    """

    weights: Mapping[str, FractionRange]
    optimizer_states: Mapping[str, FractionRange]
    param_bytes: Mapping[str, int]


def find_owned_state(compiled: CompiledPlan) -> list[OwnedState]:
    """Return what each rank keeps from one step to the next.

    A rank keeps the weights that it reads or updates, in part where it gathers them first, and the states of what it
    updates, in part where its gradient was shared out. Parts are by position in what is shared out together.
    """
    model = compiled.model
    units, sizes = model.units, {param.name: param.num_bytes for param in model.params}
    rows = compiled.step_variants[-1].program.rank_programs
    return [_owned_by(rank, row, model, units, sizes) for rank, row in enumerate(rows)]


def missing_bytes(needed: OwnedState, owned: OwnedState | None) -> int:
    """Return the bytes of weights and states that a rank needs and does not have; None for one that has nothing."""
    had = owned if owned is not None else OwnedState({}, {}, {})
    weights = _missing(needed.weights, had.weights, needed.param_bytes)
    return round(weights + NUM_STATES * _missing(needed.optimizer_states, had.optimizer_states, needed.param_bytes))


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
    slices = {name for block in model.blocks if block.tp is not None for name, _ in block.tp.sharded_dims}
    own = (Fraction(rank_program.tp_rank, rank_program.tp_degree), Fraction(1, rank_program.tp_degree))
    weights: dict[str, FractionRange] = {}
    states: dict[str, FractionRange] = {}
    for unit, part in _owned_weights(rank, rank_program.body, users):
        weights.update(_param_ranges(units[unit], part, sizes))
    for unit, part in _owned_optimizer_states(rank, rank_program.body):
        states.update(_param_ranges(units[unit], part, sizes))
    return OwnedState(_to_full_params(weights, slices, own), _to_full_params(states, slices, own), sizes)


def _owned_weights(
    rank: int, instructions: Instructions, users: Mapping[int, list[Unit]]
) -> Iterator[tuple[Unit, FractionRange]]:
    gathered = {unit: _shard_range(rank, group) for unit, group in sharded_units(instructions, users)}
    for word in instructions:
        match word:
            case Forward(block):
                yield from ((unit, gathered.get(unit, FULL_RANGE)) for unit in users[block])
            case Update(unit):  # also on a server, which has no forwards
                yield unit, gathered.get(unit, FULL_RANGE)
            case ApplyPushes(served):
                yield from ((unit, FULL_RANGE) for unit in served)
            case _:
                pass


def _owned_optimizer_states(rank: int, instructions: Instructions) -> Iterator[tuple[Unit, FractionRange]]:
    shared: dict[Unit, FractionRange] = {}
    for word in instructions:
        match word:
            case Collective("reduce_scatter", TensorRef("grad", unit), group):
                shared[unit] = _shard_range(rank, group)
            case Update(unit):
                yield unit, shared.get(unit, FULL_RANGE)
            case ApplyPushes(served) if word.applies_gradients:
                yield from ((unit, FULL_RANGE) for unit in served)
            case _:
                pass


def _shard_range(rank: int, group: tuple[int, ...]) -> FractionRange:
    place = group.index(rank)
    return Fraction(place, len(group)), Fraction(place + 1, len(group))


def _param_ranges(
    names: tuple[str, ...], part: FractionRange, sizes: Mapping[str, int]
) -> Iterator[tuple[str, FractionRange]]:
    """Yield for each parameter of a unit, which lie one behind the other, its part of a part of them all."""
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
    """Return parts of slices as parts of whole parameters; ``own`` is where the slice begins, and its length."""
    begin, length = own
    return {
        name: (begin + low * length, begin + high * length) if name in slices else (low, high)
        for name, (low, high) in spans.items()
    }


@dataclass(frozen=True, slots=True)
class ReplanResult:
    """A plan for other ranks than before.

    Args:
        plan: the new one.
        moved_bytes: weights and optimizer states that ranks need under it and do not have from the old one.
        step_s: the predicted seconds of a step.
        why: what it was preferred to, and for what.
    """

    plan: Plan
    moved_bytes: int
    step_s: float
    reason: str


def replan(  # noqa: PLR0913 - what there was, what there will be, and what is known of it, by keyword
    plan: Plan,
    model: ModelSpec,
    old_cluster: Cluster,
    new_cluster: Cluster,
    batch_size: int,
    *,
    survivors: Mapping[int, int] | None = None,
    profile: ModelProfile | None = None,
) -> ReplanResult:
    """Return the plan for a cluster that has changed: of those within 2 % of the fastest the cheapest to move to.

    Of plans to which equally many bytes move the simplest is taken; the old plan, where it still fits the ranks, moves
    none.

    Args:
        plan: what the ranks have trained under.
        model: in its finest blocks.
        old_cluster: where they did.
        new_cluster: where they will; its levels say how many ranks there are, or else its speeds.
        batch_size: samples of one global batch, as before.
        survivors: for each new rank that was there before the rank that it was; by default every rank that both have
            is the same.
        timing: of the model's pieces, by whose seconds plans are ranked and cut; None where their work is only counted.

    Raises:
        PlanError: the new cluster does not say how many ranks it has, or no plan fits it, or the timing is of another
            model.
    """
    num_ranks = new_cluster.num_ranks or len(new_cluster.speeds)
    if not num_ranks:
        raise PlanError(
            "the new cluster does not say how many ranks it has; give it levels, or a speed for each of its ranks"
        )
    stays = survivors if survivors is not None else {rank: rank for rank in range(min(num_ranks, plan.num_ranks))}
    question = PlanningProblem(model, new_cluster, batch_size, profile)
    before = _owned_under(plan, replace(question, cluster=old_cluster))
    choice = rank_and_choose(_candidates(plan, num_ranks, question), question)
    near = _nearly_fastest(choice)
    after = {one.plan: _owned_under(one.plan, question) for one in near}
    moved = {one: _moved_bytes(before, held, stays) for one, held in after.items()}
    order = {one: at for at, one in enumerate(choice.by_simplicity)}
    taken = min(near, key=lambda one: (moved[one.plan], order.get(one.plan, len(order))))
    return ReplanResult(taken.plan, moved[taken.plan], taken.step_s, _explain_choice(taken, near, moved))


def _candidates(plan: Plan, num_ranks: int, problem: PlanningProblem) -> Iterator[Plan]:
    """Yield the old plan, if it fits the ranks, then those of the enumeration, then stages with cuts of their own."""
    if plan.num_ranks == num_ranks:
        yield replace(plan, source=None)
    model, size, timing = problem.model, problem.batch_size, problem.profile
    staged = find_pipeline_plans(
        num_ranks, model.without_tp, problem.cluster, size, SYNCHRONOUS_SCHEDULES, profile=timing
    )
    for one in (*enumerate_plans(num_ranks, model), *staged):
        yield replace(one, passes=plan.passes)


def _nearly_fastest(choice: PlanChoice) -> list[Prediction]:
    kept = [found for found in choice.ranking.predictions if found.is_synchronous and found.fits]
    return [found for found in kept if found.step_s <= MEASURED_TOLERANCE * kept[0].step_s]


def _owned_under(plan: Plan, problem: PlanningProblem) -> list[OwnedState]:
    """Return what each rank keeps from step to step under a plan."""
    timing = fit_profile(plan, problem.model, problem.profile)
    compiled, _ = compile_for(plan, problem.model, problem.cluster, problem.batch_size, timing)
    return find_owned_state(compiled)


def _moved_bytes(before: Sequence[OwnedState], after: Sequence[OwnedState], stays: Mapping[int, int]) -> int:
    return sum(missing_bytes(needs, before[stays[rank]] if rank in stays else None) for rank, needs in enumerate(after))


def _explain_choice(taken: Prediction, near: Sequence[Prediction], moved: Mapping[Plan, int]) -> str:
    """Return what the plan was preferred to: the fastest, if it is another one, or else the next cheapest."""
    told = f"{format_plan(taken.plan)}: {format_seconds(taken.step_s)} a step, {moved[taken.plan]} bytes to move"
    fastest = near[0]
    if fastest.plan != taken.plan:
        slower, more = 100 * (taken.step_s / fastest.step_s - 1), moved[fastest.plan]
        return f"{told}; {slower:.1f} % slower than {format_plan(fastest.plan)}, for which {more} bytes would move"
    others = sorted((one for one in near if one.plan != taken.plan), key=lambda one: moved[one.plan])
    if not others:
        return f"{told}; no other plan is within 2 % of it"
    other = others[0]
    return (
        f"{told}; the fastest, and for {format_plan(other.plan)}, which is within 2 % of it, "
        f"{moved[other.plan]} bytes would move"
    )
