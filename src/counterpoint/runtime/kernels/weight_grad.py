"""Convolutions whose weight gradient is made when it is due, not when autograd comes by.

Weight gradients of linear layers and tables, written where they belong instead of handed over by autograd.

A weight's gradient is a matrix product. Autograd lets it make a new tensor, which then has to be added to or copied to
the flat gradient: for a large weight that is more memory traffic than the rest of the layer's step. Here the product
writes its result straight into its place. That of a table is noted as rows: :mod:`counterpoint.runtime.kernels.embedding`.

Only a plain backward does so. A gradient that is itself to be differentiated, or that somebody else asks autograd for,
is made in torch's own way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.runtime.kernels.embedding import EMBEDDING_FNS, RowGradSink, embedding_lookup
from counterpoint.runtime.kernels.function_mode import FunctionReplacement, InterceptFunctions, TorchFunction
from counterpoint.runtime.kernels.small_batch_linear import small_batch_linear


class ConvGradSink(Protocol):
    """Where a weight's gradient belongs."""

    @property
    def accepts_grads(self) -> bool:
        """Whether what autograd makes now are the gradients of a step."""
        ...

    def submit(self, job: Callable[[], None]) -> None:
        """Do what makes the gradient, now or later."""

    def target(self) -> tuple[Tensor, bool]:
        """Return the memory, in the weight's shape, and whether something is in it to be added to."""


class ConvArgs(NamedTuple):
    """How a convolution is done: its numbers for each dim, and in how many groups channels are convolved apart."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


class ConvCall(NamedTuple):
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
    args: ConvArgs

    def forward(self) -> Tensor:
        """Return what torch computes."""
        stride, padding, dilation, groups = self.args
        found: Tensor = torch.ops.aten.convolution(
            self.x, self.weight, self.bias, stride, padding, dilation, False, [0] * len(stride), groups
        )
        return found

    def backward(self, grad_output: Tensor, *, output_mask: tuple[bool, bool, bool]) -> tuple[Tensor | None, ...]:
        """Return the wanted ones of the gradients of input, weight and bias."""
        stride, padding, dilation, groups = self.args
        sizes = None if self.bias is None else list(self.bias.shape)
        zeros = [0] * len(stride)
        found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
            grad_output, self.x, self.weight, sizes, stride, padding, dilation, False, zeros, groups, output_mask
        )
        return found


class ConvWeightGrad(torch.autograd.Function):
    """A convolution whose backward gives the weight's gradient to its taker."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        args: ConvArgs,
        sink: ConvGradSink,
    ) -> Tensor:
        """Return what torch computes."""
        ctx.save_for_backward(x, weight, bias)
        ctx.how, ctx.taker = args, sink
        return ConvCall(x, weight, bias, args).forward()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Return the gradients of input and bias, and the weight's where nobody takes it."""
        (above,) = gradients
        x, weight, bias = ctx.saved_tensors
        call = ConvCall(x, weight, bias, ctx.how)
        to_input, to_weight, to_bias = ctx.needs_input_grad[:3]
        is_taken = to_weight and ctx.taker.is_open and not torch.is_grad_enabled()
        found = call.backward(above, output_mask=(to_input, to_weight and not is_taken, to_bias))
        if is_taken:
            ctx.taker.when_due(partial(_write_conv_weight_grad, call, above, ctx.taker))
        return *found, None, None


def _write_conv_weight_grad(call: ConvCall, grad_output: Tensor, sink: ConvGradSink) -> None:
    _, found, _ = call.backward(grad_output, output_mask=(False, True, False))
    assert found is not None, "it is wanted"
    into, has_some = sink.target()
    (into.add_ if has_some else into.copy_)(found)


def parse_conv_call(  # noqa: PLR0913 - torch's arguments
    input: Tensor,  # noqa: A002 - torch's name
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,  # noqa: ANN401 - a number or one for each dim
    padding: Any = 0,  # noqa: ANN401
    dilation: Any = 1,  # noqa: ANN401
    groups: int = 1,
) -> ConvCall | None:
    """Return a call as it is convolved; None where padding is asked for by a name, or the input is no batch."""
    dims = weight.dim() - 2
    if isinstance(padding, str) or input.dim() != weight.dim():
        return None
    numbers = [(value,) * dims if isinstance(value, int) else tuple(value) for value in (stride, padding, dilation)]
    stride, padding, dilation = (value * dims if len(value) == 1 else value for value in numbers)
    return ConvCall(input, weight, bias, ConvArgs(stride, padding, dilation, groups))


def conv_with_sink(call: ConvCall, sink: ConvGradSink) -> Tensor:
    """Return the convolution, and give the weight's gradient to its taker in a backward."""
    found: Tensor = ConvWeightGrad.apply(call.x, call.weight, call.bias, call.args, sink)  # type: ignore[no-untyped-call]
    return found


CONV_FNS: Mapping[Callable[..., Any], Callable[..., ConvCall | None]] = dict.fromkeys(
    (
        F.conv1d, F.conv2d, F.conv3d,
        torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default, torch.ops.aten.conv3d.default,
    ),
    parse_conv_call,
)  # fmt: skip
"""The functions that convolve, and how their arguments are read."""


