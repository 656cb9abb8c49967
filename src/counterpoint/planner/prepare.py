"""Prepare a plan and a model for a cluster: partition pipelines, apply a measured profile, compile."""

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
    """Return the plan with the partition that its pipeline would choose; an explicit partition is kept.

    A partition between blocks is written as ``balance=``, one inside a block as ``split_points=``, by the modules that
    start there. So the plan that was ranked runs the same wherever it is read.

    Args:
        plan: whose pipeline partitions by the cost of blocks.
        model: the model as the plan gets it.

    Raises:
        PlanError: there are more chunks than blocks, or the model cannot be split by tensor parallelism like this.

    Example:
        >>> from counterpoint.model.spec import linear_chain
        >>> print(with_explicit_partition(Plan.parse("pipeline(2) * data(2)"), linear_chain(8)))
        pipeline(2, balance=(4,4)) * data(2)
    """
    strategies: list[Strategy] = []
    for strategy in plan.strategies:
        partitioned = _fix_partition(strategy, model) if isinstance(strategy, Pipeline) else strategy
        strategies.append(partitioned)
        model = partitioned.split_model(model)
    return replace(plan, strategies=tuple(strategies))


def _fix_partition(pipeline: Pipeline, model: ModelSpec) -> Pipeline:
    if pipeline.balance or pipeline.split_points or pipeline.degree == 1:
        return pipeline
    refined = pipeline.split_model(model)
    counts = pipeline.blocks_per_chunk(refined)
    if refined.blocks == model.blocks:
        return replace(pipeline, balance=counts)
    starts = [refined.blocks[index] for index in list(accumulate(counts))[:-1]]
    explicit = replace(pipeline, split_points=tuple(map(_first_module, starts)))
    try:
        is_same = explicit.split_model(model).blocks == refined.blocks and explicit.blocks_per_chunk(refined) == counts
    except PlanError:  # a module that starts in two places, or a stage without parameters
        is_same = False
    return explicit if is_same else pipeline


def _first_module(block: Block) -> str:
    """Return the outermost module that a block starts with."""
    first = block.layers[0]
    return next((name for name in first.modules_started if name), first.name)


def balance_by_speed(plan: Plan, model: ModelSpec, cluster: Cluster) -> Plan:
    """Return the plan with its pipeline partitioned by the speeds of ranks; an explicit partition is kept.

    Each stage gets as many blocks as it can run while the others run theirs. The slowest rank of a tensor-parallel
    group determines its speed, and the slowest of several replicas of a whole pipeline, which have the same partition;
    replicas of one stage share its microbatches, so that their speeds add up.

    Args:
        plan: whose ranks are those of the cluster, in order.
        model: what is partitioned.
        cluster: speeds of the ranks.

    Raises:
        PlanError: there are more stages than blocks.

    Example:
        >>> from counterpoint.model.spec import linear_chain
        >>> from counterpoint.world.cluster import Cluster
        >>> print(balance_by_speed(Plan.parse("pipeline(2)"), linear_chain(8), Cluster(speeds=(3.0, 1.0))))
        pipeline(2, balance=(6,2))
    """
    if len(set(cluster.speeds)) < 2:
        return plan
    strategies: list[Strategy] = []
    inner = 1
    for strategy in plan.strategies:
        balanced = strategy
        if isinstance(strategy, Pipeline) and not (strategy.balance or strategy.split_points) and strategy.degree > 1:
            balanced = _balance_pipeline(strategy, model, cluster, ranks=(inner, plan.num_ranks))
        strategies.append(balanced)
        model = balanced.split_model(model)
        inner = strategy.num_ranks(inner)
    return replace(plan, strategies=tuple(strategies))


def _balance_pipeline(pipeline: Pipeline, model: ModelSpec, cluster: Cluster, *, ranks: tuple[int, int]) -> Pipeline:
    """Return the pipeline with its balance; ``ranks`` are those of one stage replica, and all there are."""
    inner, total = ranks
    width = pipeline.num_ranks(inner)
    speeds = []
    for stage, count in enumerate(pipeline.stage_ranks):
        slots = range(sum(pipeline.stage_ranks[:stage]), sum(pipeline.stage_ranks[:stage]) + count)
        speeds.append(
            min(
                sum(min(cluster.speed(first + slot * inner + index) for index in range(inner)) for slot in slots)
                for first in range(0, total, width)
            )
        )
    chunks = pipeline.chunks(model)
    by_position = [speeds[chunks.stage_of(position)] for position in range(len(chunks.block_ranges))]
    return replace(pipeline, balance=balance_stages([block.cost for block in model.blocks], by_position))


