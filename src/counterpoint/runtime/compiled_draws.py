"""Random numbers inside graphs of ``torch.compile``: operators of a tensor, so that a graph serves every step.

A graph has one input for all its draws: row ``i`` says which numbers its draw ``i`` has, in the order in which the
model draws. Seeds, paths of modules and positions of samples are values of this tensor, so that they are not part of
the graph: identical blocks share one, and a forward that runs again in a backward has the same masks.

Source:
    Philox, as in :mod:`counterpoint.runtime.rng.sample_rng`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from counterpoint.errors import DataError
from counterpoint.runtime.kernels.compiled_linear import is_large_linear, linear_operators
from counterpoint.runtime.kernels.function_mode import TorchFunction
from counterpoint.runtime.kernels.graph_operators import define_operator, register_once
from counterpoint.runtime.kernels.weight_grad import LINEAR_FNS
from counterpoint.runtime.loss.loss_reduction import CASTS, PARSERS, IndexLoss
from counterpoint.runtime.rng.random_functions import COMPOSITES, IMPLEMENTATIONS
from counterpoint.runtime.rng.sample_rng import Draw, SampleRange


class DrawOperators(NamedTuple):
    """Operators of torch that draw; they depend on nothing but their arguments.

    Args:
        select: ``philox_select(draws, number, shape, p, value, dtype, device)``, as ``RandomSource.select``.
        words: ``philox_words(draws, number, shape, device, per_entry)``, as ``RandomSource.words``.
    """

    select: TorchFunction
    words: TorchFunction


@register_once
def draw_operators() -> DrawOperators:
    """Return the operators, which are registered with torch by the first call."""

    def draw_selection(  # noqa: PLR0913 - an operator of torch has no objects
        draws: Tensor,
        number: int,
        shape: Sequence[int],
        p: float,
        value: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        return read_draw(draws, number, shape).select(shape, p, value, dtype, device).contiguous()

    def allocate_selection(draws, number, shape, p, value, dtype, device):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0913
        return torch.empty(shape, dtype=dtype, device=device)

    def draw_words(draws: Tensor, number: int, shape: Sequence[int], device: torch.device, per_entry: int) -> Tensor:
        return read_draw(draws, number, shape).words(shape, device, per_entry).contiguous()

    def allocate_words(draws, number, shape, device, per_entry):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        size = (*shape, per_entry) if per_entry else tuple(shape)
        return torch.empty(size, dtype=torch.int64, device=device)

    return DrawOperators(
        define_operator(
            "philox_select(Tensor draws, int number, SymInt[] shape, float p, float value, ScalarType dtype, "
            "Device device) -> Tensor",
            draw_selection,
            allocate_selection,
        ),
        define_operator(
            "philox_words(Tensor draws, int number, SymInt[] shape, Device device, int per_entry) -> Tensor",
            draw_words,
            allocate_words,
        ),
    )


def write_draws(draws: Sequence[Draw]) -> Tensor:
    """Return draws as the input of a graph, in host memory: ``(number, 4)``, int64.

    Example:
        >>> write_draws([Draw(7, 0, SampleRange(4, 2, 8))])
        tensor([[7, 0, 4, 2]])
    """
    rows = [(draw.key, draw.batch_dim, draw.samples.first, draw.samples.size) for draw in draws]
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), 4)


def read_draw(draws: Tensor, number: int, shape: Sequence[int]) -> Draw:
    """Return one row of :func:`write_draws`.

    Raises:
        DataError: there are too few rows, or a draw of this shape is not for these samples.
    """
    if number < len(draws):
        key, batch_dim, first, size = draws[number].tolist()
        if batch_dim < len(shape) and shape[batch_dim] % size == 0:
            return Draw(key, batch_dim, SampleRange(first, size))
    raise DataError(
        f"a compiled forward draws random numbers of the shape {tuple(shape)} as its draw {number}, which it did not "
        "on the first batch; draw in every forward what that of the first batch drew, one entry for each sample, or "
        "drop compile="
    )


@register_once
def trace_loss_modules() -> None:
    """Let function modes inside graphs see what ``nn.CrossEntropyLoss()`` computes that a forward makes.

    Torch's compiler writes such a module into the graph as a call of ``F.cross_entropy`` by itself, past the modes,
    although it traces all others. Without a mode it still does.
    """
    from torch._dynamo.variables import LambdaVariable, UserDefinedClassVariable
    from torch._dynamo.variables.base import VariableTracker

    traced: Any = UserDefinedClassVariable
    write_call = getattr(traced, "_call_cross_entropy_loss", None)  # the only place where it can be changed
    if write_call is None:  # another torch, which may trace the module like all others
        return

    def trace_call(self: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - of the compiler
        if not tx.symbolic_torch_function_state.in_torch_function_mode():
            return write_call(self, tx, args, kwargs)
        function = VariableTracker.build(tx, F.cross_entropy)
        options = {**dict(zip(CROSS_ENTROPY_OPTIONS, args, strict=False)), **kwargs}
        return LambdaVariable(lambda input, target: function.call_function(tx, [input, target], options))  # noqa: A006

    traced._call_cross_entropy_loss = trace_call  # noqa: SLF001 - as above


CROSS_ENTROPY_OPTIONS = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
"""Arguments of ``nn.CrossEntropyLoss``, in order."""


class CompiledMode(TorchFunctionMode):
    """Function mode inside a graph of ``torch.compile``: functions that draw become operators of the graph.

    Means over class indices, as models compute that return their own loss, leave the graph together with the weights of
    their targets. The backwards of large linear layers write the gradients of their weights.

    Args:
        draws: of :func:`write_draws`, an input of the graph; None for a forward that does not draw from here.
        handle: of :class:`CompiledSinks`, likewise; None to return all gradients from the graph.
        is_whole: whether the samples are all of a batch.

    Attributes:
        means: over class indices, each with its weight and its number of targets, for
            :meth:`ReductionRecorder.add_found`.
    """

    def __init__(self, draws: Tensor | None = None, handle: Tensor | None = None, *, is_whole: bool = False) -> None:
        super().__init__()
        trace_loss_modules()
        self.draws, self.operators = draws, draw_operators()
        self.handle, self.linear = handle, linear_operators().linear
        self.number = 0  # of draws
        self.num_linears = 0  # whose weight gradients are written
        self.is_whole = is_whole
        self.means: list[tuple[Tensor, Tensor, int]] = []
        self.is_in_checkpoint = self.has_hidden_mean = False

    def __call__(self, path: str) -> None:
        """Do nothing: seeds are not part of a graph."""
        del path

    def __torch_function__(
        self,
        func: TorchFunction,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Call the function or its replacement."""
        options = kwargs or {}
        index_loss = PARSERS[func](func, *args, **options) if func in PARSERS else None
        if index_loss is not None:
            return self.compute_mean(index_loss, func, args, options)
        if func in CASTS and self.means:
            return self.cast(func, args, options)
        if func in COMPOSITES:
            return self.call(COMPOSITES[func], *args, **options)
        if func is checkpoint:
            return self.checkpoint(*args, **options)
        if func in LINEAR_FNS and self.handle is not None and not options and is_large_linear(args):
            self.num_linears += 1
            bias = args[2] if len(args) > 2 else None
            return self.linear(args[0], args[1], bias, self.handle, self.num_linears)
        if func is Tensor.unflatten:  # which Dynamo cannot trace as a function
            return args[0].unflatten(*args[1:], **options)
        if self.draws is None or func not in IMPLEMENTATIONS or options.get("generator") is not None:
            return func(*args, **options)
        result = IMPLEMENTATIONS[func](
            self, *args, **{key: value for key, value in options.items() if key != "generator"}
        )
        return func(*args, **options) if result is NotImplemented else result

    def call(self, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any function
        """Call a function that draws itself, from :meth:`__torch_function__`, inside of which the mode is off."""
        with self:
            return body(*args, **kwargs)

    def compute_mean(
        self, index_loss: IndexLoss, func: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:  # noqa: ANN401 - as above
        """Compute a mean over class indices, and record it unless it is in a checkpoint, which gives out its result."""
        if self.is_in_checkpoint:
            self.has_hidden_mean = True
            return func(*args, **kwargs)
        mean, weight = index_loss.reduce(is_whole=self.is_whole)
        self.means.append((mean, weight, index_loss.target.numel()))
        return mean

    def checkpoint(self, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any function
        """Call ``torch.utils.checkpoint.checkpoint``."""
        was_in_checkpoint, self.is_in_checkpoint = self.is_in_checkpoint, True
        result = checkpoint(partial(self.call, body), *args, **kwargs)
        self.is_in_checkpoint = was_in_checkpoint
        return result

    def cast(self, func: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as above
        """Cast a tensor, and note the result if it is the cast of a mean."""
        result = func(*args, **kwargs)
        for mean, weight, num_targets in tuple(self.means):
            if mean is args[0] and result is not mean:
                self.means.append((result, weight, num_targets))
        return result

    def next_number(self) -> int:
        """Count a draw; return its number."""
        self.number += 1
        return self.number - 1

    def select(self, shape: Sequence[int], p: float, value: float, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor whose elements are 0 with probability ``p``, else ``value``."""
        number = self.next_number()
        result: Tensor = self.operators.select(self.draws, number, list(shape), p, value, dtype, like.device)
        return result

    def words(
        self, shape: Sequence[int], device: torch.device, like: Tensor | None = None, *, per_entry: int = 0
    ) -> Tensor:
        """Return whole numbers, uniform in ``[0, 2**32)``."""
        del like
        result: Tensor = self.operators.words(self.draws, self.next_number(), list(shape), device, per_entry)
        return result

    def require_complete(self) -> None:
        """Check that a graph that was called has all draws, and no mean whose weight has to be known.

        Raises:
            DataError: it has fewer, or such a mean.
        """
        if self.has_hidden_mean and not self.is_whole:
            raise DataError(
                "the model computes a mean over class indices (F.cross_entropy, F.nll_loss) inside of torch's "
                "checkpoint in a graph of compile=, which does not say how many targets count; compute it after the "
                "checkpoint, or in loss=, or drop compile="
            )
        if self.draws is not None and self.number != len(self.draws):
            raise DataError(
                f"a compiled forward has {self.number} draws of random numbers, but {len(self.draws)} on the first "
                "batch; draw in every forward what that of the first batch drew, and with torch.rand(x.shape) instead "
                "of rand_like, randn_like, randint_like and torch.normal, which torch.compile does not let be "
                "replaced, or drop compile="
            )
