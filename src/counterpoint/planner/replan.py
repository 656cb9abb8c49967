"""Another plan when ranks or hosts come or go: nearly the fastest, and of those the cheapest to move to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from counterpoint.drawing.scale import format_seconds
from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.model.timing import Timing
from counterpoint.plan import Plan
from counterpoint.planner.choose import NEARLY_AS_FAST, Choice, weigh
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.given import compiled_for, fitted_to
from counterpoint.planner.holdings import Holding, holdings, missing_bytes
from counterpoint.planner.rank import Prediction, named
from counterpoint.planner.remedies import Question
from counterpoint.planner.staged import EXACT_ORDERS, staged_plans
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


def replan(  # noqa: PLR0913 - what there was, what there will be, and what is known of it, by keyword
    plan: Plan,
    model: ModelSpec,
    old_cluster: Cluster,
    new_cluster: Cluster,
    batch_size: int,
    *,
    survivors: Mapping[int, int] | None = None,
    timing: Timing | None = None,
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
    question = Question(model, new_cluster, batch_size, timing)
    before = _held_under(plan, replace(question, cluster=old_cluster))
    choice = weigh(_candidates(plan, num_ranks, question), question)
    near = _nearly_as_fast(choice)
    after = {one.plan: _held_under(one.plan, question) for one in near}
    moved = {one: _moved_bytes(before, held, stays) for one, held in after.items()}
    order = {one: at for at, one in enumerate(choice.simplest)}
    taken = min(near, key=lambda one: (moved[one.plan], order.get(one.plan, len(order))))
    return Replanned(taken.plan, moved[taken.plan], taken.step_s, _why(taken, near, moved))


def _candidates(plan: Plan, num_ranks: int, question: Question) -> Iterator[Plan]:
    """Yield the old plan, if it fits the ranks, then those of the enumeration, then stages with cuts of their own."""
    if plan.num_ranks == num_ranks:
        yield replace(plan, written=None)
    model, size, timing = question.model, question.batch_size, question.timing
    staged = staged_plans(num_ranks, model.unsliced, question.cluster, size, EXACT_ORDERS, timing=timing)
    for one in (*enumerate_plans(num_ranks, model), *staged):
        yield replace(one, passes=plan.passes)


def _nearly_as_fast(choice: Choice) -> list[Prediction]:
    kept = [found for found in choice.ranking.predictions if found.is_synchronous and found.fits]
    return [found for found in kept if found.step_s <= NEARLY_AS_FAST * kept[0].step_s]


def _held_under(plan: Plan, question: Question) -> list[Holding]:
    """Return what each rank keeps from step to step under a plan."""
    timing = fitted_to(plan, question.model, question.timing)
    compiled, _ = compiled_for(plan, question.model, question.cluster, question.batch_size, timing)
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
