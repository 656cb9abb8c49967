"""What ``initialize`` requires of a model: float32 master weights, memory of its own, dense and real gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from counterpoint.errors import PlanError
from counterpoint.model.precision import Precision


def require_known_params(module: nn.Module, params: Sequence[Tensor]) -> dict[int, str]:
    """Return the name of each parameter of a model by its ``id``.

    Raises:
        PlanError: a parameter is not one of the model's.
    """
    names = {id(param): name for name, param in module.named_parameters()}
    unknown = next((param for param in params if id(param) not in names), None)
    if unknown is not None:
        raise PlanError(
            f"the optimizer has a parameter of shape {tuple(unknown.shape)} that is not one of the model's; make it of "
            "model.parameters()"
        )
    return names


def require_master_weights(precision: Precision | None, params: Sequence[Tensor], names: Mapping[int, str]) -> None:
    """Check that trained weights are float32 if forwards compute in a narrower dtype.

    Raises:
        PlanError: one is in half precision.
    """
    if precision is None or precision.compute == "fp32":
        return
    for param in params:
        if param.requires_grad and param.dtype in {torch.float16, torch.bfloat16}:
            raise PlanError(
                f"{names[id(param)]} is {param.dtype}, and the configuration enables {precision.compute}: the update "
                "would be rounded to it, because master weights are those of the model; call model.float() before "
                "initialize: master weights are float32"
            )


def require_dense_grads(module: nn.Module) -> None:
    """Check that no embedding has sparse gradients.

    Raises:
        PlanError: one has.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            raise PlanError(
                f"{name or type(part).__name__} has sparse=True, and gradients are sent dense by initialize; set "
                "sparse=False, or train with cp.parallelize, which sends rows"
            )


def require_real_grads(params: Sequence[Tensor], names: Mapping[int, str]) -> None:
    """Check that no trained parameter is complex.

    Raises:
        PlanError: one is.
    """
    for param in params:
        if param.requires_grad and param.is_complex():
            raise PlanError(
                f"{names[id(param)]} is {param.dtype}, and initialize sums real gradients only; keep it as real "
                "numbers (torch.view_as_real, and torch.view_as_complex in forward), or train with cp.parallelize "
                "under data"
            )


def require_separate_memory(module: nn.Module, trained: Sequence[Tensor]) -> None:
    """Check that no trained parameter shares its memory with another tensor of the model.

    Raises:
        PlanError: two do.
    """
    trained_ids = {id(param) for param in trained if param.requires_grad}
    ranges = sorted(
        (tensor.data_ptr(), end_address(tensor), name, id(tensor) in trained_ids)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        if tensor.numel()
    )
    last = (0, 0, "", False)
    for entry in ranges:
        if entry[0] < last[1] and (entry[3] or last[3]):
            raise PlanError(
                f"{last[2]} and {entry[2]} are two tensors in the same memory, which shards of weights would part; tie "
                "them by using the same Parameter object, or use stage 0"
            )
        last = max(last, entry, key=lambda one: one[1])


def end_address(tensor: Tensor) -> int:
    """Return the address after the last element of a tensor, which may have gaps."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()
