"""Other orders than 1F1B, tried only where a pipeline is idle for long enough that they could win."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from counterpoint.plan import Plan
from counterpoint.planner.given import settle
from counterpoint.planner.limit import ENDLESS, Limit
from counterpoint.planner.rank import Prediction, Ranking, merged, rank_among, split
from counterpoint.planner.rows.replay import Replay
from counterpoint.strategies.pipeline import Pipeline

SAVED = {("zero_bubble", 1): 2 / 3, ("interleaved", 2): 1 / 2, ("zero_bubble", 2): 5 / 6}
"""For an order and its chunks per stage, which part of 1F1B's bubble it saves by the formula of its docstring."""
MOST_TRIED = 4
"""Those that promise most are tried, so many of them."""


def rank_with_orders(
    plans: Iterable[Plan], replay: Replay, limit: Limit = ENDLESS, within: float | None = None
) -> Ranking:
    """Return plans as :func:`rank_among` does, and among them their pipelines in other orders that may be fastest.

    An order is tried where the plan would be the fastest if it saved what its formula says; what it costs in messages
    and memory is then predicted like that of any plan.

    Args:
        plans: what is compared.
        replay: for a model, a cluster and a batch, as :func:`replay_for` makes it.
        limit: when to end, as for :func:`rank_among`.
        within: which plans may be left out, as for :func:`rank_among`.
    """
    ranking = rank_among(plans, replay, limit, within)
    tried = _promising(ranking, replay)
    return merged(ranking, rank_among(tried, replay, limit, within)) if tried else ranking


def _promising(ranking: Ranking, replay: Replay) -> list[Plan]:
    """Return the orders that would be fastest if they saved what their formulas say, those that promise most."""
    pipelines = [found for found in ranking.predictions if found.is_synchronous and _is_pipelined(found.plan)]
    hopes: dict[Plan, float] = {}
    most_s = ranking.kept[0].step_s if ranking.kept else 0.0
    for found in sorted(pipelines, key=_least_s):
        if _least_s(found) >= most_s:
            break
        hopes |= {plan: hope for plan, hope in _variants(split(found, replay), replay) if hope < most_s}
        if len(hopes) >= MOST_TRIED:
            most_s = sorted(hopes.values())[MOST_TRIED - 1]
    return sorted(hopes, key=hopes.__getitem__)[:MOST_TRIED]


def _is_pipelined(plan: Plan) -> bool:
    return any(isinstance(strategy, Pipeline) and _is_plain(strategy) for strategy in plan.strategies)


def _is_plain(pipeline: Pipeline) -> bool:
    """Tell whether nothing was chosen of a pipeline but, perhaps, where its stages begin."""
    return replace(pipeline, balance=(), cuts=()) == Pipeline(pipeline.degree)


def _least_s(found: Prediction) -> float:
    """Return what a step would take if all of its waiting were idleness, and the best order saved what it may of it."""
    return found.step_s - max(SAVED.values()) * found.waiting_s


def _variants(found: Prediction, replay: Replay) -> Iterator[tuple[Plan, float]]:
    """Yield the plan with other orders of its pipeline, and the seconds of a step if they save what they may."""
    num_blocks = replay.model.unsliced.num_blocks
    settled = partial(
        settle, model=replay.model, cluster=replay.cluster, batch_size=replay.batch_size, timing=replay.timing
    )
    for at, given in enumerate(found.plan.strategies):
        if not isinstance(given, Pipeline) or not _is_plain(given):
            continue
        if given != Pipeline(given.degree) and settled(_with(found.plan, at, Pipeline(given.degree))) != found.plan:
            continue  # somebody chose where its stages begin
        for (order, virtual), saved in SAVED.items():
            if given.degree * virtual <= num_blocks:
                plan = _with(found.plan, at, Pipeline(given.degree, order, virtual=virtual))
                yield plan, found.step_s - saved * found.idle_s


def _with(plan: Plan, at: int, pipeline: Pipeline) -> Plan:
    return replace(plan, strategies=(*plan.strategies[:at], pipeline, *plan.strategies[at + 1 :]))
