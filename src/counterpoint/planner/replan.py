"""Another plan when ranks or hosts come or go: nearly the fastest, and of those the cheapest to move to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from counterpoint.drawing.scale import format_seconds
from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.plan import Plan
from counterpoint.planner.choose import NEARLY_AS_FAST, Choice, weigh
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.holdings import Holding, holdings, missing_bytes
from counterpoint.planner.rank import Prediction, compiled_for, named
from counterpoint.planner.remedies import Question
from counterpoint.world.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Replanned:
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
    why: str


def replan(
    plan: Plan,
    model: ModelSpec,
    old_cluster: Cluster,
    new_cluster: Cluster,
    batch_size: int,
    *,
    survivors: Mapping[int, int] | None = None,
) -> Replanned:
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

    Raises:
        PlanError: the new cluster does not say how many ranks it has, or no plan fits it.
    """
    num_ranks = new_cluster.num_ranks or len(new_cluster.speeds)
    if not num_ranks:
        raise PlanError(
            "the new cluster does not say how many ranks it has; give it levels, or a speed for each of its ranks"
        )
    stays = survivors if survivors is not None else {rank: rank for rank in range(min(num_ranks, plan.num_ranks))}
    before = _held_under(plan, model, old_cluster, batch_size)
    own = [replace(plan, written=None)] if plan.num_ranks == num_ranks else []
    plans = (replace(one, passes=plan.passes) for one in enumerate_plans(num_ranks, model))
    choice = weigh([*own, *plans], Question(model, new_cluster, batch_size))
    near = _nearly_as_fast(choice)
    after = {one.plan: _held_under(one.plan, model, new_cluster, batch_size) for one in near}
    moved = {one: _moved_bytes(before, held, stays) for one, held in after.items()}
    order = {one: at for at, one in enumerate(choice.simplest)}
    taken = min(near, key=lambda one: (moved[one.plan], order.get(one.plan, len(order))))
    return Replanned(taken.plan, moved[taken.plan], taken.step_s, _why(taken, near, moved))


def _nearly_as_fast(choice: Choice) -> list[Prediction]:
    kept = [found for found in choice.ranking.predictions if found.is_synchronous and found.fits]
    return [found for found in kept if found.step_s <= NEARLY_AS_FAST * kept[0].step_s]


def _held_under(plan: Plan, model: ModelSpec, cluster: Cluster, batch_size: int) -> list[Holding]:
    """Return what each rank keeps from step to step under a plan."""
    compiled, _ = compiled_for(plan, model, cluster, batch_size)
    return holdings(compiled)


def _moved_bytes(before: Sequence[Holding], after: Sequence[Holding], stays: Mapping[int, int]) -> int:
    return sum(missing_bytes(needs, before[stays[rank]] if rank in stays else None) for rank, needs in enumerate(after))


def _why(taken: Prediction, near: Sequence[Prediction], moved: Mapping[Plan, int]) -> str:
    """Return what the plan was preferred to: the fastest, if it is another one, or else the next cheapest."""
    told = f"{named(taken.plan)}: {format_seconds(taken.step_s)} a step, {moved[taken.plan]} bytes to move"
    fastest = near[0]
    if fastest.plan != taken.plan:
        slower, more = 100 * (taken.step_s / fastest.step_s - 1), moved[fastest.plan]
        return f"{told}; {slower:.1f} % slower than {named(fastest.plan)}, for which {more} bytes would move"
    others = sorted((one for one in near if one.plan != taken.plan), key=lambda one: moved[one.plan])
    if not others:
        return f"{told}; no other plan is within 2 % of it"
    other = others[0]
    return (
        f"{told}; the fastest, and for {named(other.plan)}, which is within 2 % of it, "
        f"{moved[other.plan]} bytes would move"
    )
