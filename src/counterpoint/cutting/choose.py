"""The least cutting that a strategy needs: none, along the chain of blocks, or into slices of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from torch import nn

from counterpoint.cutting.chain import ChainCut, chain_places
from counterpoint.cutting.cut import Cut
from counterpoint.cutting.eager import Inputs, check_call, no_scripts
from counterpoint.cutting.graph import GraphCut
from counterpoint.cutting.marked import require_modules
from counterpoint.cutting.regions import Dims
from counterpoint.cutting.seeds import is_plain_sequential
from counterpoint.cutting.whole import WholeCut
from counterpoint.errors import PlanError

Need: TypeAlias = Literal["none", "chain", "regions"]
"""What a strategy asks of a model: nothing, a chain of blocks (pipelines), or layers in slices (tensor)."""


def cut_model(
    model: nn.Module, inputs: Inputs, *, need: Need, dims: Dims | None = None, cuts: Sequence[str] = ()
) -> Cut:
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
    require_modules(model, cuts)
    with no_scripts(model):
        match need:
            case "none":
                return WholeCut(model, inputs)
            case "chain":
                if is_plain_sequential(model) and set(cuts) <= chain_places(model):
                    return ChainCut(model, inputs, cuts=cuts)
                return GraphCut(model, inputs, dims=dims, cuts=cuts)
            case "regions":
                return GraphCut(model, inputs, dims=dims, cuts=cuts, prefer="regions")
