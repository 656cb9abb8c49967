"""Bags of rows as sums: fewer numbers than the rows themselves, in both directions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from counterpoint.server.sums import Sums
from counterpoint.server.working.rows import Distinct, Numbers


@dataclass(frozen=True, slots=True, eq=False)
class Bags:
    """What a module makes of rows that are looked up.

    Attributes:
        there: sums of the rows, one for each bag: what is pulled.
        back: sums of the bags, one for each row: what is pushed, being the rows' gradients.
        divisor: the rows of a bag where their mean is meant; else 1.
    """

    there: Sums
    back: Sums
    divisor: int

    def equals(self, other: Bags | None) -> bool:
        """Tell whether the same rows go to the same bags."""
        if self is other or other is None:
            return other is not None
        pairs = ((self.there.members, other.there.members), (self.there.starts, other.there.starts))
        return all(torch.equal(one, another) for one, another in pairs)

    def output(self, sums: Tensor) -> Tensor:
        """Return what the module returns."""
        return sums / self.divisor


def bags_of(wanted: Distinct, module: nn.EmbeddingBag, num_shards: int) -> Bags | None:
    """Return the bags of a look-up ``(bags, rows of each)``; None where rows are fewer, or a bag is no sum of them.

    Args:
        wanted: what is looked up.
        module: whose look-up it is.
        num_shards: of the job; each adds up its own rows.

    Example:
        >>> from counterpoint.server.working.rows import distinct
        >>> wanted = distinct("table", torch.tensor([[7, 3, 5], [3, 3, 9]]), 10, None)
        >>> bags = bags_of(wanted, nn.EmbeddingBag(10, 2, mode="sum"), 1)
        >>> bags.there.members.tolist(), bags.there.starts.tolist()
        ([2, 0, 1, 0, 0, 3], [0, 3])
        >>> bags.back.members.tolist(), bags.back.starts.tolist()
        ([0, 1, 1, 0, 0, 1], [0, 3, 4, 5])
    """
    order, indices = wanted.order, wanted.indices
    if order is None or indices.dim() != 2 or module.mode == "max" or module.scale_grad_by_freq:
        return None
    num_bags, each = indices.shape
    if num_bags * num_shards >= len(wanted.rows):
        return None
    there = Sums(wanted.places.view(-1).to(torch.int32), torch.arange(0, num_bags * each, each, dtype=torch.int32))
    back = Sums(_int32(order.numbers // each), _int32(order.starts))
    return Bags(there, back, each if module.mode == "mean" else 1)


def _int32(numbers: Numbers) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int32))
