"""What of a model is trained: descriptions without frozen parameters, and with those that nothing reads.

The user's model, cut as finely as a plan needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from torch import nn

from counterpoint.errors import PlanError
from counterpoint.model.model_profile import ModelProfile, format_profile
from counterpoint.model.spec import ModelSpec
from counterpoint.partitioning.dry_run import Inputs
from counterpoint.partitioning.partition import PartitionGranularity, partition_model
from counterpoint.partitioning.partitioned_model import PartitionedModel
from counterpoint.plan.plan import Plan
from counterpoint.plan.source import plan_error_at
from counterpoint.planner.prepare import with_explicit_partition
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.runtime.rank_builder import as_call_args
from counterpoint.training.options import TrainingOptions


def drop_frozen_params(spec: ModelSpec, optimizer_spec: OptimizerSpec) -> ModelSpec:
    """Return the model without its frozen parameters, which no gradient and no update is about."""
    return replace(spec, params=tuple(param for param in spec.params if param.name in optimizer_spec.group_index))


def assign_unused_params(spec: ModelSpec) -> ModelSpec:
    """Return the model with the parameters that no piece reads given to one, so that they are trained or missed."""
    read = {name for piece in spec.layers for name in piece.params}
    unused = tuple(param.name for param in spec.params if param.name not in read)
    if not unused:
        return spec
    index, piece = next(((i, piece) for i, piece in enumerate(spec.layers) if piece.tp is None), (0, spec.layers[0]))
    adopted = replace(piece, params=(*piece.params, *unused))
    blocks = tuple(
        replace(
            block,
            pieces=tuple(adopted if at == index else piece for at, piece in enumerate(block.layers, block.first_layer)),
        )
        for block in spec.blocks
    )
    return replace(spec, blocks=blocks)


def partition_for_plan(plan: Plan, model: nn.Module, inputs: Any, options: TrainingOptions) -> PartitionedModel:  # noqa: ANN401 - whatever it takes
    """Return the model cut as finely as the plan needs; a wish for a finer cut may stay one.

    Raises:
        PlanError: it cannot be cut so.
    """
    form, need = as_call_args(inputs), plan.granularity
    if need != "prefer_blocks":
        try:
            return partition_model(model, form, granularity=need, dims=options.dims, split_points=plan.split_modules)
        except PlanError as error:
            if plan.recomputation is None or replace(plan, passes=()).granularity not in {"none", "prefer_blocks"}:
                raise
            raise PlanError(f"recompute needs a model in blocks: {error}; or leave out the pass recompute") from error
    try:
        return partition_model(model, form, granularity="blocks", dims=options.dims)
    except PlanError:
        return partition_model(model, form, granularity="whole", dims=options.dims)


def finest_partition(
    model: nn.Module,
    inputs: Inputs,
    granularities: Sequence[PartitionGranularity],
    dims: Mapping[str, tuple[str, str]] | None = None,
) -> PartitionedModel:
    """Return the model cut in the first of these ways in which it can be, or as it is.

    Raises:
        PlanError: it cannot even be called with these inputs.
    """
    for need in granularities:
        try:
            return partition_model(model, inputs, granularity=need, dims=dims)
        except PlanError:
            continue
    return partition_model(model, inputs, granularity="whole", dims=dims)


def use_plan_profile(plan: Plan, options: TrainingOptions) -> TrainingOptions:
    """Return the options with the timing that a plan came with, where they have none of their own."""
    return options if options.profile is not None or plan.profile is None else replace(options, timing=plan.profile)


def with_partition(plan: Plan, spec: ModelSpec, profile: ModelProfile | None) -> Plan:
    """Return the plan that is compiled for a model: with the cut in it that a timing gives it, and the timing."""
    return plan if profile is None else replace(with_explicit_partition(plan, spec), profile=profile)


def build_model_spec(
    partition: PartitionedModel, optimizer_spec: OptimizerSpec, plan: Plan, profile: ModelProfile | None, samples: int
) -> ModelSpec:
    """Return what of a cut model is trained; with a timing, its pieces cost what they take in seconds.

    Args:
        cut: the model.
        face: the user's optimizer.
        plan: whose file is named where a timing is of another model that it came with.
        timing: of the model; None where counted operations say what pieces cost.
        samples: in a microbatch.

    Raises:
        PlanError: the timing is of another model.
    """
    spec = assign_unused_params(drop_frozen_params(partition.spec, optimizer_spec))
    if profile is None:
        return spec
    with plan_error_at(plan.source if profile is plan.profile else None, "profile"):
        return profile.with_measured_costs(spec, samples)


def plan_fingerprint(plan: Plan, profile: ModelProfile | None) -> str:
    """Return a plan with all that makes its program what it is, the same words for the same program."""
    words = f"{plan} with {plan.num_microbatches} microbatch{'es' if plan.num_microbatches > 1 else ''}"
    if profile is None:
        return words
    return f"{words}, cut by the timing {sha256(format_profile(profile).encode()).hexdigest()[:12]}"
