"""Numbers that others look at without a copy, and whether anybody still does."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


def lent_out(values: Tensor, lent: list[weakref.ref[Any]]) -> Tensor:
    """Return the same numbers; as long as somebody has them, so it is said among those that are lent."""
    if not values.numel():
        return values.new_empty(values.shape)
    raw = values.view(torch.uint8).numpy()  # lives as long as a tensor that is made of it, or a view of one
    lent.append(weakref.ref(raw))
    return torch.from_numpy(raw).view(values.dtype)


def is_any_held(lent: list[weakref.ref[Any]]) -> bool:
    """Tell whether somebody still has what was lent."""
    return any(one() is not None for one in lent)
