"""What gloo is given instead of numbers that it would get wrong: it rounds 16-bit sums at every step and loses NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoint.fabric.fabric import Verb

NARROW = {torch.bfloat16, torch.float16}
WHOLE = {torch.float32: torch.int32, torch.float64: torch.int64}  # as wide


def given(tensor: Tensor, verb: Verb) -> Tensor:
    """Return what gloo reduces: the tensor, contiguous; or wider numbers; or whole ones in the order of the floats.

    gloo compares floats with ``<``, of which NaN is neither side, so that it depends on the order of the ranks whether
    it wins. Whole numbers that are in the same order, NaN at the winning end, are compared right.

    Args:
        tensor: of any dtype that can be reduced.
        verb: how.
    """
    wide = widened(tensor)
    if verb in {"sum", "mean"} or wide.dtype not in WHOLE:
        return wide
    keys = in_order(wide.view(WHOLE[wide.dtype]))
    limits = torch.iinfo(keys.dtype)
    return keys.masked_fill_(wide.isnan(), limits.max if verb == "max" else limits.min)


def widened(tensor: Tensor) -> Tensor:
    """Return the tensor, contiguous; in 32 bits where it has fewer, so that a sum is rounded once, at its end."""
    return tensor.float().contiguous() if tensor.dtype in NARROW else tensor.contiguous()


def restored(reduced: Tensor, dtype: torch.dtype, verb: Verb, num_ranks: int) -> Tensor:
    """Return the result in the tensor's dtype.

    Args:
        reduced: what gloo has made of everybody's :func:`given`.
        dtype: of the tensor.
        verb: how.
        num_ranks: a mean is scaled by.
    """
    if verb == "mean":
        reduced *= 1 / num_ranks
    elif verb != "sum" and dtype.is_floating_point:
        floats = {whole: wide for wide, whole in WHOLE.items()}
        reduced = in_order(reduced).view(floats[reduced.dtype])
    return reduced.to(dtype)


def in_order(bits: Tensor) -> Tensor:
    """Return the bits of floats as whole numbers in their order, and these as bits again: it is its own inverse."""
    num_bits = 8 * bits.element_size()
    return bits ^ ((bits >> (num_bits - 1)) & torch.iinfo(bits.dtype).max)
