"""Weight gradients of linear layers and tables, written where they belong instead of handed over by autograd.

A weight's gradient is a matrix product. Autograd lets it make a new tensor, which then has to be added to or copied to
the flat gradient: for a large weight that is more memory traffic than the rest of the layer's step. Here the product
writes its result straight into its place. That of a table is noted as rows: :mod:`counterpoint.runtime.lookup`.

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

from counterpoint.runtime.convolve import CONVOLUTIONS, convolve
from counterpoint.runtime.linear import linear
from counterpoint.runtime.lookup import TABLES, Shelf, look_up
from counterpoint.runtime.watching import Function, Instead, Watching

LINEAR: frozenset[Callable[..., Any]] = frozenset({F.linear, torch.ops.aten.linear.default})
SEEN = LINEAR | CONVOLUTIONS.keys() | TABLES.keys()
"""Of all functions these are looked at."""
plainly: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction  # noqa: SLF001 - it has no public name
"""In which functions are called without a look at each: what a backward does in here is no forward that is repeated."""


class Place(Shelf, Protocol):
    """Where a weight's gradient belongs."""

    def target(self) -> tuple[Tensor, bool]:
        """Return the memory, in the weight's shape, and whether something is in it to be added to."""

    @property
    def puts_off(self) -> bool:
        """Whether jobs may be done later than at once."""
        ...

    def when_due(self, job: Callable[[], None]) -> None:
        """Do what makes the gradient: at once, or when the row comes to it."""


class Ways(NamedTuple):
    """Where gradients belong, by the weights' identity.

    Args:
        places: of weights of any kind.
        shelves: of tables.
    """

    places: Mapping[int, Place] = MappingProxyType({})
    shelves: Mapping[int, Shelf] = MappingProxyType({})


class Linear(torch.autograd.Function):
    """``x @ weight.T + bias``, whose backward writes the weight's gradient into its place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, place: Place) -> Tensor:  # noqa: ANN401
        """Return the layer's output."""
        ctx.save_for_backward(x, weight)
        ctx.place, ctx.has_bias = place, bias is not None
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Return the gradients of input and bias, and the weight's where it has not been put into its place."""
        x, weight = ctx.saved_tensors  # which may be computed again for that, as in the forward
        with plainly():
            return _gradients_of(ctx, x, weight, *gradients)


def _gradients_of(ctx: Any, x: Tensor, weight: Tensor, above: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    rows, inputs = above.reshape(-1, above.shape[-1]), x.reshape(-1, x.shape[-1])
    to_input = above @ weight if ctx.needs_input_grad[0] else None
    to_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
    if not ctx.needs_input_grad[1]:
        return to_input, None, to_bias, None
    if torch.is_grad_enabled() or not ctx.place.is_open:
        return to_input, rows.t() @ inputs, to_bias, None
    ctx.place.when_due(partial(_put_product, rows, inputs, ctx.place))
    return to_input, None, to_bias, None


def _put_product(rows: Tensor, inputs: Tensor, place: Place) -> None:
    into, has_some = place.target()
    if not has_some and not into.is_cpu:
        torch.mm(rows.t(), inputs, out=into)
        return
    if not has_some:
        into.zero_()  # a product of few samples that overwrites takes longer than both do on processors
    into.addmm_(rows.t(), inputs)


class Directly(Watching):
    """While this is active, linear layers with one of these weights use :class:`Linear`, and tables :class:`Lookup`.

    Convolutions use :class:`Convolve` where gradients may be put off; their results are no products that could be
    written straight to somewhere.

    Args:
        ways: where their gradients belong.
        beside: what other functions do meanwhile.
    """

    def __init__(self, ways: Ways, beside: Mapping[Function, Instead] = MappingProxyType({})) -> None:
        super().__init__({**beside, **dict.fromkeys(SEEN, self.call)})
        self.places, self.shelves = ways

    def call(self, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Call the function, or do what it does; in a graph that is compiled, nothing but call it."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func in TABLES:
            call = TABLES[func](*args, **kwargs)
            shelf = self.shelves.get(id(call.weight)) if call is not None else None
            return look_up(call, shelf) if call is not None and shelf is not None else func(*args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        if func in CONVOLUTIONS:
            found = CONVOLUTIONS[func](*args, **kwargs)
            place = self.places.get(id(found.weight)) if found is not None else None
            if found is None or place is None or not place.puts_off:
                return func(*args, **kwargs)
            return convolve(found, place)
        place = self.places.get(id(args[1])) if not kwargs else None
        if place is None:
            return func(*args, **kwargs)
        return Linear.apply(args[0], args[1], args[2] if len(args) > 2 else None, place)  # type: ignore[no-untyped-call]


def run_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Run autograd as ``torch.autograd.backward`` does, but with the active function mode active inside, too.

    That call is itself open to function modes, which torch sets aside while they serve it. What is computed again in a
    backward would then be computed in another way than in the forward.
    """
    seeds = [torch.ones_like(root) if seed is None else seed for root, seed in zip(roots, gradients, strict=True)]
    engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001 - it has no public name
    engine.run_backward(tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True)
