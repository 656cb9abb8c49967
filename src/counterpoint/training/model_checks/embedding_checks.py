"""Check embeddings that need the whole batch.

``max_norm`` shortens rows in place, offsets count all indices, and ``scale_grad_by_freq`` divides gradients by how
often the batch has an index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from counterpoint.errors import DataError, PlanError
from counterpoint.plan.plan import Plan
from counterpoint.runtime.kernels.function_mode import InterceptFunctions, TorchFunction


def require_no_max_norm(model: nn.Module, plan: Plan) -> None:
    """Check that no forward changes weights that other ranks, or other microbatches, have as well.

    Args:
        model: the user's model.
        plan: has several ranks, or microbatches, or runs a trace.

    Raises:
        PlanError: an embedding has ``max_norm``.
    """
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise PlanError(
                f"module '{path}' has max_norm={module.max_norm}, with which its forward shortens the rows that it "
                f"looks up in place, but under {plan} each forward sees a part of the batch, and ranks have copies of "
                "the rows, so others would be shortened than in one process; remove max_norm, and shorten all rows "
                "after a step: with step.full_weights(writeback=True) as model, torch.no_grad(): "
                f"weight.copy_(weight.renorm({module.norm_type:g}, 0, {module.max_norm}))"
            )


SCALE_POSITIONS: Mapping[TorchFunction, int] = {
    F.embedding: 5,
    F.embedding_bag: 5,
    torch.embedding: 3,
    torch.embedding_bag: 3,
}
"""Functions that look rows up, and the position of their argument ``scale_grad_by_freq``."""


class FrequencyScalingDetector(InterceptFunctions):
    """Function mode that finds lookups whose gradient is divided by how often the batch has an index."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(SCALE_POSITIONS, self.call))
        self.is_used = False

    def call(self, func: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any result
        """Look rows up."""
        position = SCALE_POSITIONS[func]
        self.is_used |= bool(kwargs.get("scale_grad_by_freq", args[position] if len(args) > position else False))
        return func(*args, **kwargs)


def require_no_frequency_scaling(model: nn.Module, plan: Plan, *, is_used: bool) -> None:
    """Check that no gradient of a table is divided by numbers of indices in a batch, of which forwards see parts.

    Args:
        model: the user's model.
        plan: divides the batch.
        is_used: whether a forward was seen to do so.

    Raises:
        PlanError: one is.
    """
    kinds = (nn.Embedding, nn.EmbeddingBag)
    modules = [
        path for path, module in model.named_modules() if isinstance(module, kinds) and module.scale_grad_by_freq
    ]
    if modules or is_used:
        where = f"module '{modules[0]}' has" if modules else f"the forward of {type(model).__name__} looks rows up with"
        raise PlanError(
            f"{where} scale_grad_by_freq=True, which divides gradients by how often the batch has an index, but under "
            f"{plan} each forward sees a part of the batch, in which it is less often; remove scale_grad_by_freq, or "
            "train with one microbatch and without replicas (solo, pipeline or tensor)"
        )


def require_whole_bags(model: nn.Module, inputs: Any, plan: Plan, run_forward: Callable[[], object]) -> None:  # noqa: ANN401
    """Check that no bags are given by offsets of the batch, which count the indices of all samples.

    Args:
        model: the user's model.
        inputs: of one microbatch.
        plan: divides the batch.
        run_forward: runs the model once on the inputs.

    Raises:
        DataError: some are.
    """
    bags = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.EmbeddingBag)]
    if not bags:
        return
    memory = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
    found: list[str] = []

    def check(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        offsets = kwargs.get("offsets", args[1] if args[1:] else None)
        if isinstance(offsets, Tensor) and offsets.untyped_storage().data_ptr() in memory:
            found.append(path)

    with ExitStack() as stack, suppress(Exception):  # the step fails likewise, with its location
        for path, module in bags:
            hook = module.register_forward_pre_hook(
                lambda _, args, kwargs, path=path: check(path, args, kwargs), with_kwargs=True
            )
            stack.callback(hook.remove)
        run_forward()
    if found:
        raise DataError(
            f"the offsets of module '{found[0]}' come with the batch and count the indices of all its samples, but "
            f"under {plan} a batch is divided along dim 0, so that offsets would lose their indices; give each "
            "sample its own indices, padded to (samples, length) with padding_idx, or as a list with a tensor for each "
            "sample, of which forward makes offsets"
        )
