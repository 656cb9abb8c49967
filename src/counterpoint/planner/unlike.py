"""Stages on ranks of different speed: each gets as many blocks as it can run while the others run theirs."""

from __future__ import annotations

from dataclasses import replace

from counterpoint.model.spec import ModelSpec
from counterpoint.plan import Plan
from counterpoint.strategies.balance import even_cuts
from counterpoint.strategies.pipeline import Pipeline
from counterpoint.strategies.strategy import Strategy
from counterpoint.world.cluster import Cluster


def balanced(plan: Plan, model: ModelSpec, cluster: Cluster) -> Plan:
    """Return the plan with its pipeline cut by the speeds of the ranks; one that is cut already stays as it is.

    Slices of a stage wait for the slowest of them, and so do replicas of a whole pipeline, which are all cut alike;
    the replicas of a stage take turns, so that a stage is as fast as all of them together.

    Args:
        plan: whose ranks are those of the cluster, in order.
        model: what is cut.
        cluster: how fast they are.

    Raises:
        PlanError: there are more stages than blocks.

    Example:
        >>> from counterpoint.model.spec import chain
        >>> from counterpoint.plan import Plan
        >>> from counterpoint.planner.unlike import balanced
        >>> from counterpoint.world.cluster import Cluster
        >>> print(balanced(Plan.parse("pipeline(2)"), chain(8), Cluster(speeds=(3.0, 1.0))))
        pipeline(2, balance=(6,2))
    """
    if len(set(cluster.speeds)) < 2:
        return plan
    strategies: list[Strategy] = []
    inner = 1
    for strategy in plan.strategies:
        given = strategy
        if isinstance(strategy, Pipeline) and not (strategy.balance or strategy.cuts) and strategy.degree > 1:
            given = _cut(strategy, model, cluster, ranks=(inner, plan.num_ranks))
        strategies.append(given)
        model = given.refine(model)
        inner = strategy.num_ranks(inner)
    return replace(plan, strategies=tuple(strategies))


def _cut(pipeline: Pipeline, model: ModelSpec, cluster: Cluster, *, ranks: tuple[int, int]) -> Pipeline:
    """Return the pipeline with its balance; ``ranks`` are those of one replica of a stage, and all there are."""
    inner, total = ranks
    width = pipeline.num_ranks(inner)
    speeds = []
    for stage, count in enumerate(pipeline.stage_ranks):
        seats = range(sum(pipeline.stage_ranks[:stage]), sum(pipeline.stage_ranks[:stage]) + count)
        speeds.append(
            min(
                sum(min(cluster.speed(first + seat * inner + index) for index in range(inner)) for seat in seats)
                for first in range(0, total, width)
            )
        )
    chunks = pipeline.chunks(model)
    by_position = [speeds[chunks.stage_of(position)] for position in range(len(chunks.runs))]
    return replace(pipeline, balance=even_cuts([block.cost for block in model.blocks], by_position))
