"""Where the stages of a plan begin, written into the plan, so that what was ranked runs wherever the plan is read.

Stages on ranks of different speed: each gets as many blocks as it can run while the others run theirs.

A plan and a model as they run together: cut, with a batch of so many samples, and by a timing if there is one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate

from counterpoint.compiler.compile import CompiledPlan, compile, value_bytes  # noqa: A004 - read as cp.compile
from counterpoint.errors import PlanError
from counterpoint.model.model_profile import ModelProfile
from counterpoint.model.spec import Block, ModelSpec
from counterpoint.plan.plan import Plan
from counterpoint.plan.source import plan_error_at
from counterpoint.program.comm_volume import SizeFn
from counterpoint.program.instruction import TensorRef
from counterpoint.strategies.pipeline.partition import balance_stages
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.strategy import Strategy
from counterpoint.world.cluster import Cluster


def with_explicit_partition(plan: Plan, model: ModelSpec) -> Plan:
    """Return the plan with the cut in it that its pipeline would choose for a model; one that has a cut keeps it.

    A cut between blocks is written as ``balance=``; one inside a block as ``split_points=``, by the modules that begin there.

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
        strategy = _fix_partition(given, model) if isinstance(given, Pipeline) else given
        strategies.append(strategy)
        model = strategy.split_model(model)
    return replace(plan, strategies=tuple(strategies))


def _fix_partition(pipeline: Pipeline, model: ModelSpec) -> Pipeline:
    if pipeline.balance or pipeline.split_points or pipeline.degree == 1:
        return pipeline
    refined = pipeline.split_model(model)
    counts = pipeline.blocks_per_chunk(refined)
    if refined.blocks == model.blocks:
        return replace(pipeline, balance=counts)
    heads = [refined.blocks[at] for at in list(accumulate(counts))[:-1]]
    named = replace(pipeline, split_points=tuple(map(_first_module, heads)))
    try:
        is_same = named.split_model(model).blocks == refined.blocks and named.blocks_per_chunk(refined) == counts
    except PlanError:  # a module that begins in two places, or a stage without parameters
        is_same = False
    return named if is_same else pipeline


def _first_module(block: Block) -> str:
    """Return the outermost module that a block begins with."""
    first = block.layers[0]
    return next((name for name in first.modules_started if name), first.name)


def balance_by_speed(plan: Plan, model: ModelSpec, cluster: Cluster) -> Plan:
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
        >>> from counterpoint.plan.plan import Plan
        >>> from counterpoint.planner.prepare import balanced
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
        if isinstance(strategy, Pipeline) and not (strategy.balance or strategy.split_points) and strategy.degree > 1:
            given = _balance_pipeline(strategy, model, cluster, ranks=(inner, plan.num_ranks))
        strategies.append(given)
        model = given.split_model(model)
        inner = strategy.num_ranks(inner)
    return replace(plan, strategies=tuple(strategies))


def _balance_pipeline(pipeline: Pipeline, model: ModelSpec, cluster: Cluster, *, ranks: tuple[int, int]) -> Pipeline:
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
    by_position = [speeds[chunks.stage_of(position)] for position in range(len(chunks.block_ranges))]
    return replace(pipeline, balance=balance_stages([block.cost for block in model.blocks], by_position))


def compile_for(
    plan: Plan, model: ModelSpec, cluster: Cluster, batch_size: int, profile: ModelProfile | None = None
) -> tuple[CompiledPlan, int]:
    """Return a plan's program, unproved, and the samples of its microbatches; with a timing, cut by its seconds.

    Raises:
        PlanError: it cannot be compiled for this model or this batch, or the timing is of another model.
    """
    plan, given, samples = partition_for_run(plan, model, cluster, batch_size, profile)
    return compile(plan, given, samples_per_micro=samples, verified=False), samples


def resolve_partition(
    plan: Plan, model: ModelSpec, cluster: Cluster, *, batch_size: int, profile: ModelProfile | None = None
) -> Plan:
    """Return the plan with its cut written into it where that depends on more than the model: on speeds, or a timing.

    Raises:
        PlanError: it cannot be cut for this model or this batch, or the timing is of another model.
    """
    return partition_for_run(plan, model, cluster, batch_size, fit_profile(plan, model, profile))[0]


def partition_for_run(
    plan: Plan, model: ModelSpec, cluster: Cluster, batch_size: int, profile: ModelProfile | None
) -> tuple[Plan, ModelSpec, int]:
    """Return a plan with its cut, the model as it gets it, and the samples of its microbatches."""
    plan.require_batch(batch_size)
    samples = batch_size // plan.global_num_microbatches
    given = model_for(plan, model, samples, profile)
    plan = balance_by_speed(plan, given, cluster)
    return (plan if profile is None else with_explicit_partition(plan, given)), given, samples


def fit_profile(plan: Plan, model: ModelSpec, profile: ModelProfile | None) -> ModelProfile | None:
    """Return the times of the pieces of a model as a plan gets it: those given, or else those that the plan came with.

    Raises:
        PlanError: the timing is of another model.
    """
    if profile is None and plan.profile is not None:
        with plan_error_at(plan.source, "profile"):
            return plan.profile.match_to(_finest_model(plan, model))
    return None if profile is None else profile.match_to(_finest_model(plan, model))


def model_for(plan: Plan, model: ModelSpec, samples: int, profile: ModelProfile | None = None) -> ModelSpec:
    """Return a model as a plan gets it: in one block where nothing has to be cut, with seconds where it was timed.

    Raises:
        PlanError: the timing is of another model.
    """
    given = _finest_model(plan, model)
    weighed = given if profile is None else profile.with_measured_costs(given, samples)
    return weighed if plan.granularity != "whole" else as_single_block(weighed)


def _finest_model(plan: Plan, model: ModelSpec) -> ModelSpec:
    return model if plan.granularity == "tensor_parallel" else model.without_tp


def as_single_block(model: ModelSpec) -> ModelSpec:
    """Return the model as one block, as the runtime takes it where nothing has to be cut."""
    return replace(model, blocks=(Block(model.layers, 0),))


def storage_sizes(model: ModelSpec, samples: int, profile: ModelProfile | None = None) -> SizeFn:
    """Return the bytes of values where they are kept: for its backward, a block keeps what was seen to stay.

    Where nothing was, it keeps what each of its pieces gave.
    """
    point = profile.at_microbatch_size(samples) if profile is not None else None

    @cache
    def size_of(value: TensorRef, code: str) -> int:
        if value.name == "g":
            block = model.blocks[value.blocks[0]]
            if point is not None:
                return int(point.block_time(block).saved_bytes)
            return samples * sum(piece.output_bytes for piece in block.layers)
        return value_bytes(value, model, samples, code)

    return lambda value, code="": size_of(TensorRef(value.name, value.blocks), code)  # the microbatch changes no size
