"""The plan one would take without thinking further: with solo's numbers, fast, and no fancier than that needs."""

from __future__ import annotations

from collections.abc import Iterable

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.plan import Plan
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.orders import rank_with_orders
from counterpoint.planner.rank import Ranking
from counterpoint.planner.staged import EXACT_ORDERS, staged_plans
from counterpoint.strategies.pipeline import Pipeline
from counterpoint.strategies.server import Server
from counterpoint.world.cluster import Cluster

NEARLY_AS_FAST = 1.02
"""A simpler plan may take so many times as long as the fastest one."""


def choose(num_ranks: int, model: ModelSpec, cluster: Cluster, batch_size: int) -> Plan:
    """Return the best synchronous plan for so many ranks; the same wherever it is asked for.

    Example:
        >>> from counterpoint.model.spec import chain
        >>> print(choose(1, chain(4), Cluster(), 32))
        solo

    Raises:
        PlanError: there is none; the message says what stands in the way.
    """
    staged = staged_plans(num_ranks, model, cluster, batch_size, EXACT_ORDERS)
    return choose_from((*enumerate_plans(num_ranks, model), *staged), model, cluster, batch_size=batch_size)


def choose_from(plans: Iterable[Plan], model: ModelSpec, cluster: Cluster, *, batch_size: int) -> Plan:
    """Return the first of the plans that is at most 2 % slower than the fastest that keeps the numbers and fits.

    Other orders of their pipelines are tried where they could be faster, and come last.

    Args:
        plans: what to choose from, the simplest first.
        model: the model in its finest blocks.
        cluster: where it runs.
        batch_size: samples of one global batch.

    Raises:
        PlanError: there is none; the message says what stands in the way.
    """
    candidates = {plan: at for at, plan in enumerate(dict.fromkeys(plan for plan in plans if not _is_late(plan)))}
    ranking = rank_with_orders(candidates, model, cluster, batch_size=batch_size)
    kept = [found for found in ranking.predictions if found.is_synchronous and found.fits]
    if not kept:
        raise PlanError(_obstacle(ranking))
    near = [found.plan for found in kept if found.step_s <= NEARLY_AS_FAST * kept[0].step_s]
    return min(near, key=lambda plan: candidates.get(plan, len(candidates)))


def _is_late(plan: Plan) -> bool:
    """Tell whether gradients meet newer weights than they were computed with, so that it need not be ranked."""
    return any(
        (isinstance(strategy, Pipeline) and strategy.is_stream)
        or (isinstance(strategy, Server) and strategy.consistency == "asp")
        for strategy in plan.strategies
    )


def _obstacle(ranking: Ranking) -> str:
    exact = [found for found in ranking.predictions if found.is_synchronous]
    if exact:
        least = min(exact, key=lambda found: found.memory_bytes)
        return (
            f"no plan fits: {least.plan} holds least, {least.memory_bytes} of {least.room_bytes} bytes on its fullest "
            "rank; take more ranks, or a smaller batch"
        )
    if ranking.refusals:
        refused = ranking.refusals[0]
        return f"no plan can be carried out; {refused.plan}, for one: {refused.reason}"
    return "there is no synchronous plan among those to choose from; give one, for instance data"
