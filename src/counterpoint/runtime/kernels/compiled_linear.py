"""Weight gradients of linear layers in graphs of ``torch.compile``, written to gradient sinks as in eager backwards.

A graph returns gradients, so that those of large matrices would be copied to where they are reduced or updated. Here a
layer is an operator whose backward submits the weight's gradient to its sink, and returns none. Which sinks there are
is the value of an input of the graph, the handle, so that identical blocks share a graph. A graph drops what nothing
reads; so the write has a result, the gradient of the handle, which is 0::

    forward    x, weight, bias, handle  ->  linear                ->  output
    backward   output's gradient        ->  products, sums        ->  gradients of x and bias
                                        ->  submit_weight_grad    ->  gradient of the handle
                                                 |
                                                 '-->  sink of the weight
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from counterpoint.errors import DataError
from counterpoint.partitioning.unused_outputs import is_unreached
from counterpoint.runtime.kernels.function_mode import TorchFunction
from counterpoint.runtime.kernels.graph_operators import define_differentiable, define_operator, register_once
from counterpoint.runtime.kernels.small_batch_linear import small_batch_linear
from counterpoint.runtime.kernels.weight_grad import GradSink, write_weight_grad
from counterpoint.runtime.params.flat_grads import is_large_matrix


class CompiledSinks:
    """The sinks of a rank's large weights, as its graphs find them."""

    def __init__(self) -> None:
        self.number = next(linear_operators().numbers)
        self.sinks: list[tuple[nn.Parameter, GradSink]] = []
        linear_operators().sinks[self.number] = self

    def begin_step(self, params: Iterable[nn.Parameter], sinks: Mapping[int, GradSink]) -> None:
        """Take the sinks of a step, which are by ``id`` of the weight."""
        self.sinks = [(param, sinks[id(param)]) for param in params if id(param) in sinks and is_large_matrix(param)]

    def make_handle(self, params: Iterable[nn.Parameter]) -> Tensor | None:
        """Return what a graph finds sinks by, an input of it; None unless all large ones of its parameters have one."""
        known = {id(param) for param, _ in self.sinks}
        large = [id(param) in known for param in params if is_large_matrix(param)]
        return torch.tensor([self.number], dtype=torch.float64, requires_grad=True) if large and all(large) else None

    def submit(self, rows: Tensor, inputs: Tensor, weight: Tensor) -> None:
        """Write a gradient to the weight's sink now: a graph reuses the memory of its factors.

        A weight that affects no output that the loss uses gets none, instead of zeros.

        Args:
            rows: the gradient of the layer's output, ``(samples, outputs)``.
            inputs: the layer's input, ``(samples, inputs)``.
            weight: ``(outputs, inputs)``.

        Raises:
            DataError: it has no sink, or the gradient belongs to no step.
        """
        if is_unreached(weight):
            return
        address = weight.data_ptr()
        sink = next((sink for param, sink in self.sinks if param.data_ptr() == address), None)
        if sink is None or not sink.accepts_grads:
            what = (
                "is not a parameter of the model" if sink is None else "is differentiated outside of a step's backward"
            )
            raise DataError(
                f"a compiled linear layer's weight of the shape {tuple(weight.shape)} {what}, but graphs write the "
                "gradients of large weights for the step only; register it as a parameter and call no autograd.grad "
                "for it, or drop compile="
            )
        write_weight_grad(rows, inputs, sink)


class LinearOperators(NamedTuple):
    """Operators of torch for large linear layers.

    Args:
        linear: ``linear(x, weight, bias, handle, number)``; the number makes two equal calls different.
        sinks: those that exist, by number. Torch has operators for the process, and these have no objects.
        numbers: of new ones.
    """

    linear: TorchFunction
    sinks: WeakValueDictionary[int, CompiledSinks]
    numbers: count[int]


@register_once
def linear_operators() -> LinearOperators:
    """Return the operators, which are registered with torch by the first call.

    Torch keeps compiled graphs between starts and does not see what is in an operator: rename it with its backward.
    """
    sinks: WeakValueDictionary[int, CompiledSinks] = WeakValueDictionary()

    def compute_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return small_batch_linear(x, weight, bias).contiguous()

    def allocate_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        del bias
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    def submit_to_sink(rows: Tensor, inputs: Tensor, weight: Tensor, handle: Tensor, number: int) -> Tensor:
        del number
        sinks[int(handle)].submit(rows, inputs, weight)
        return torch.zeros_like(handle)

    def allocate_handle(rows: Tensor, inputs: Tensor, weight: Tensor, handle: Tensor, number: int) -> Tensor:
        del rows, inputs, weight, number
        return torch.empty_like(handle)

    product = define_operator(
        "linear_product(Tensor x, Tensor weight, Tensor? bias) -> Tensor", compute_product, allocate_product
    )
    submit = define_operator(
        "submit_weight_grad(Tensor rows, Tensor inputs, Tensor weight, Tensor handle, int number) -> Tensor",
        submit_to_sink,
        allocate_handle,
    )

    class LinearToSink(torch.autograd.Function):
        """The layer and its gradients, of which the weight's goes to a sink."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, number: int) -> Tensor:  # noqa: ANN401
            ctx.save_for_backward(x, weight, handle)
            ctx.number, ctx.has_bias = number, bias is not None
            output: Tensor = product(x, weight, bias)
            return output

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
            (grad_output,) = grad_outputs
            x, weight, handle = ctx.saved_tensors
            rows, inputs = grad_output.reshape(-1, grad_output.shape[-1]), x.reshape(-1, x.shape[-1])
            to_input = grad_output @ weight if ctx.needs_input_grad[0] else None
            to_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
            return to_input, None, to_bias, submit(rows, inputs, weight, handle, ctx.number), None

    linear = define_differentiable(
        "linear_to_sink(Tensor x, Tensor weight, Tensor? bias, Tensor handle, int number) -> Tensor", LinearToSink.apply
    )
    return LinearOperators(linear, sinks, count())


def is_large_linear(args: Sequence[Any]) -> bool:
    """Return whether the arguments of a linear layer, in a graph, have a weight whose gradient goes to a sink."""
    x, weight = args[:2]
    return (
        isinstance(weight, nn.Parameter)
        and is_large_matrix(weight)
        and x.dtype == weight.dtype
        and not torch.is_autocast_enabled("cpu")
    )
