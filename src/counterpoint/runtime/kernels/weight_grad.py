"""Weight gradients of linear and convolution layers, written to gradient sinks instead of returned to autograd.

A linear layer's weight gradient is a matrix product. Autograd lets the product allocate a new tensor, which is then
added or copied to the flat gradient: for a large weight that is more memory traffic than the rest of the layer's step.
Here the product writes directly into the flat gradient. A convolution's gradient cannot be written in place; its sink
only allows the computation to be deferred. Embedding tables: :mod:`counterpoint.runtime.kernels.embedding`.

Only a plain backward does so. A gradient that is itself differentiated, or requested from autograd by other code, is
computed by torch's own functions.
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
from counterpoint.runtime.kernels.function_mode import FunctionReplacement, TorchFunction
from counterpoint.runtime.kernels.small_batch_linear import small_batch_linear


class GradSink(RowGradSink, Protocol):
    """Where the gradient of a weight is written."""

    def target(self) -> tuple[Tensor, bool]:
        """Return the memory, in the weight's shape, and whether to add to what is there."""

    @property
    def is_deferred(self) -> bool:
        """Whether jobs may run later."""
        ...

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job that computes the gradient, now or when the program reaches the weight part of backward."""

    def is_bounded(self, rows: Tensor, inputs: Tensor) -> bool:
        """Check the gradient ``rows.T @ inputs`` by its factors; return whether it need not be read itself."""
        ...

    def check(self, grad: Tensor, *, is_bounded: bool = False) -> None:
        """Check a gradient that was written to :meth:`target`, unless its factors have shown that it is finite."""


class ConvArgs(NamedTuple):
    """Parameters of a convolution: a number per dim, and the number of channel groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


class ConvCall(NamedTuple):
    """Arguments of one convolution.

    Args:
        x: the input.
        weight: the kernels.
        bias: added to the output, if there is one.
        args: the rest.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    args: ConvArgs

    def forward(self) -> Tensor:
        """Return what torch computes."""
        stride, padding, dilation, groups = self.args
        output: Tensor = torch.ops.aten.convolution(
            self.x, self.weight, self.bias, stride, padding, dilation, False, [0] * len(stride), groups
        )
        return output

    def backward(self, grad_output: Tensor, *, output_mask: tuple[bool, bool, bool]) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias that ``output_mask`` selects."""
        stride, padding, dilation, groups = self.args
        sizes = None if self.bias is None else list(self.bias.shape)
        zeros = [0] * len(stride)
        grads: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
            grad_output, self.x, self.weight, sizes, stride, padding, dilation, False, zeros, groups, output_mask
        )
        return grads


class ConvWeightGrad(torch.autograd.Function):
    """A convolution whose backward submits the weight's gradient to its sink."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        args: ConvArgs,
        sink: GradSink,
    ) -> Tensor:
        """Return what torch computes."""
        ctx.save_for_backward(x, weight, bias)
        ctx.args, ctx.sink = args, sink
        return ConvCall(x, weight, bias, args).forward()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Return the gradients of input and bias, and the weight's if the sink does not accept it."""
        (grad_output,) = gradients
        x, weight, bias = ctx.saved_tensors
        call = ConvCall(x, weight, bias, ctx.args)
        to_input, to_weight, to_bias = ctx.needs_input_grad[:3]
        is_submitted = to_weight and ctx.sink.accepts_grads and not torch.is_grad_enabled()
        grads = call.backward(grad_output, output_mask=(to_input, to_weight and not is_submitted, to_bias))
        if is_submitted:
            ctx.sink.submit(partial(_write_conv_weight_grad, call, grad_output, ctx.sink))
        return *grads, None, None


def _write_conv_weight_grad(call: ConvCall, grad_output: Tensor, sink: GradSink) -> None:
    _, weight_grad, _ = call.backward(grad_output, output_mask=(False, True, False))
    assert weight_grad is not None, "the output mask selects it"
    target, has_some = sink.target()
    (target.add_ if has_some else target.copy_)(weight_grad)
    sink.check(target)


def parse_conv_call(  # noqa: PLR0913 - torch's arguments
    input: Tensor,  # noqa: A002 - torch's name
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,  # noqa: ANN401 - a number or one for each dim
    padding: Any = 0,  # noqa: ANN401
    dilation: Any = 1,  # noqa: ANN401
    groups: int = 1,
) -> ConvCall | None:
    """Return a call with one number per dim; None if padding is given by name, or the input has no batch dim."""
    dims = weight.dim() - 2
    if isinstance(padding, str) or input.dim() != weight.dim():
        return None
    numbers = [(value,) * dims if isinstance(value, int) else tuple(value) for value in (stride, padding, dilation)]
    stride, padding, dilation = (value * dims if len(value) == 1 else value for value in numbers)
    return ConvCall(input, weight, bias, ConvArgs(stride, padding, dilation, groups))


def conv_with_sink(call: ConvCall, sink: GradSink) -> Tensor:
    """Return the convolution; backward submits the weight's gradient to the sink."""
    output: Tensor = ConvWeightGrad.apply(call.x, call.weight, call.bias, call.args, sink)  # type: ignore[no-untyped-call]
    return output


