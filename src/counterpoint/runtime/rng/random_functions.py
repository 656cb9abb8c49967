"""Torch's functions that draw random numbers, computed from numbers that another source provides.

In a model run eagerly these are the functions of ``torch`` and ``torch.nn.functional``, in a traced one operators of
``torch.ops.aten``; both have one implementation here, which calls :class:`RandomSource` equally often in either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.runtime.kernels.function_mode import FunctionReplacement, InterceptFunctions, TorchFunction


class RandomSource(Protocol):
    """Where random numbers come from. Each call of a method is one draw."""

    def select(self, shape: Sequence[int], p: float, value: float, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor whose elements are 0 with probability ``p``, else ``value``.

        Args:
            shape: of the result.
            p: between 0 and 1.
            value: not 0.
            like: what the result is for; it has the same device, and the same sizes of dims.
            dtype: of the result.
        """
        ...

    def words(
        self, shape: Sequence[int], device: torch.device, like: Tensor | None = None, *, per_entry: int = 0
    ) -> Tensor:
        """Return whole numbers, uniform in ``[0, 2**32)``, as int64.

        Args:
            shape: of what they are for.
            device: of the result.
            like: what they are for.
            per_entry: how many numbers each entry gets, along one more dim; 0 for one number without such a dim.
        """
        ...


