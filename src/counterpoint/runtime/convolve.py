"""Convolutions whose weight gradient is made when it is due, not when autograd comes by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Taker(Protocol):
    """Where a weight's gradient belongs."""

    @property
    def is_open(self) -> bool:
        """Whether what autograd makes now are the gradients of a step."""
        ...

    def when_due(self, job: Callable[[], None]) -> None:
        """Do what makes the gradient, now or later."""

    def target(self) -> tuple[Tensor, bool]:
        """Return the memory, in the weight's shape, and whether something is in it to be added to."""


class How(NamedTuple):
    """How a convolution is done: its numbers for each dim, and in how many groups channels are convolved apart."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


class Convolution(NamedTuple):
    """One call.

    Args:
        x: what enters.
        weight: the kernels.
        bias: is added, if there is one.
        how: the rest.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    how: How

    def forward(self) -> Tensor:
        """Return what torch computes."""
        stride, padding, dilation, groups = self.how
        found: Tensor = torch.ops.aten.convolution(
            self.x, self.weight, self.bias, stride, padding, dilation, False, [0] * len(stride), groups
        )
        return found

    def backward(self, above: Tensor, *, wanted: tuple[bool, bool, bool]) -> tuple[Tensor | None, ...]:
        """Return the wanted ones of the gradients of input, weight and bias."""
        stride, padding, dilation, groups = self.how
        sizes = None if self.bias is None else list(self.bias.shape)
        zeros = [0] * len(stride)
        found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
            above, self.x, self.weight, sizes, stride, padding, dilation, False, zeros, groups, wanted
        )
        return found


class Convolve(torch.autograd.Function):
    """A convolution whose backward gives the weight's gradient to its taker."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        how: How,
        taker: Taker,
    ) -> Tensor:
        """Return what torch computes."""
        ctx.save_for_backward(x, weight, bias)
        ctx.how, ctx.taker = how, taker
        return Convolution(x, weight, bias, how).forward()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Return the gradients of input and bias, and the weight's where nobody takes it."""
        (above,) = gradients
        x, weight, bias = ctx.saved_tensors
        call = Convolution(x, weight, bias, ctx.how)
        to_input, to_weight, to_bias = ctx.needs_input_grad[:3]
        is_taken = to_weight and ctx.taker.is_open and not torch.is_grad_enabled()
        found = call.backward(above, wanted=(to_input, to_weight and not is_taken, to_bias))
        if is_taken:
            ctx.taker.when_due(partial(_put_weight_gradient, call, above, ctx.taker))
        return *found, None, None


def _put_weight_gradient(call: Convolution, above: Tensor, taker: Taker) -> None:
    _, found, _ = call.backward(above, wanted=(False, True, False))
    assert found is not None, "it is wanted"
    into, has_some = taker.target()
    (into.add_ if has_some else into.copy_)(found)


def read_call(  # noqa: PLR0913 - torch's arguments
    input: Tensor,  # noqa: A002 - torch's name
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,  # noqa: ANN401 - a number or one for each dim
    padding: Any = 0,  # noqa: ANN401
    dilation: Any = 1,  # noqa: ANN401
    groups: int = 1,
) -> Convolution | None:
    """Return a call as it is convolved; None where padding is asked for by a name, or the input is no batch."""
    dims = weight.dim() - 2
    if isinstance(padding, str) or input.dim() != weight.dim():
        return None
    numbers = [(value,) * dims if isinstance(value, int) else tuple(value) for value in (stride, padding, dilation)]
    stride, padding, dilation = (value * dims if len(value) == 1 else value for value in numbers)
    return Convolution(input, weight, bias, How(stride, padding, dilation, groups))


def convolve(call: Convolution, taker: Taker) -> Tensor:
    """Return the convolution, and give the weight's gradient to its taker in a backward."""
    found: Tensor = Convolve.apply(call.x, call.weight, call.bias, call.how, taker)  # type: ignore[no-untyped-call]
    return found


CONVOLUTIONS: Mapping[Callable[..., Any], Callable[..., Convolution | None]] = dict.fromkeys(
    (
        F.conv1d, F.conv2d, F.conv3d,
        torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default, torch.ops.aten.conv3d.default,
    ),
    read_call,
)  # fmt: skip
"""The functions that convolve, and how their arguments are read."""
