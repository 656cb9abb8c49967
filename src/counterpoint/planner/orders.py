"""Other orders than 1F1B, tried only where a pipeline is idle for long enough that they could win."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from counterpoint.model.spec import ModelSpec
from counterpoint.model.timing import Timing
from counterpoint.plan import Plan
from counterpoint.planner.given import settle
from counterpoint.planner.limit import ENDLESS, Limit
from counterpoint.planner.rank import Prediction, Ranking, merged, rank_plans
from counterpoint.strategies.pipeline import Pipeline
from counterpoint.world.cluster import Cluster

SAVED = {("zero_bubble", 1): 2 / 3, ("interleaved", 2): 1 / 2, ("zero_bubble", 2): 5 / 6}
"""For an order and its chunks per stage, which part of 1F1B's bubble it saves by the formula of its docstring."""
MOST_TRIED = 4
"""Those that promise most are tried, so many of them."""


def rank_with_orders(
    plans: Iterable[Plan],
    model: ModelSpec,
    cluster: Cluster,
    *,
    batch_size: int,
    timing: Timing | None = None,
    limit: Limit = ENDLESS,
) -> Ranking:
    """Return plans as :func:`rank_plans` does, and among them their pipelines in other orders that may be fastest.

    An order is tried where the plan would be the fastest if it saved what its formula says; what it costs in messages
    and memory is then predicted like that of any plan.

    Args:
        plans: what is compared.
        model: the model in its finest blocks.
        cluster: where they would run.
        batch_size: samples of one global batch.
        timing: of the model's pieces; None where their work is only counted.
        limit: when to end, as for :func:`rank_plans`.
    """
    rank = partial(rank_plans, model=model, cluster=cluster, batch_size=batch_size, timing=timing, limit=limit)
    ranking = rank(plans)
    settled = partial(settle, model=model, cluster=cluster, batch_size=batch_size, timing=timing)
    fitting = [found.step_s for found in ranking.predictions if found.is_synchronous and found.fits]
    if not fitting:
        return ranking
    hopes = {
        plan: hope
        for found in ranking.predictions
        if found.is_synchronous
        for plan, hope in _variants(found, model.unsliced.num_blocks, settled)
        if hope < fitting[0]
    }
    tried = sorted(hopes, key=hopes.__getitem__)[:MOST_TRIED]
    if not tried:
        return ranking
    return merged(ranking, rank(tried))


def _variants(found: Prediction, num_blocks: int, settled: Callable[[Plan], Plan]) -> Iterator[tuple[Plan, float]]:
    """Yield the plan with other orders of its pipeline, and the seconds of a step if they save what they may."""
    for at, given in enumerate(found.plan.strategies):
        if not isinstance(given, Pipeline) or replace(given, balance=(), cuts=()) != Pipeline(given.degree):
            continue
        if given != Pipeline(given.degree) and settled(_with(found.plan, at, Pipeline(given.degree))) != found.plan:
            continue  # somebody chose where its stages begin
        for (order, virtual), saved in SAVED.items():
            if given.degree * virtual <= num_blocks:
                plan = _with(found.plan, at, Pipeline(given.degree, order, virtual=virtual))
                yield plan, found.step_s - saved * found.idle_s


def _with(plan: Plan, at: int, pipeline: Pipeline) -> Plan:
    return replace(plan, strategies=(*plan.strategies[:at], pipeline, *plan.strategies[at + 1 :]))