CONV_FNS: Mapping[Callable[..., Any], Callable[..., ConvCall | None]] = dict.fromkeys(
    (
        F.conv1d, F.conv2d, F.conv3d,
        torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default, torch.ops.aten.conv3d.default,
    ),
    parse_conv_call,
)  # fmt: skip
"""Functions that convolve, and how to parse their arguments."""


LINEAR_FNS: frozenset[Callable[..., Any]] = frozenset({F.linear, torch.ops.aten.linear.default})
INTERCEPTED_FNS = LINEAR_FNS | CONV_FNS.keys() | EMBEDDING_FNS.keys()
without_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction  # noqa: SLF001 - it has no public name
"""Context in which no function is replaced: a backward's own computation is not a recomputed forward."""


class GradSinks(NamedTuple):
    """Gradient sinks, by ``id`` of the weight.

    Args:
        weight_sinks: of weights of linear and convolution layers.
        row_sinks: of embedding tables.
    """

    weight_sinks: Mapping[int, GradSink] = MappingProxyType({})
    row_sinks: Mapping[int, RowGradSink] = MappingProxyType({})


class LinearWeightGrad(torch.autograd.Function):
    """``x @ weight.T + bias``, whose backward writes the weight's gradient to its sink."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: GradSink) -> Tensor:  # noqa: ANN401
        """Return the layer's output."""
        ctx.save_for_backward(x, weight)
        ctx.sink, ctx.has_bias = sink, bias is not None
        return small_batch_linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Return the gradients of input and bias, and the weight's if the sink does not accept it."""
        x, weight = ctx.saved_tensors  # may run recomputation, with function modes as in the forward
        with without_torch_function():
            return _linear_backward(ctx, x, weight, *gradients)


def _linear_backward(ctx: Any, x: Tensor, weight: Tensor, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    rows, inputs = grad_output.reshape(-1, grad_output.shape[-1]), x.reshape(-1, x.shape[-1])
    to_input = grad_output @ weight if ctx.needs_input_grad[0] else None
    to_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
    if not ctx.needs_input_grad[1]:
        return to_input, None, to_bias, None
    if torch.is_grad_enabled() or not ctx.sink.accepts_grads:
        return to_input, rows.t() @ inputs, to_bias, None
    ctx.sink.submit(partial(write_weight_grad, rows, inputs, ctx.sink))
    return to_input, None, to_bias, None


def write_weight_grad(rows: Tensor, inputs: Tensor, sink: GradSink) -> None:
    """Write the gradient ``rows.T @ inputs`` of a weight to its sink, and check it."""
    target, has_some = sink.target()
    is_bounded = rows.numel() + inputs.numel() < target.numel() and sink.is_bounded(rows, inputs)
    if has_some:
        target.addmm_(rows.t(), inputs)
    else:
        torch.mm(rows.t(), inputs, out=target)
    sink.check(target, is_bounded=is_bounded)


def in_place_grad_functions(sinks: GradSinks) -> Mapping[TorchFunction, FunctionReplacement]:
    """Return what replaces torch's functions where layers have a gradient sink, for a function mode.

    Linear layers use :class:`LinearWeightGrad`, embedding tables :class:`EmbeddingRowGrad`, and convolutions
    :class:`ConvWeightGrad` if gradients may be deferred.

    Args:
        sinks: by weight.
    """
    return dict.fromkeys(INTERCEPTED_FNS, partial(_call_with_sink, sinks))


def _call_with_sink(sinks: GradSinks, func: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Call the function or its replacement; inside a compiled graph always the function."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return func(*args, **kwargs)
    if func in EMBEDDING_FNS:
        call = EMBEDDING_FNS[func](*args, **kwargs)
        row_sink = sinks.row_sinks.get(id(call.weight)) if call is not None else None
        return embedding_lookup(call, row_sink) if call is not None and row_sink is not None else func(*args, **kwargs)
    if torch.is_autocast_enabled(args[0].device.type if args else "cpu"):
        return func(*args, **kwargs)
    if func in CONV_FNS:
        conv_call = CONV_FNS[func](*args, **kwargs)
        sink = sinks.weight_sinks.get(id(conv_call.weight)) if conv_call is not None else None
        if conv_call is None or sink is None or not sink.is_deferred:
            return func(*args, **kwargs)
        return conv_with_sink(conv_call, sink)
    sink = sinks.weight_sinks.get(id(args[1])) if not kwargs else None
    if sink is None:
        return func(*args, **kwargs)
    return LinearWeightGrad.apply(args[0], args[1], args[2] if len(args) > 2 else None, sink)  # type: ignore[no-untyped-call]


def run_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Run ``torch.autograd.backward`` with the active function mode staying active inside.

    ``torch.autograd.backward`` is itself dispatched to function modes, which torch disables while they handle it.
    Recomputation inside backward would then use other functions than the forward did.
    """
    seeds = [torch.ones_like(root) if seed is None else seed for root, seed in zip(roots, gradients, strict=True)]
    engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001 - it has no public name
    engine.run_backward(tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True)
