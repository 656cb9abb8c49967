"""How many samples a batch has, if its tensors agree."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from counterpoint.errors import DataError


def count_samples(inputs: Any, targets: Any) -> int:  # noqa: ANN401 - whatever model and loss take
    """Return the length along dim 0 of all tensors of a batch; 1 where there is no tensor.

    Raises:
        DataError: there is no sample, or not all tensors have as many.

    Example:
        >>> import torch
        >>> count_samples(torch.ones(3, 2), torch.ones(4))
        Traceback (most recent call last):
        counterpoint.errors.DataError: the inputs have 3 samples, the targets 4; samples lie along dim 0...
    """
    if isinstance(inputs, Tensor) and isinstance(targets, Tensor) and inputs.dim() and targets.dim():
        lengths, others = {len(inputs)}, {len(targets)}  # as most are, and fast
    else:
        lengths, others = lengths_of(inputs), lengths_of(targets)
    if len(lengths | others) > 1:
        raise DataError(
            f"the inputs have {listed(lengths)} samples, the targets {listed(others)}; samples lie along dim 0 of "
            "every tensor, and each needs its input and its target: give tensors of one length"
        )
    count: int = min(lengths | others, default=1)
    if not count:
        raise DataError("the batch has 0 samples, which have no mean loss; leave empty batches out")
    return count


def lengths_of(values: Any) -> set[int]:  # noqa: ANN401 - any nest of tensors
    """Return the lengths along dim 0 of all tensors in a nest.

    Raises:
        DataError: something in it is an array of another library, or a tensor without dims.
    """
    leaves = tree_leaves(values)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not leaf.dim():
            raise DataError(
                "a tensor of the batch has no dims; samples lie along dim 0: give it one, with unsqueeze(0)"
            )
        if not isinstance(leaf, Tensor) and hasattr(leaf, "__array__"):
            raise DataError(
                f"the batch holds a {type(leaf).__module__}.{type(leaf).__name__}; models compute with tensors: "
                "convert it with torch.as_tensor"
            )
    return {len(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


def listed(lengths: set[int]) -> str:
    """Return the lengths as text."""
    return " and ".join(map(str, sorted(lengths))) or "no"