def compile_for(
    plan: Plan, model: ModelSpec, cluster: Cluster, batch_size: int, profile: ModelProfile | None = None
) -> tuple[CompiledPlan, int]:
    """Return a plan's program, not verified, and the samples of its microbatches.

    With a profile, pipelines are partitioned by its seconds.

    Raises:
        PlanError: it cannot be compiled for this model or this batch, or the profile is of another model.
    """
    plan, prepared, samples = partition_for_run(plan, model, cluster, batch_size, profile)
    return compile(plan, prepared, samples_per_micro=samples, verified=False), samples


def resolve_partition(
    plan: Plan, model: ModelSpec, cluster: Cluster, *, batch_size: int, profile: ModelProfile | None = None
) -> Plan:
    """Return the plan with its partition written into it if that depends on speeds or on a profile.

    Raises:
        PlanError: it cannot be partitioned for this model or this batch, or the profile is of another model.
    """
    return partition_for_run(plan, model, cluster, batch_size, fit_profile(plan, model, profile))[0]


def partition_for_run(
    plan: Plan, model: ModelSpec, cluster: Cluster, batch_size: int, profile: ModelProfile | None
) -> tuple[Plan, ModelSpec, int]:
    """Return a plan with its partition, the model as it gets it, and the samples of its microbatches."""
    plan.require_batch(batch_size)
    samples = batch_size // plan.global_num_microbatches
    prepared = model_for(plan, model, samples, profile)
    plan = balance_by_speed(plan, prepared, cluster)
    return (plan if profile is None else with_explicit_partition(plan, prepared)), prepared, samples


def fit_profile(plan: Plan, model: ModelSpec, profile: ModelProfile | None) -> ModelProfile | None:
    """Return the profile for the model as a plan gets it, and compiles it: the given one, or else the plan's own.

    Raises:
        PlanError: the profile is of another model.
    """
    if profile is None and plan.profile is not None:
        with plan_error_at(plan.source, "profile"):
            return plan.profile.match_to(_finest_model(plan, model)).for_compilation(plan.compile)
    if profile is None:
        return None
    return profile.match_to(_finest_model(plan, model)).for_compilation(plan.compile)


def model_for(plan: Plan, model: ModelSpec, samples: int, profile: ModelProfile | None = None) -> ModelSpec:
    """Return a model as a plan gets it: in one block if it is not partitioned, with the seconds of a profile if given.

    Raises:
        PlanError: the profile is of another model.
    """
    finest = _finest_model(plan, model)
    measured = finest if profile is None else profile.with_measured_costs(finest, samples)
    return measured if plan.granularity != "whole" or model.has_masters else as_single_block(measured)


def _finest_model(plan: Plan, model: ModelSpec) -> ModelSpec:
    return model if plan.granularity == "tensor_parallel" else model.without_tp


def as_single_block(model: ModelSpec) -> ModelSpec:
    """Return the model as one block, as the runtime runs it without partitioning."""
    return replace(model, blocks=(Block(model.layers, 0),))


def storage_sizes(model: ModelSpec, samples: int, profile: ModelProfile | None = None) -> SizeFn:
    """Return the bytes of tensors where they are stored; for its backward, a block saves what was measured.

    Without a profile, or where the model reads casts and the profile was taken without them, it saves the output of
    each of its layers.
    """
    is_cast = model.has_masters or any(param.cast_bytes for param in model.params)
    has_saved_bytes = profile is not None and (not is_cast or bool(profile.profiled_on.precision))
    layer_times = profile.at_microbatch_size(samples) if profile is not None and has_saved_bytes else None

    @cache
    def size_of(tensor: TensorRef, codec: str) -> int:
        if tensor.name == "g":
            block = model.blocks[tensor.blocks[0]]
            if layer_times is not None:
                return int(layer_times.block_time(block).saved_bytes)
            return samples * sum(layer.output_bytes for layer in block.layers)
        return value_bytes(tensor, model, samples, codec)

    return lambda tensor, codec="": size_of(
        TensorRef(tensor.name, tensor.blocks), codec
    )  # sizes do not depend on the microbatch
