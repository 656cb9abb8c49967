"""The calls of batch norm in a model's forward, as a function mode sees them, whichever way the model was cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Normal(NamedTuple):
    """The arguments of batch norm."""

    values: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    training: bool
    momentum: float
    eps: float

    @property
    def mark(self) -> int:
        """The identity of the tensor by which the module is known that is called; 0 where it has none."""
        mark = self.running_mean if self.running_mean is not None else self.weight
        return 0 if mark is None else id(mark)

    @property
    def num_values(self) -> int:
        """How many values there are by channel."""
        return self.values.numel() // max(self.values.shape[1], 1)


def of_functional(  # noqa: PLR0913 - torch's own
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,  # noqa: FBT001, FBT002
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Normal:
    """Return the arguments of ``torch.nn.functional.batch_norm``."""
    return Normal(input, running_mean, running_var, weight, bias, training, momentum, eps)


def of_aten(values: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Normal:  # noqa: ANN401
    """Return the arguments of the operation as a traced model calls it."""
    running_mean, running_var, training, momentum, eps, _ = rest
    return Normal(values, running_mean, running_var, weight, bias, training, momentum, eps)


def call_anew(call: Normal) -> Tensor:
    """Return the values that batch norm makes of these arguments."""
    return F.batch_norm(*call)


CALLS: Mapping[Callable[..., Any], Callable[..., Normal]] = {
    F.batch_norm: of_functional,
    torch.ops.aten.batch_norm.default: of_aten,
}
"""The functions that normalize, and how their arguments are read."""

COUNTS: frozenset[Callable[..., Any]] = frozenset({Tensor.add_, torch.ops.aten.add_.Tensor})
"""The functions by which a module counts its batches."""
