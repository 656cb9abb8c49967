"""Reduction of several tensors in a fixed order, the reference for every transport."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LOW_PRECISION = {torch.bfloat16, torch.float16}
"""Floats of 16 bits, which are added up in 32 bits; a sum is rounded once, at its end."""
PIECE_ELEMENTS = 1 << 16
"""That are reduced at a time, while they are in the cache."""


def reduce_in_order_into(target: Tensor, tensors: Sequence[Tensor], op: str) -> None:
    """Write what :func:`reduce_in_order` returns to a flat tensor, which may be one of them; need little memory."""
    for start in range(0, len(target), PIECE_ELEMENTS):
        stop = start + PIECE_ELEMENTS
        target[start:stop] = reduce_in_order([tensor[start:stop] for tensor in tensors], op)


def reduce_in_order(tensors: Sequence[Tensor], op: str) -> Tensor:
    """Return ``((t0 + t1) + t2) + …``, or the mean, max or min, in new memory; round to the dtype once, at the end."""
    combine = {"max": torch.maximum, "min": torch.minimum}.get(op, torch.add)
    is_narrow = tensors[0].dtype in LOW_PRECISION
    total = combine(tensors[0].float(), tensors[1].float()) if is_narrow else combine(tensors[0], tensors[1])
    for tensor in tensors[2:]:
        combine(total, tensor, out=total)
    if op == "mean":
        total *= 1 / len(tensors)
    return total.to(tensors[0].dtype)
