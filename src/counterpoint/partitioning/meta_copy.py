"""Copy a model to torch's meta device, where tensors have shapes, but no memory."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn

ModelT = TypeVar("ModelT", bound=nn.Module)


def copy_to_meta(model: ModelT) -> ModelT:
    """Return a copy of a model with parameters and buffers on the meta device; tied ones stay tied.

    Raises:
        TypeError: a part of it cannot be copied.

    Example:
        >>> copy_to_meta(nn.Linear(2, 1)).weight.device
        device(type='meta')
    """
    memo: dict[int, Any] = {
        id(param): nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        for param in model.parameters()
    }
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    return copy.deepcopy(model, memo)
