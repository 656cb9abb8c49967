"""Where the stages of a plan begin, written into the plan, so that what was ranked runs wherever the plan is read."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from counterpoint.errors import PlanError
from counterpoint.model.spec import Block, ModelSpec
from counterpoint.plan import Plan
from counterpoint.strategies.pipeline import Pipeline
from counterpoint.strategies.strategy import Strategy


def settled(plan: Plan, model: ModelSpec) -> Plan:
    """Return the plan with the cut in it that its pipeline would choose for a model; one that has a cut keeps it.

    A cut between blocks is written as ``balance=``; one inside a block as ``cuts=``, by the modules that begin there.

    Args:
        plan: whose pipeline chooses by what blocks cost.
        model: the model as the plan gets it.

    Raises:
        PlanError: there are more chunks than blocks, or no such slices.

    Example:
        >>> from counterpoint.model.spec import chain
        >>> print(settled(Plan.parse("pipeline(2) * data(2)"), chain(8)))
        pipeline(2, balance=(4,4)) * data(2)
    """
    strategies: list[Strategy] = []
    for given in plan.strategies:
        strategy = _cut(given, model) if isinstance(given, Pipeline) else given
        strategies.append(strategy)
        model = strategy.refine(model)
    return replace(plan, strategies=tuple(strategies))


def _cut(pipeline: Pipeline, model: ModelSpec) -> Pipeline:
    if pipeline.balance or pipeline.cuts or pipeline.degree == 1:
        return pipeline
    refined = pipeline.refine(model)
    counts = pipeline.counts(refined)
    if refined.blocks == model.blocks:
        return replace(pipeline, balance=counts)
    heads = [refined.blocks[at] for at in list(accumulate(counts))[:-1]]
    named = replace(pipeline, cuts=tuple(map(_name, heads)))
    try:
        is_same = named.refine(model).blocks == refined.blocks and named.counts(refined) == counts
    except PlanError:  # a module that begins in two places, or a stage without parameters
        is_same = False
    return named if is_same else pipeline


def _name(block: Block) -> str:
    """Return the outermost module that a block begins with."""
    first = block.pieces[0]
    return next((name for name in first.starts if name), first.name)
