"""Block-wise quantization to 8 bits: a code for each element, and a scale for each block of 256 elements.

The scale of a block is the largest magnitude in it, so that an outlier costs precision in its own block only. A code is
the index of one of 256 values between -1 and 1, or 0 and 1, which are dense near 0 (dynamic tree quantization)::

    values   0.0031  -0.0078  0.0200 ... | 1.3  0.7 ...      scales   0.02 | 1.3
    / scale  0.155   -0.39    1.0    ... | 1.0  0.538 ...    codes    the nearest of 256 values

Source:
    Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022; Dettmers, 8-Bit Approximations for
    Parallelism in Deep Learning, ICLR 2016, for the values.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK_SIZE = 256
"""Elements with one scale: those of bitsandbytes and torchao."""

NUM_DECADES = 7
"""Powers of ten below 1 that values of codes are in."""


class CodeTable(NamedTuple):
    """The 256 values of codes and how they are found.

    Args:
        values: in ascending order; a code is an index of them.
        bounds: float32, between adjacent values; a number gets the number of bounds below it as code. The last is inf.
        first_codes: ``(65536,)``, by the upper 16 bits of a float32 number: the code of the smallest number with them.
            Numbers with the same upper bits have at most one bound between them, so that theirs is this code or the
            next one.
    """

    values: Tensor
    bounds: Tensor
    first_codes: Tensor


def list_code_values(*, signed: bool) -> list[float]:
    """Return the 256 numbers that codes stand for, in ascending order.

    Each decade has half as many as the one above it: from 0.1 to 1 there are 64 of each sign, or 128 without signs.

    Args:
        signed: whether they are from -1 to 1, or from 0.

    Example:
        >>> values = list_code_values(signed=True)
        >>> len(values), sum(value > 0.1 for value in values), values[0], values[-1]
        (256, 65, -0.99296875, 1.0)
    """
    values = [0.0, 1.0]
    for decade in range(NUM_DECADES):
        count = (1 if signed else 2) << (NUM_DECADES - 1 - decade)
        magnitudes = [10.0**-decade * (0.1 + 0.9 * (index + 0.5) / count) for index in range(count)]
        values += magnitudes + [-magnitude for magnitude in magnitudes if signed]
    return sorted(values)


@cache
def code_table(signed: bool, dtype: torch.dtype, device: torch.device) -> CodeTable:  # noqa: FBT001 - a cache's key
    """Return the values of codes, in a dtype, and what finds the nearest one.

    The bounds are halfway between values, but for the first one without signs: there, only 0 itself becomes 0. A mean
    of squares that is small, but not 0, would otherwise be, and Adam divides by its root.
    """
    values = torch.tensor(list_code_values(signed=signed), dtype=torch.float64)
    bounds = ((values[:-1] + values[1:]) / 2).float()
    if not signed:
        bounds[0] = 0
    upper_bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).roll(1 << 15) << 16
    ends = torch.stack([upper_bits, upper_bits | 0xFFFF]).view(torch.float32)
    first_codes = torch.bucketize(ends.amin(0), bounds).to(torch.uint8)
    bounds = F.pad(bounds, (0, 1), value=torch.inf)
    return CodeTable(values.to(device, dtype), bounds.to(device), first_codes.to(device))


def find_codes(ratios: Tensor, table: CodeTable) -> Tensor:
    """Return the codes of numbers: as ``torch.bucketize`` does, in a fraction of the time.

    Args:
        ratios: float32.
        table: of the codes.
    """
    upper_bits = (ratios.view(torch.int32) >> 16) & 0xFFFF
    first = table.first_codes.take(upper_bits.long())
    return first + (ratios > table.bounds.take(first.long())).to(torch.uint8)


def count_blocks(num_elements: int) -> int:
    """Return the number of scales of so many elements."""
    return -(-num_elements // BLOCK_SIZE)


def quantize(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the code of each value, and the scale of each block.

    A block with a value that is not finite has a scale that is not.

    Args:
        values: flat, float32 or float64; blocks are counted from its beginning.
        signed: whether values may be negative.

    Returns:
        Codes, uint8, of the shape of the values; scales, ``(blocks,)``, of their dtype.

    Example:
        >>> codes, scales = quantize(torch.tensor([3.0, -0.02, 0.0]), signed=True)
        >>> codes.tolist(), scales.tolist()
        ([255, 101, 127], [3.0])
        >>> [round(value, 4) for value in dequantize(codes, scales, signed=True).tolist()]
        [3.0, -0.0207, 0.0]
    """
    num_blocks = count_blocks(values.numel())
    blocks = F.pad(values, (0, num_blocks * BLOCK_SIZE - values.numel())).view(num_blocks, BLOCK_SIZE)
    scales = blocks.abs().amax(1)
    divisors = torch.where(scales == 0, 1, scales)
    ratios = (blocks / divisors[:, None]).float()
    codes = find_codes(ratios, code_table(signed, values.dtype, values.device))
    return codes.view(-1)[: values.numel()], scales


def dequantize(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return the values of codes, in the dtype of their scales: the inverse of :func:`quantize`, up to its error.

    Args:
        codes: flat, uint8.
        scales: of each block.
        signed: as for :func:`quantize`.
    """
    values = code_table(signed, scales.dtype, scales.device).values.take(codes.long())
    return values.mul_(scales.repeat_interleave(BLOCK_SIZE)[: codes.numel()])
