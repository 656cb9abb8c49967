"""The least cutting that a strategy needs: none, along the chain of blocks, or into slices of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from torch import nn

from counterpoint.errors import PlanError
from counterpoint.partitioning.dry_run import Inputs, check_call, reject_torchscript
from counterpoint.partitioning.linear_pairs import DimNames
from counterpoint.partitioning.partitioned_model import PartitionedModel
from counterpoint.partitioning.seed_hooks import is_plain_sequential
from counterpoint.partitioning.sequential import SequentialPartition, splittable_modules
from counterpoint.partitioning.split_points import require_modules
from counterpoint.partitioning.traced import TracedPartition
from counterpoint.partitioning.whole_model import WholeModel

PartitionGranularity: TypeAlias = Literal["whole", "blocks", "tensor_parallel"]
"""What a strategy asks of a model: nothing, a chain of blocks (pipelines), or layers in slices (tensor)."""


def partition_model(
    model: nn.Module,
    inputs: Inputs,
    *,
    granularity: PartitionGranularity,
    dims: DimNames | None = None,
    split_points: Sequence[str] = (),
) -> PartitionedModel:
    """Return a model as segments, cut no finer than needed.

    Args:
        model: the module to train; it stays as it is.
        inputs: an example of what its forward is called with: a tensor, a tuple, or a dict by name.
        need: what the strategies ask for.
        dims: names for the (out, in) dims of linear layers, by pattern of module path.
        cuts: paths of modules before which the model is cut, besides where it is cut anyhow; not for "none".

    Raises:
        PlanError: the model has no parameters, does not take these inputs, or cannot be cut, or not there.
    """
    if not any(True for _ in model.parameters()):
        raise PlanError(
            f"{type(model).__name__} has no parameters; a model is trained by changing them; "
            "register its tensors as nn.Parameter, or its layers as attributes, nn.ModuleList or nn.ModuleDict"
        )
    check_call(model, inputs)
    require_modules(model, split_points)
    with reject_torchscript(model):
        match granularity:
            case "whole":
                return WholeModel(model, inputs)
            case "blocks":
                if is_plain_sequential(model) and set(split_points) <= splittable_modules(model):
                    return SequentialPartition(model, inputs, split_points=split_points)
                return TracedPartition(model, inputs, dims=dims, split_points=split_points)
            case "tensor_parallel":
                return TracedPartition(model, inputs, dims=dims, split_points=split_points, prefer="pairs")