def random_functions(source: RandomSource) -> Mapping[TorchFunction, FunctionReplacement]:
    """Return the functions that draw random numbers, each with a replacement that draws them from a source."""
    replacements: dict[TorchFunction, FunctionReplacement] = {}

    def call(func: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any result
        """Call the function's implementation, or the function where it draws nothing or by its own generator."""
        if torch.compiler.is_compiling() or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        options = {name: value for name, value in kwargs.items() if name != "generator"}
        result = IMPLEMENTATIONS[func](source, *args, **options)
        return func(*args, **kwargs) if result is NotImplemented else result

    def call_inside(func: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as above
        """Call a function that calls the others; function modes are off in a function that they have intercepted."""
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func in COMPOSITES:
            with InterceptFunctions(replacements):
                return COMPOSITES[func](*args, **kwargs)
        return func(*(partial(_call_body, arg, replacements) if callable(arg) else arg for arg in args), **kwargs)

    replacements |= dict.fromkeys(IMPLEMENTATIONS, call)
    replacements |= dict.fromkeys((*COMPOSITES, *_BODY_OPERATORS), call_inside)
    return replacements


def _call_body(
    body: Callable[..., Any], replacements: Mapping[TorchFunction, FunctionReplacement], *args: object
) -> object:
    with InterceptFunctions(replacements):
        return body(*args)


def dropout(
    source: RandomSource,
    input: Tensor,  # noqa: A002 - torch's signature
    p: float = 0.5,
    training: bool = True,  # noqa: FBT001, FBT002 - as above
    inplace: bool = False,  # noqa: FBT001, FBT002 - as above
    *,
    train: bool = True,
) -> Any:  # noqa: ANN401 - or NotImplemented
    """Set elements to 0 with probability ``p``, and scale the others."""
    if not (training and train and 0 < p < 1 and input.is_floating_point()):
        return NotImplemented
    noise = source.select(input.shape, p, 1 / (1 - p), input, input.dtype)
    return input.mul_(noise) if inplace else input * noise


def feature_dropout(  # noqa: PLR0913 - torch's signature
    source: RandomSource,
    input: Tensor,  # noqa: A002 - torch's signature
    p: float = 0.5,
    training: bool = True,  # noqa: FBT001, FBT002 - as above
    inplace: bool = False,  # noqa: FBT001, FBT002 - as above
    *,
    train: bool = True,
    sample_dims: int | None = None,
) -> Any:  # noqa: ANN401 - or NotImplemented
    """Set whole channels to 0; with ``sample_dims``, an input of so many dims is one sample."""
    if not (training and train and 0 < p < 1 and input.is_floating_point() and input.dim() > 1):
        return NotImplemented
    shape = _channel_shape(input, 1 if input.dim() == sample_dims else 2)
    noise = source.select(shape, p, 1 / (1 - p), input, input.dtype)
    return input.mul_(noise) if inplace else input * noise


def _channel_shape(input: Tensor, num_dims: int) -> tuple[int, ...]:  # noqa: A002 - torch's name
    return (*input.shape[:num_dims], *(1,) * (input.dim() - num_dims))


def alpha_dropout(  # noqa: PLR0913 - torch's signature
    source: RandomSource,
    input: Tensor,  # noqa: A002 - torch's signature
    p: float = 0.5,
    training: bool = False,  # noqa: FBT001, FBT002 - as above
    inplace: bool = False,  # noqa: FBT001, FBT002 - as above
    *,
    train: bool = False,
    is_feature: bool = False,
) -> Any:  # noqa: ANN401 - or NotImplemented
    """Set elements or channels to the negative saturation of SELU, and restore mean and variance."""
    if not ((training or train) and 0 < p < 1 and input.is_floating_point()):
        return NotImplemented
    saturation = 1.7580993408473766
    scale = ((saturation**2 * p + 1) * (1 - p)) ** -0.5
    shape = _channel_shape(input, 2) if is_feature else input.shape
    kept = source.select(shape, p, 1.0, input, input.dtype)
    shift = (kept - 1 + p) * (saturation * scale)
    return input.mul_(kept * scale).add_(shift) if inplace else input * (kept * scale) + shift


def attention(  # noqa: PLR0913 - torch's signature
    source: RandomSource,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:  # noqa: ANN401 - or NotImplemented
    """Attend with dropout of the attention weights."""
    if not 0 < dropout_p < 1:
        return NotImplemented
    if enable_gqa:
        key, value = (part.repeat_interleave(query.shape[-3] // part.shape[-3], dim=-3) for part in (key, value))
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = (query * root) @ (key * root).transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    # a query that may attend to nothing has no weights
    weights = scores.softmax(-1) if attn_mask is None or is_causal else _aten._safe_softmax.default(scores, -1)  # noqa: SLF001
    return (weights * source.select(weights.shape, dropout_p, 1 / (1 - dropout_p), query, weights.dtype)) @ value


def recurrent_layers(
    func: TorchFunction,
    source: RandomSource,
    input: Tensor,  # noqa: A002 - torch's name
    state: Any,  # noqa: ANN401 - a tensor or two
    weights: Any,  # noqa: ANN401 - of all layers
    has_biases: Any,  # noqa: ANN401 - not a bool for packed sequences
    *args: Any,  # noqa: ANN401 - layers, dropout, training, both directions, batch first
) -> Any:  # noqa: ANN401 - or NotImplemented
    """Run the layers of an LSTM, GRU or RNN one by one, with dropout between them."""
    if not isinstance(has_biases, bool) or len(args) != 5:
        return NotImplemented
    num_layers, p, training, is_bidirectional, batch_first = args
    if not training or not 0 < p < 1 or num_layers == 1:
        return NotImplemented
    num_directions, num_weights = 2 if is_bidirectional else 1, len(weights) // num_layers
    states = (state,) if isinstance(state, Tensor) else tuple(state)
    finals = []
    for layer in range(num_layers):
        if layer:
            input = input * source.select(input.shape, p, 1 / (1 - p), input, input.dtype)  # noqa: A001 - as above
        own = [part[layer * num_directions : (layer + 1) * num_directions].contiguous() for part in states]
        own_weights = weights[layer * num_weights : (layer + 1) * num_weights]
        own_state = own[0] if isinstance(state, Tensor) else own
        input, *final = func(  # noqa: A001 - as above
            input, own_state, own_weights, has_biases, 1, 0.0, training, is_bidirectional, batch_first
        )
        finals.append(final)
    return (input, *(torch.cat(parts) for parts in zip(*finals, strict=True)))


def rrelu(
    source: RandomSource,
    input: Tensor,  # noqa: A002 - torch's signature
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,  # noqa: FBT001, FBT002 - as above
    inplace: bool = False,  # noqa: FBT001, FBT002 - as above
) -> Any:  # noqa: ANN401 - or NotImplemented
    """Scale what is not positive by random slopes."""
    if not training:
        return NotImplemented
    slopes = lower + (upper - lower) * uniform(source, input.shape, input.dtype, input.device, input)
    output = torch.where(input > 0, input, input * slopes)
    return input.copy_(output) if inplace else output


PRECISIONS = {torch.float64: 32, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""How many bits of a number a uniform value has, so that it is rounded to no 1."""


def uniform(
    source: RandomSource, shape: Sequence[int], dtype: torch.dtype, device: torch.device, like: Tensor | None = None
) -> Tensor:
    """Return values uniform in ``[0, 1)``."""
    bits = PRECISIONS[dtype]
    return (source.words(shape, device, like) >> (32 - bits)).to(dtype) * 2.0**-bits


def normal(source: RandomSource, shape: Sequence[int], device: torch.device, like: Tensor | None = None) -> Tensor:
    """Return standard normal values in float64, by the transform of Box and Muller."""
    radius, angle = source.words(shape, device, like, per_entry=2).double().unbind(-1)
    return (-2 * ((radius + 1) * 2.0**-32).log()).sqrt() * (angle * (2 * math.pi * 2.0**-32)).cos()


def rand(source: RandomSource, *size: Any, **options: Any) -> Any:  # noqa: ANN401 - torch's signature
    """Return a new tensor of uniform values."""
    return _fill_uniform(source, torch.empty(*size, **options))


def rand_like(source: RandomSource, input: Tensor, **options: Any) -> Any:  # noqa: A002, ANN401 - torch's signature
    """Return uniform values in the shape of another tensor."""
    return _fill_uniform(source, torch.empty_like(input, **options), input)


def randn(source: RandomSource, *size: Any, **options: Any) -> Any:  # noqa: ANN401 - torch's signature
    """Return a new tensor of standard normal values."""
    return _fill_normal(source, torch.empty(*size, **options))


def randn_like(source: RandomSource, input: Tensor, **options: Any) -> Any:  # noqa: A002, ANN401 - torch's signature
    """Return standard normal values in the shape of another tensor."""
    return _fill_normal(source, torch.empty_like(input, **options), input)


def uniform_(source: RandomSource, input: Tensor, *args: float, **kwargs: float) -> Any:  # noqa: A002, ANN401 - as above
    """Fill a tensor with uniform values."""
    low, high = (kwargs.get(name, default) for name, default in (("from", 0.0), ("to", 1.0)))
    return _fill_uniform(source, input, input, *(*args, *(low, high)[len(args) :]))


def normal_(source: RandomSource, input: Tensor, mean: float = 0.0, std: float = 1.0) -> Any:  # noqa: A002, ANN401 - as above
    """Fill a tensor with normal values."""
    return _fill_normal(source, input, input, mean, std)


def normal_of(source: RandomSource, mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> Any:  # noqa: ANN401 - as above
    """Return normal values with means and standard deviations that may be tensors."""
    given = [value for value in (mean, std) if isinstance(value, Tensor)]
    if not given:
        return _fill_normal(source, torch.empty(size, **options), None, mean, std)
    shape = torch.broadcast_shapes(*(value.shape for value in given))  # type: ignore[no-untyped-call]
    out = options.get("out", torch.empty(shape, dtype=given[0].dtype, device=given[0].device))
    return _fill_normal(source, out, given[0] if given[0].shape == shape else None, mean, std)


def exponential_(source: RandomSource, input: Tensor, lambd: float = 1.0) -> Any:  # noqa: A002, ANN401 - as above
    """Fill a tensor with exponential values."""
    if not input.is_floating_point() or not lambd > 0:
        return NotImplemented
    words = source.words(input.shape, input.device, input)
    return _copy(input, -((words.double() + 1) * 2.0**-32).log() / lambd)


def bernoulli(source: RandomSource, input: Tensor, p: Any = None, **options: Any) -> Any:  # noqa: A002, ANN401 - as above
    """Return 1 with the given probabilities, else 0."""
    if not input.is_floating_point():
        return NotImplemented
    return bernoulli_(source, options.get("out", torch.empty_like(input)), input if p is None else p)


def bernoulli_(source: RandomSource, input: Tensor, p: Any = 0.5) -> Any:  # noqa: A002, ANN401 - as above
    """Fill a tensor with 1 with the given probabilities, else 0."""
    if not _lies_within(p, 0.0, 1.0):
        return NotImplemented
    return _copy(input, source.words(input.shape, input.device, input) < p * 2.0**32)


def randint(
    source: RandomSource,
    *args: Any,  # noqa: ANN401 - torch's signature
    low: int = 0,
    high: int | None = None,
    size: Any = None,  # noqa: ANN401 - as above
    **options: Any,  # noqa: ANN401 - as above
) -> Any:  # noqa: ANN401 - or NotImplemented
    """Return a new tensor of whole numbers from ``low`` to ``high - 1``."""
    rest = list(args)
    size = rest.pop() if size is None else size
    high = rest.pop() if high is None else high
    options["dtype"] = options.get("dtype") or torch.int64
    return _fill_integers(source, partial(torch.empty, size, **options), None, rest[0] if rest else low, high)


def randint_like(
    source: RandomSource,
    input: Tensor,  # noqa: A002 - torch's signature
    *args: int,
    low: int = 0,
    high: int | None = None,
    **options: Any,  # noqa: ANN401 - as above
) -> Any:  # noqa: ANN401 - or NotImplemented
    """Return whole numbers from ``low`` to ``high - 1`` in the shape of another tensor."""
    rest = list(args)
    high = rest.pop() if high is None else high
    return _fill_integers(source, partial(torch.empty_like, input, **options), input, rest[0] if rest else low, high)


def _fill_integers(source: RandomSource, make: Callable[[], Tensor], like: Tensor | None, low: int, high: int) -> Any:  # noqa: ANN401 - or NotImplemented
    if not 0 < high - low < 2**31:
        return NotImplemented
    out = make()
    return _copy(out, low + (source.words(out.shape, out.device, like) * (high - low) >> 32))


def _fill_uniform(
    source: RandomSource, out: Tensor, like: Tensor | None = None, low: float = 0.0, high: float = 1.0
) -> Any:  # noqa: ANN401 - or NotImplemented
    if out.dtype not in PRECISIONS or not low <= high:
        return NotImplemented
    return _copy(out, low + (high - low) * uniform(source, out.shape, out.dtype, out.device, like))


def _fill_normal(
    source: RandomSource,
    out: Tensor,
    like: Tensor | None = None,
    mean: Any = 0.0,  # noqa: ANN401 - a number or a tensor
    std: Any = 1.0,  # noqa: ANN401 - as above
) -> Any:  # noqa: ANN401 - or NotImplemented
    if not out.is_floating_point() or not _lies_within(std, 0.0, math.inf):
        return NotImplemented
    return _copy(out, mean + std * normal(source, out.shape, out.device, like))


def _lies_within(value: Any, low: float, high: float) -> bool:  # noqa: ANN401 - a number or a tensor
    """Tell whether a parameter is valid; on a device, or in a graph, a tensor is not read."""
    if isinstance(value, Tensor):
        return (
            torch.compiler.is_compiling()
            or value.device.type != "cpu"
            or bool(((value >= low) & (value <= high)).all())
        )
    return low <= float(value) <= high


def _copy(out: Tensor, values: Tensor) -> Tensor:
    with torch.no_grad():
        return out.copy_(values)


def _without_torch_function(func: Any) -> TorchFunction:  # noqa: ANN401 - a function of torch.nn.functional
    """Return a copy of a function that does not offer itself to function modes, only what it calls."""
    unchecked = {
        name: lambda *_: False
        for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    }
    copy = FunctionType(func.__code__, {**func.__globals__, **unchecked}, func.__name__, func.__defaults__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_aten = torch.ops.aten
COMPOSITES: Mapping[TorchFunction, TorchFunction] = {
    func: _without_torch_function(func) for func in (F.multi_head_attention_forward, F.gumbel_softmax)
}
"""Functions of ``torch.nn.functional`` that call others that draw, as they are run inside a function mode."""

_BODY_OPERATORS: tuple[Any, ...] = (
    torch.ops.higher_order.wrap_with_set_grad_enabled,
    torch.ops.higher_order.wrap_with_autocast,
)
"""Operators of a trace that call a part of it."""

IMPLEMENTATIONS: Mapping[TorchFunction, Callable[..., Any]] = {
    **dict.fromkeys((F.dropout, torch.dropout, _aten.dropout.default), dropout),
    **dict.fromkeys((torch.dropout_, _aten.dropout_.default), partial(dropout, inplace=True)),
    F.dropout1d: partial(feature_dropout, sample_dims=2),
    F.dropout3d: partial(feature_dropout, sample_dims=4),
    **dict.fromkeys((F.dropout2d, torch.feature_dropout, _aten.feature_dropout.default), feature_dropout),
    **dict.fromkeys((torch.feature_dropout_, _aten.feature_dropout_.default), partial(feature_dropout, inplace=True)),
    **dict.fromkeys((F.alpha_dropout, torch.alpha_dropout, _aten.alpha_dropout.default), alpha_dropout),
    **dict.fromkeys((torch.alpha_dropout_, _aten.alpha_dropout_.default), partial(alpha_dropout, inplace=True)),
    **dict.fromkeys(
        (F.feature_alpha_dropout, torch.feature_alpha_dropout, _aten.feature_alpha_dropout.default),
        partial(alpha_dropout, is_feature=True),
    ),
    **dict.fromkeys(
        (torch.feature_alpha_dropout_, _aten.feature_alpha_dropout_.default),
        partial(alpha_dropout, is_feature=True, inplace=True),
    ),
    **dict.fromkeys((F.scaled_dot_product_attention, _aten.scaled_dot_product_attention.default), attention),
    **dict.fromkeys((torch.lstm, _aten.lstm.input), partial(recurrent_layers, torch.lstm)),
    **dict.fromkeys((torch.gru, _aten.gru.input), partial(recurrent_layers, torch.gru)),
    **dict.fromkeys((torch.rnn_tanh, _aten.rnn_tanh.input), partial(recurrent_layers, torch.rnn_tanh)),
    **dict.fromkeys((torch.rnn_relu, _aten.rnn_relu.input), partial(recurrent_layers, torch.rnn_relu)),
    **dict.fromkeys((F.rrelu, torch.rrelu, _aten.rrelu.default), rrelu),
    **dict.fromkeys((torch.rand, _aten.rand.default), rand),
    **dict.fromkeys((torch.rand_like, _aten.rand_like.default), rand_like),
    **dict.fromkeys((torch.randn, _aten.randn.default), randn),
    **dict.fromkeys((torch.randn_like, _aten.randn_like.default), randn_like),
    **dict.fromkeys((torch.randint, _aten.randint.default, _aten.randint.low), randint),
    **dict.fromkeys((torch.randint_like, _aten.randint_like.default, _aten.randint_like.low_dtype), randint_like),
    **dict.fromkeys((Tensor.uniform_, _aten.uniform_.default), uniform_),
    **dict.fromkeys((Tensor.normal_, _aten.normal_.default), normal_),
    **dict.fromkeys(
        (
            torch.normal, _aten.normal.Tensor_Tensor, _aten.normal.Tensor_float, _aten.normal.float_Tensor,
            _aten.normal.float_float,
        ),
        normal_of,
    ),
    **dict.fromkeys((Tensor.exponential_, _aten.exponential_.default), exponential_),
    **dict.fromkeys((torch.bernoulli, Tensor.bernoulli, _aten.bernoulli.default, _aten.bernoulli.p), bernoulli),
    **dict.fromkeys((Tensor.bernoulli_, _aten.bernoulli_.float, _aten.bernoulli_.Tensor), bernoulli_),
}  # fmt: skip
"""Each function that draws; an implementation returns NotImplemented where the function itself is to be called."""
