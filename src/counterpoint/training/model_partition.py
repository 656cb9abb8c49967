"""Partition the user's model as its plan needs, and describe the trained part of it to the compiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import nn

from counterpoint.errors import PlanError
from counterpoint.model.compilation import Compilation, parse_compilation
from counterpoint.model.model_profile import ModelProfile, format_profile
from counterpoint.model.precision import Precision, parse_precision
from counterpoint.model.spec import ADAM_STATES, ModelSpec
from counterpoint.partitioning.dry_run import Inputs
from counterpoint.partitioning.flop_counter import cluster_dtype
from counterpoint.partitioning.module_casts import find_cast_reads, find_casts
from counterpoint.partitioning.partition import PartitionGranularity, partition_model
from counterpoint.partitioning.partitioned_model import PartitionedModel, as_call_args
from counterpoint.partitioning.whole_model import WholeModel
from counterpoint.plan.plan import Plan
from counterpoint.plan.source import plan_error_at
from counterpoint.planner.prepare import with_explicit_partition
from counterpoint.runtime.loss.loss_parameters import add_loss_params
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.strategies.output_gather import GATHER_OUTPUTS_PASS
from counterpoint.terminal_text import warn
from counterpoint.training.options import TrainingOptions
from counterpoint.viz.number_format import format_bytes

FLOAT32_BYTES = 4


def drop_frozen_params(spec: ModelSpec, optimizer_spec: OptimizerSpec) -> ModelSpec:
    """Return the spec without frozen parameters."""
    return replace(spec, params=tuple(param for param in spec.params if param.name in optimizer_spec.group_index))


def assign_unused_params(spec: ModelSpec) -> ModelSpec:
    """Return the spec with the parameters that no layer reads assigned to one, so that they are updated or reported."""
    used = {name for layer in spec.layers for name in layer.params}
    unused = tuple(param.name for param in spec.params if param.name not in used)
    if not unused:
        return spec
    index, layer = next(((i, layer) for i, layer in enumerate(spec.layers) if layer.tp is None), (0, spec.layers[0]))
    extended = replace(layer, params=(*layer.params, *unused))
    blocks = tuple(
        replace(
            block,
            layers=tuple(
                extended if position == index else layer
                for position, layer in enumerate(block.layers, block.first_layer)
            ),
        )
        for block in spec.blocks
    )
    return replace(spec, blocks=blocks)


def describe_trained(
    partition: PartitionedModel, model: nn.Module, optimizer_spec: OptimizerSpec, precision: Precision | None
) -> ModelSpec:
    """Describe the trained part of a partitioned model, with the bytes of its parameters in a precision.

    Args:
        partition: of the model.
        model: with the casts of the precision.
        optimizer_spec: the user's optimizer.
        precision: None for the dtypes of the model.
    """
    spec = assign_unused_params(drop_frozen_params(partition.spec, optimizer_spec))
    spec = replace(spec, compute_dtype=find_compute_dtype(model, precision))
    if precision is None:
        return spec
    gathered = partition.read_dtypes(training=True)
    casts = find_casts(model)
    rounds = precision.rounding == "stochastic"  # and keeps states in float32
    params = [
        replace(
            param,
            cast_bytes=casts[param.name].itemsize if param.name in casts else 0,
            gathers_cast=param.name in gathered,
            state_bytes=ADAM_STATES * FLOAT32_BYTES if rounds and param.item_bytes < FLOAT32_BYTES else None,
            reduce_bytes=precision.reduce_bytes,
        )
        for param in spec.params
    ]
    held = find_held_casts(partition, model) if precision.holds_casts else {}
    params = [param.held_as_casts(held[param.name].itemsize) if param.name in held else param for param in params]
    return replace(spec, params=tuple(params))


def find_compute_dtype(model: nn.Module, precision: Precision | None) -> str:
    """Return the name of the dtype of most matrix products: of the precision, or of most elements of parameters."""
    if precision is not None and precision.compute != "fp32":
        return precision.compute
    counts = Counter[torch.dtype]()
    for parameter in model.parameters():
        counts[parameter.dtype] += parameter.numel() * parameter.is_floating_point()
    name = cluster_dtype(max(counts, key=counts.__getitem__, default=torch.float32))
    return "tf32" if name == "fp32" and torch.get_float32_matmul_precision() != "highest" else name


def find_held_casts(partition: PartitionedModel, model: nn.Module) -> Mapping[str, torch.dtype]:
    """Return the parameters that ranks can hold in the dtype of their casts, because training reads nothing else.

    Args:
        partition: of the model.
        model: with the casts of the precision.
    """
    read = partition.read_dtypes(training=True)
    casts = find_cast_reads(model, {id(param): name for name, param in model.named_parameters()})
    return casts if isinstance(partition, WholeModel) else {name: casts[name] for name in casts.keys() & read.keys()}


def partition_for_plan(
    plan: Plan,
    model: nn.Module,
    inputs: Any,  # noqa: ANN401 - whatever it takes
    options: TrainingOptions,
    on_whole: Callable[[PlanError], None] | None = None,
) -> PartitionedModel:
    """Partition the model as the plan needs; ``prefer_blocks`` falls back to the whole model.

    Args:
        plan: to train with.
        model: the user's.
        inputs: of a microbatch.
        options: of the training.
        on_whole: called with the reason if the plan prefers blocks, but the model cannot be divided into some.

    Raises:
        PlanError: the model cannot be partitioned so.
    """
    call_args, granularity = as_call_args(inputs), plan.granularity
    compilation = parse_compilation(options.compile)
    needs_blocks = plan.recomputation is not None and replace(plan, passes=()).granularity in {"whole", "prefer_blocks"}
    what = "recompute" if needs_blocks else ""
    if compilation is not None and compilation.parts == "blocks" and granularity in {"whole", "prefer_blocks"}:
        granularity, what = "blocks", f"compile={compilation}"
    precision = parse_precision(options.precision)
    if granularity == "whole" and precision is not None and precision.holds_casts:
        granularity = "prefer_blocks"  # so that gradients are reduced, and freed, block by block
    partition = partial(partition_model, model, call_args, dims=options.dims, compilation=compilation)
    if granularity == "prefer_blocks":
        try:
            return partition(granularity="blocks", split_points=plan.split_modules)
        except PlanError as error:
            if plan.split_modules:
                raise
            whole = partition(granularity="whole")
            if on_whole is not None:
                on_whole(error)
            return whole
    try:
        return partition(granularity=granularity, split_points=plan.split_modules)
    except PlanError as error:
        if not what:
            raise
        remedy = "omit the pass recompute" if what == "recompute" else "give compile=segments"
        raise PlanError(f"{what} needs a model in blocks: {error}; or {remedy}") from error


def warn_single_unit(model: nn.Module, plan: str, reason: PlanError) -> None:
    """Warn that ranks that hold shards of weights gather all of them at once.

    Args:
        model: the user's.
        plan: as text.
        reason: why the model cannot be divided into blocks.
    """
    num_bytes = sum(param.numel() * param.element_size() for param in model.parameters())
    warn(
        f"{plan} gathers weights block by block, but {type(model).__name__} cannot be divided into blocks: "
        f"{str(reason).partition('; ')[0]}; so every rank holds all of its weights, {format_bytes(num_bytes)}, in each "
        "forward and each backward, and waits for them before it; make the model an nn.Sequential of its blocks, or "
        "give level=2, which holds as much and sends less",
        stacklevel=2,
    )


def finest_partition(
    model: nn.Module,
    inputs: Inputs,
    granularities: Sequence[PartitionGranularity],
    dims: Mapping[str, tuple[str, str]] | None = None,
    compilation: Compilation | None = None,
) -> PartitionedModel:
    """Partition the model at the first of these granularities that is possible, else not at all.

    Raises:
        PlanError: the model cannot even be called with these inputs.
    """
    for granularity in granularities:
        try:
            return partition_model(model, inputs, granularity=granularity, dims=dims, compilation=compilation)
        except PlanError:
            continue
    return partition_model(model, inputs, granularity="whole", dims=dims, compilation=compilation)


def use_plan_profile(plan: Plan, options: TrainingOptions) -> TrainingOptions:
    """Return the options with the plan's model profile, if they have none of their own."""
    return options if options.profile is not None or plan.profile is None else replace(options, profile=plan.profile)


