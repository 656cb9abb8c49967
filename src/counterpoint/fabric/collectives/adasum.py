"""Adasum: a sum of gradients that adds what is orthogonal and averages what is parallel."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

MIN_SQUARED_NORM = sqrt(sys.float_info.min)  # a vector below it has no direction to compare


def adasum(vectors: Sequence[Tensor]) -> Tensor:
    """Return the adaptive sum of the vectors, one per rank, in new memory of their dtype.

    The vectors are combined in pairs, then the results in pairs, as recursive doubling would; where their number is
    odd, the last one waits for the next round. So any number of ranks can take part. Scalar products are made in
    float64.

    Args:
        vectors: at least one, all of one shape and floating point dtype.

    Returns:
        Their sum where they are orthogonal, their mean where they are equal.

    Example:
        >>> adasum([torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])])
        tensor([1., 2.])
        >>> adasum([torch.tensor([1.0, 2.0])] * 4)
        tensor([1., 2.])

    Cost:
        one scalar product and two norms for each of ``len(vectors) - 1`` pairs.

    Source:
        Maleki et al., Scaling Distributed Training with Adaptive Summation, MLSys 2021 (arXiv 2006.02924), section 3.
    """
    left = list(vectors)
    while len(left) > 1:
        pairs = [adasum_pair(first, second) for first, second in zip(left[::2], left[1::2], strict=False)]
        left = pairs + left[2 * len(pairs) :]
    return left[0].clone() if len(vectors) == 1 else left[0]


def adasum_pair(first: Tensor, second: Tensor) -> Tensor:
    """Return ``(1 - ab / 2aa) a + (1 - ab / 2bb) b``; a vector that is next to nothing is added as it is."""
    product = _dot(first, second)
    squares = _dot(first, first), _dot(second, second)
    shares = [1.0 if square < MIN_SQUARED_NORM else 1.0 - product / (2 * square) for square in squares]
    return first * shares[0] + second * shares[1]


def _dot(first: Tensor, second: Tensor) -> float:
    return float(torch.dot(first.reshape(-1).double(), second.reshape(-1).double()))
