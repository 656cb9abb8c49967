"""Batches with values that none before had, such as the -100 of the first padding, or the first 0 of a mask.

A loss that was seen to add up over samples without padding may be a mean over tokens, which shows only where samples
have different numbers of them. So the loss is checked again when a value is smaller or larger than all before, in the
first batch whose two halves have that value a different number of times::

    step 0   labels 0 ... 96       new: 0, 96      halves have 0 3 times and once: checked
    step 1   labels 2 ... 95
    step 2   labels -100 ... 96    new: -100       halves have it 7 and 4 times: checked
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

MAX_FOUND = 100
"""The largest number of checks: random values have few new extremes, but values that grow have one in each batch."""

NAN = math.nan
"""Compared by identity."""


class NewValues:
    """The range of each tensor of a batch so far, and extremes that no two halves have had in different numbers."""

    def __init__(self) -> None:
        self.ranges: dict[int, tuple[float, float]] = {}
        self.pending: dict[tuple[int, float], int] = {}  # with the number in the single sample before
        self.has_nan: set[int] = set()
        self.num_found = 0

    def find(self, tensors: Iterable[Tensor], num_samples: int) -> bool:
        """Return whether two halves of some samples are the first with an extreme value in different numbers.

        A single sample is compared with the one before; the first one with a new extreme counts, too. Tensors on a
        device, where reading would wait for it, those of another length than the samples, and complex ones are not
        looked at.

        Args:
            tensors: of the samples, in the same order in every call.
            num_samples: how many there are.
        """
        if self.num_found >= MAX_FOUND:
            return False
        found = False
        for index, tensor in enumerate(tensors):
            shape = tensor.shape
            if not shape or shape[0] != num_samples or 0 in shape or not tensor.is_cpu or tensor.is_complex():
                continue
            low, high = map(Tensor.item, torch.aminmax(tensor.detach()))
            self._extend_range(index, low, high)
            for value in [value for position, value in self.pending if position == index]:
                found |= self._is_uneven((index, value), tensor)
        self.num_found += found
        return found

    def _extend_range(self, index: int, low: float, high: float) -> None:
        if math.isnan(low):  # as marks of what is missing are; then there is no range
            if index not in self.has_nan:
                self.has_nan.add(index)
                self.pending[index, NAN] = -1
            return
        before_low, before_high = self.ranges.get(index, (math.inf, -math.inf))
        if low < before_low:
            self.pending[index, low] = -1
        if high > before_high:
            self.pending[index, high] = -1
        self.ranges[index] = min(low, before_low), max(high, before_high)

    def _is_uneven(self, key: tuple[int, float], tensor: Tensor) -> bool:
        """Return whether two halves, or this single sample and the one before, do not have a value equally often."""
        is_equal = tensor.detach().isnan() if key[1] is NAN else tensor.detach() == key[1]
        if len(tensor) > 1:
            middle = len(tensor) // 2
            counts = int(is_equal[:middle].sum()) * (len(tensor) - middle), int(is_equal[middle:].sum()) * middle
        else:
            counts = self.pending[key], int(is_equal.sum())
            self.pending[key] = counts[1]
        if counts[0] == counts[1]:
            return False
        if counts[0] >= 0:
            del self.pending[key]
        return True  # also for the first single sample, with which the next one is compared
