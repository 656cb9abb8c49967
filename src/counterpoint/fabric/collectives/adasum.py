"""Adasum: a sum of gradients that adds orthogonal and averages parallel components."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

MIN_SQUARED_NORM = sqrt(sys.float_info.min)  # below it, the direction of a vector is meaningless


def adasum(vectors: Sequence[Tensor]) -> Tensor:
    """Return the adaptive sum of the vectors, one per rank, in new memory of their dtype.

    The vectors are combined in pairs, then the results in pairs, as in recursive doubling; with an odd number, the last
    one is carried to the next round. So any number of ranks works. Dot products are computed in float64.

    Args:
        vectors: at least one, all of one shape and floating point dtype.

    Returns:
        Their sum if they are orthogonal, their mean if they are equal.

    Example:
        >>> adasum([torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])])
        tensor([1., 2.])
        >>> adasum([torch.tensor([1.0, 2.0])] * 4)
        tensor([1., 2.])

    Cost:
        one dot product and two norms for each of ``len(vectors) - 1`` pairs.

    Source:
        Maleki et al., Scaling Distributed Training with Adaptive Summation, MLSys 2021 (arXiv 2006.02924), section 3.
    """
    remaining = list(vectors)
    while len(remaining) > 1:
        pairs = [adasum_pair(first, second) for first, second in zip(remaining[::2], remaining[1::2], strict=False)]
        remaining = pairs + remaining[2 * len(pairs) :]
    return remaining[0].clone() if len(vectors) == 1 else remaining[0]


def adasum_pair(first: Tensor, second: Tensor) -> Tensor:
    """Return ``(1 - ab / 2aa) a + (1 - ab / 2bb) b``; a vector of negligible norm is added unscaled."""
    product = _dot(first, second)
    squares = _dot(first, first), _dot(second, second)
    factors = [(1.0 - product / (2 * square)).masked_fill_(square < MIN_SQUARED_NORM, 1.0) for square in squares]
    return first * factors[0] + second * factors[1]


def _dot(first: Tensor, second: Tensor) -> Tensor:
    return torch.dot(first.reshape(-1).double(), second.reshape(-1).double())