def with_partition(plan: Plan, spec: ModelSpec, profile: ModelProfile | None) -> Plan:
    """Return the plan to compile for a model: with a profile, its stages are balanced by it."""
    return plan if profile is None else replace(with_explicit_partition(plan, spec), profile=profile)


def with_loss_pass(plan: Plan, options: TrainingOptions) -> Plan:
    """Return the plan to compile for a loss: one of the whole batch needs the outputs of all microbatches.

    Raises:
        PlanError: samples do not lie along dim 0.
    """
    if options.loss_reduction != "batch" or GATHER_OUTPUTS_PASS in plan.passes:
        return plan
    if options.batch_dims or options.shared:
        raise PlanError(
            f"batch_dims={options.batch_dims} and shared={tuple(options.shared)} were given with "
            "loss_reduction='batch', which gathers outputs and targets along dim 0; bring the samples to dim 0 and "
            "omit them, or give one microbatch on one rank and omit loss_reduction"
        )
    return replace(plan, passes=(*plan.passes, GATHER_OUTPUTS_PASS))


def build_model_spec(
    spec: ModelSpec, plan: Plan, profile: ModelProfile | None, samples: int, trained: nn.Module | None = None
) -> ModelSpec:
    """Return the spec to compile a plan for: with the parameters of the loss, and measured seconds if there are any.

    Args:
        spec: of the trained part of the model.
        plan: names its file in the error, if the profile came with it and is of another model.
        profile: of the model; None if counted FLOPs are the costs.
        samples: the size of a microbatch.
        trained: the model with the parameters of its loss, if these are trained, too.

    Raises:
        PlanError: the profile is of another model.
    """
    if profile is not None:
        with plan_error_at(plan.source if profile is plan.profile else None, "profile"):
            spec = profile.with_measured_costs(spec, samples)
    return spec if trained is None else add_loss_params(spec, trained)


def plan_fingerprint(plan: Plan, profile: ModelProfile | None) -> str:
    """Return a text of all that determines the plan's program: the same text for the same program."""
    text = f"{plan} with {plan.num_microbatches} microbatch{'es' if plan.num_microbatches > 1 else ''}"
    if profile is None:
        return text
    return f"{text}, partitioned by the profile {sha256(format_profile(profile).encode()).hexdigest()[:12]}"
