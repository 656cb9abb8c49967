"""Count values by power of two on their own device, and tell which of them fp16 would lose.

fp16 has the exponents -14 to 15, and subnormal numbers down to 2^-24. Rounded to nearest, ties to even::

    |x| <= 2^-25         2^-25 < |x| < 2^-14        2^-14 <= |x| < 65520      65520 <= |x|
    zero                 subnormal, less exact      exact to 11 bits          infinite

A loss scale of 2^k moves all gradients to the right by k exponents. Powers of two are counted separately, so that the
number of zeros is exact for any such scale, also at 2^-25 itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

MIN_EXPONENT, MAX_EXPONENT = -1074, 1023
"""Of float64, the widest dtype: its smallest subnormal number, and its largest numbers."""

_ZERO = 2 * (MAX_EXPONENT - MIN_EXPONENT + 1)
"""The first bin after those of the exponents, which have two each: powers of two, and what lies between."""
_INFINITE, _NAN, _OVERFLOW, _NUM_BINS = _ZERO + 1, _ZERO + 2, _ZERO + 3, _ZERO + 4

CHUNK = 2**22
"""Values that are counted at once, so that the memory for their bins, 8 bytes each, is bounded."""

FP16_ZERO_EXPONENT = -25
"""2^-25 and everything smaller becomes zero."""
BF16_ZERO_EXPONENT = -134
"""The same of bf16, whose smallest subnormal number is 2^-133."""
FP16_NORMAL_EXPONENT = -14
"""Of the smallest number that is not subnormal."""
FP16_OVERFLOW = 65520.0
"""The smallest number that becomes infinite: half a step above 65504, the largest number."""

TOP_EXPONENT = 14
"""Where a suggested scale moves the largest value: below 2^15, half of what overflows."""
MAX_SCALE_EXPONENT = 100
"""Of a suggested scale: the loss itself is multiplied by it in float32."""


def new_bins(device: torch.device) -> Tensor:
    """Return bins with no values, to be filled by :func:`count_values`."""
    return torch.zeros(_NUM_BINS, dtype=torch.int64, device=device)


@torch.no_grad()
def count_values(bins: Tensor, values: Tensor) -> None:
    """Add the values of a tensor to bins on its device; the host only waits for a sparse tensor, to add up its rows.

    Rows that a sparse tensor does not store count as zeros, and a complex number as two numbers.
    """
    values = values.detach()
    if values.layout is not torch.strided:
        stored = values.coalesce().values()
        bins[_ZERO] += values.numel() - stored.numel()
        values = stored
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.numel():
        flat = values.reshape(-1)
        for first in range(0, len(flat), CHUNK):
            _count_chunk(bins, flat[first : first + CHUNK])


def _count_chunk(bins: Tensor, values: Tensor) -> None:
    if values.element_size() < 4:
        values = values.float()  # exact
    mantissas, exponents = torch.frexp(values)  # 0.5 <= |mantissa| < 1
    index = 2 * (exponents.long() - 1 - MIN_EXPONENT) + (mantissas.abs() != 0.5)
    index = torch.where(values == 0, _ZERO, index)
    index = torch.where(values.isinf(), _INFINITE, index)
    index = torch.where(values.isnan(), _NAN, index)
    bins.scatter_add_(0, index, torch.ones_like(index))
    bins[_OVERFLOW] += ((values.abs() >= FP16_OVERFLOW) & values.isfinite()).sum()


@dataclass(frozen=True, slots=True)
class ExponentHistogram:
    """How many values there are of each power of two.

    Args:
        exponents: the number of finite values with ``floor(log2(abs(value)))``, by that exponent.
        powers_of_two: how many of them are powers of two.
        num_zeros: exact zeros.
        num_infinite: infinite values.
        num_nan: values that are nan.
        num_overflowing: finite values that are infinite in fp16.
    """

    exponents: Mapping[int, int] = field(default_factory=dict)
    powers_of_two: Mapping[int, int] = field(default_factory=dict)
    num_zeros: int = 0
    num_infinite: int = 0
    num_nan: int = 0
    num_overflowing: int = 0

    @property
    def num_nonzero(self) -> int:
        """Number of finite values that are not zero."""
        return sum(self.exponents.values())

    @property
    def num_nonfinite(self) -> int:
        """Number of values that are infinite or nan."""
        return self.num_infinite + self.num_nan

    @property
    def num_values(self) -> int:
        """Number of all values."""
        return self.num_nonzero + self.num_zeros + self.num_nonfinite

    def num_lost(self, scale_exponent: int = 0, *, zero_exponent: int = FP16_ZERO_EXPONENT) -> int:
        """Return how many values that are not zero become zero in fp16, if scaled by a power of two before.

        Args:
            scale_exponent: of the scale.
            zero_exponent: of the largest number that becomes zero; that of fp16 by default.

        Example:
            >>> ExponentHistogram({-25: 3, 0: 1}, {-25: 1}).num_lost()  # only 2^-25 itself is rounded to zero
            1
        """
        last = zero_exponent - scale_exponent
        below = sum(count for exponent, count in self.exponents.items() if exponent < last)
        return below + self.powers_of_two.get(last, 0)

    def num_subnormal(self, scale_exponent: int = 0) -> int:
        """Return how many values are subnormal in fp16, and not zero, if scaled by a power of two before."""
        below = FP16_NORMAL_EXPONENT - scale_exponent
        return sum(count for exponent, count in self.exponents.items() if exponent < below) - self.num_lost(
            scale_exponent
        )

    def share(self, count: int) -> float:
        """Return a count as a share of the finite values that are not zero; 0 if there are none."""
        return count / self.num_nonzero if self.num_nonzero else 0.0

    def find_loss_scale_exponent(self) -> int | None:
        """Return k of the largest loss scale 2^k that leaves every value below 2^15; None if there is no value.

        Example:
            >>> ExponentHistogram({-30: 5, -2: 1}).find_loss_scale_exponent()
            16
        """
        if not self.exponents:
            return None
        return min(TOP_EXPONENT - max(self.exponents), MAX_SCALE_EXPONENT)


def read_bins(bins: Tensor) -> ExponentHistogram:
    """Return what bins have counted; waits for their device."""
    counts: list[int] = bins.tolist()
    exponents, powers = {}, {}
    for index in range(0, _ZERO, 2):
        exponent, (power, between) = MIN_EXPONENT + index // 2, counts[index : index + 2]
        if power + between:
            exponents[exponent] = power + between
        if power:
            powers[exponent] = power
    return ExponentHistogram(exponents, powers, *counts[_ZERO:])


def merge_histograms(histograms: Iterable[ExponentHistogram]) -> ExponentHistogram:
    """Return the sum of histograms.

    Example:
        >>> merge_histograms([ExponentHistogram({0: 1}), ExponentHistogram({0: 2, 3: 1}, num_zeros=4)]).exponents
        {0: 3, 3: 1}
    """
    exponents, powers, rest = Counter[int](), Counter[int](), [0, 0, 0, 0]
    for each in histograms:
        exponents.update(each.exponents)
        powers.update(each.powers_of_two)
        own = each.num_zeros, each.num_infinite, each.num_nan, each.num_overflowing
        rest = [total + count for total, count in zip(rest, own, strict=True)]
    return ExponentHistogram(dict(sorted(exponents.items())), dict(sorted(powers.items())), *rest)
