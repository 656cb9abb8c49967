"""Partition a model as finely as its plan needs: not at all, into blocks, or into tensor-parallel layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from torch import nn

from counterpoint.errors import PlanError
from counterpoint.model.compilation import Compilation
from counterpoint.partitioning.dry_run import Inputs, check_call, reject_torchscript, require_initialized
from counterpoint.partitioning.partitioned_model import PartitionedModel
from counterpoint.partitioning.seed_hooks import is_plain_sequential
from counterpoint.partitioning.segment_compiler import SegmentCompiler
from counterpoint.partitioning.sequential import SequentialPartition, splittable_modules
from counterpoint.partitioning.tracing.linear_pairs import DimNames
from counterpoint.partitioning.tracing.split_points import require_modules
from counterpoint.partitioning.tracing.traced import TracedPartition
from counterpoint.partitioning.whole_model import WholeModel

PartitionGranularity: TypeAlias = Literal["whole", "blocks", "tensor_parallel"]
"""How finely a plan splits a model: not at all, into blocks (pipelines), or into shardable layer pairs (tensor)."""


def partition_model(
    model: nn.Module,
    inputs: Inputs,
    *,
    granularity: PartitionGranularity,
    dims: DimNames | None = None,
    split_points: Sequence[str] = (),
    compilation: Compilation | None = None,
) -> PartitionedModel:
    """Partition a model no finer than asked for.

    Args:
        model: the module to train; it is not changed.
        inputs: an example of what its forward is called with: a tensor, a tuple, or a dict by name.
        granularity: what the strategies of the plan need.
        dims: names for the (out, in) dims of linear layers, by pattern of module path.
        split_points: paths of modules that start a block, in addition to the automatic ones; not for ``"whole"``.
        compilation: of the functions that ranks run; None to run them eagerly.

    Raises:
        PlanError: the model has no parameters, does not take these inputs, or cannot be split (there).
    """
    if not any(True for _ in model.parameters()):
        raise PlanError(
            f"{type(model).__name__} has no parameters, so there is nothing to train; "
            "register its tensors as nn.Parameter, or its layers as attributes, nn.ModuleList or nn.ModuleDict"
        )
    check_call(model, inputs)
    require_modules(model, split_points)
    compiler = None if compilation is None else SegmentCompiler(compilation, type(model).__name__)
    with reject_torchscript(model):
        match granularity:
            case "whole":
                return WholeModel(model, inputs, compiler=compiler)
            case "blocks":
                if is_plain_sequential(model) and set(split_points) <= splittable_modules(model):
                    return SequentialPartition(model, inputs, split_points=split_points, compiler=compiler)
                require_initialized(model)
                return TracedPartition(model, inputs, dims=dims, split_points=split_points, compiler=compiler)
            case "tensor_parallel":
                require_initialized(model)
                return TracedPartition(
                    model, inputs, dims=dims, split_points=split_points, prefer="pairs", compiler=compiler
                )