LINEAR_FNS: frozenset[Callable[..., Any]] = frozenset({F.linear, torch.ops.aten.linear.default})
INTERCEPTED_FNS = LINEAR_FNS | CONV_FNS.keys() | EMBEDDING_FNS.keys()
"""Of all functions these are looked at."""
without_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction  # noqa: SLF001 - it has no public name
"""In which functions are called without a look at each: what a backward does in here is no forward that is repeated."""


class GradSink(RowGradSink, Protocol):
    """Where a weight's gradient belongs."""

    def target(self) -> tuple[Tensor, bool]:
        """Return the memory, in the weight's shape, and whether something is in it to be added to."""

    @property
    def is_deferred(self) -> bool:
        """Whether jobs may be done later than at once."""
        ...

    def submit(self, job: Callable[[], None]) -> None:
        """Do what makes the gradient: at once, or when the row comes to it."""


class GradSinks(NamedTuple):
    """Where gradients belong, by the weights' identity.

    Args:
        places: of weights of any kind.
        shelves: of tables.
    """

    weight_sinks: Mapping[int, GradSink] = MappingProxyType({})
    row_sinks: Mapping[int, RowGradSink] = MappingProxyType({})


class LinearWeightGrad(torch.autograd.Function):
    """``x @ weight.T + bias``, whose backward writes the weight's gradient into its place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: GradSink) -> Tensor:  # noqa: ANN401
        """Return the layer's output."""
        ctx.save_for_backward(x, weight)
        ctx.place, ctx.has_bias = sink, bias is not None
        return small_batch_linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Return the gradients of input and bias, and the weight's where it has not been put into its place."""
        x, weight = ctx.saved_tensors  # which may be computed again for that, as in the forward
        with without_torch_function():
            return _linear_backward(ctx, x, weight, *gradients)


def _linear_backward(ctx: Any, x: Tensor, weight: Tensor, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    rows, inputs = grad_output.reshape(-1, grad_output.shape[-1]), x.reshape(-1, x.shape[-1])
    to_input = grad_output @ weight if ctx.needs_input_grad[0] else None
    to_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
    if not ctx.needs_input_grad[1]:
        return to_input, None, to_bias, None
    if torch.is_grad_enabled() or not ctx.place.is_open:
        return to_input, rows.t() @ inputs, to_bias, None
    ctx.place.when_due(partial(_write_product, rows, inputs, ctx.place))
    return to_input, None, to_bias, None


def _write_product(rows: Tensor, inputs: Tensor, sink: GradSink) -> None:
    into, has_some = sink.target()
    if not has_some and not into.is_cpu:
        torch.mm(rows.t(), inputs, out=into)
        return
    if not has_some:
        into.zero_()  # a product of few samples that overwrites takes longer than both do on processors
    into.addmm_(rows.t(), inputs)


class InPlaceGradMode(InterceptFunctions):
    """While this is active, linear layers with one of these weights use :class:`LinearWeightGrad`, and tables :class:`EmbeddingRowGrad`.

    Convolutions use :class:`ConvWeightGrad` where gradients may be put off; their results are no products that could be
    written straight to somewhere.

    Args:
        ways: where their gradients belong.
        beside: what other functions do meanwhile.
    """

    def __init__(
        self, sinks: GradSinks, replacements: Mapping[TorchFunction, FunctionReplacement] = MappingProxyType({})
    ) -> None:
        super().__init__({**replacements, **dict.fromkeys(INTERCEPTED_FNS, self.call)})
        self.weight_sinks, self.row_sinks = sinks

    def call(self, func: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Call the function, or do what it does; in a graph that is compiled, nothing but call it."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func in EMBEDDING_FNS:
            call = EMBEDDING_FNS[func](*args, **kwargs)
            shelf = self.row_sinks.get(id(call.weight)) if call is not None else None
            return embedding_lookup(call, shelf) if call is not None and shelf is not None else func(*args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        if func in CONV_FNS:
            found = CONV_FNS[func](*args, **kwargs)
            place = self.weight_sinks.get(id(found.weight)) if found is not None else None
            if found is None or place is None or not place.is_deferred:
                return func(*args, **kwargs)
            return conv_with_sink(found, place)
        place = self.weight_sinks.get(id(args[1])) if not kwargs else None
        if place is None:
            return func(*args, **kwargs)
        return LinearWeightGrad.apply(args[0], args[1], args[2] if len(args) > 2 else None, place)  # type: ignore[no-untyped-call]


def run_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Run autograd as ``torch.autograd.backward`` does, but with the active function mode active inside, too.

    That call is itself open to function modes, which torch sets aside while they serve it. What is computed again in a
    backward would then be computed in another way than in the forward.
    """
    seeds = [torch.ones_like(root) if seed is None else seed for root, seed in zip(roots, gradients, strict=True)]
    engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001 - it has no public name
    engine.run_backward(tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True)
