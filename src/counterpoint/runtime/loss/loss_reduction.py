"""How the losses of microbatches add up to that of the batch: means over samples, means over tokens or weights, sums.

Means over samples are weighted by numbers of samples, which all ranks know beforehand. The mean over the
tokens of a batch is not a mean of its microbatches' means, weighted by what is known: they have different numbers of
tokens. So each microbatch is differentiated as its total, divided by what all ranks know, and the step's commit, which
adds up the totals and weights of all ranks, scales the gradients before the update::

    microbatch m    mean_m = total_m / weight_m, and the backward of total_m / (samples of the batch * unit)
    commit          loss = sum(total_m) / sum(weight_m)
    update          gradient * (samples of the batch * unit) / sum(weight_m)

The unit is a power of two near the weight of a sample in the step before, so that the scale is near 1, or exactly 1.
A sum is differentiated as a mean over samples, and its gradients are multiplied with the number of samples.
Whether a loss is of the kind that the user has declared, :mod:`counterpoint.runtime.loss.loss_check` finds out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.errors import DataError
from counterpoint.fabric.reductions import LOW_PRECISION
from counterpoint.runtime.kernels.cross_entropy import fused_cross_entropy
from counterpoint.runtime.kernels.function_mode import FunctionReplacement, InterceptFunctions, TorchFunction

MEAN, SUM = 1, 2
"""Reductions, as torch's operations call them."""


class WeightedMean(NamedTuple):
    """A loss that is a mean over tokens, or over anything of which samples have different amounts.

    Returned from a loss function, it makes the loss of a batch ``sum(total) / sum(weight)`` over all its microbatches
    and ranks, under every plan. Torch's own means over class indices with ``ignore_index`` or class weights need it
    only if the loss is computed from them, not if it is that mean itself.

    Args:
        total: the sum of what is averaged, a 0-dim tensor.
        weight: what it is divided by, such as the number of tokens; a number or a 0-dim tensor, which is not
            differentiated.

    Example:
        >>> import torch, counterpoint as cp
        >>> def masked_mse(output, targets):
        ...     target, mask = targets
        ...     return cp.WeightedMean(((output - target) ** 2 * mask).sum(), mask.sum())
        >>> masked_mse(torch.ones(2, 2), (torch.zeros(2, 2), torch.eye(2)))
        WeightedMean(total=tensor(2.), weight=tensor(2.))
    """

    total: Tensor
    weight: Tensor | float

    def __add__(self, other: object) -> NoReturn:
        """Refuse to add another loss, which may have another weight over the whole batch.

        Raises:
            DataError: always.
        """
        raise DataError(
            "a cp.WeightedMean was added to another loss, but over the whole batch each is divided by its own weight; "
            "return them as a dict, {'first': ..., 'second': ...}, whose entries are added up"
        )

    def __radd__(self, other: object) -> NoReturn:
        """Refuse to be added, as :meth:`__add__` does."""
        self.__add__(other)


LossFunction: TypeAlias = Callable[[Any, Any], Tensor | WeightedMean | Mapping[str, Tensor | WeightedMean]]
"""From the model's output and the targets to the loss, or to parts that are added up."""


class MeanLoss(NamedTuple):
    """The loss of some samples.

    Args:
        mean: over samples, tokens or weights; or the sum, if the loss is one.
        weight: of a weighted mean; None for a mean over samples.
        parts: of a loss that is a dict, the mean and the weight of each, detached.
    """

    mean: Tensor
    weight: Tensor | float | None
    parts: Mapping[str, tuple[Tensor, Tensor | float | None]] = MappingProxyType({})


class PartTotal(NamedTuple):
    """A part of a loss: the sum of its means times their weights, and the sum of the weights.

    Example:
        >>> PartTotal(6.0, 4.0).add(PartTotal(2.0, 1.0)).mean
        1.6
    """

    total: float
    weight: float

    def add(self, other: PartTotal) -> PartTotal:
        """Return the part over both."""
        return PartTotal(self.total + other.total, self.weight + other.weight)

    @property
    def mean(self) -> float:
        """The mean; nan without weight."""
        return self.total / self.weight if self.weight else math.nan


class MeanReduction(NamedTuple):
    """A mean over class indices that torch has computed.

    Args:
        mean: the result; if no target counts 0, or torch's nan for all samples of a batch.
        weight: what the sum was divided by; on another device than the CPU a tensor, which is not waited for.
        num_targets: the targets, also those that do not count.
        zero: 0 if no target counts; else None.
    """

    mean: Tensor
    weight: Tensor | float
    num_targets: int
    zero: Tensor | None = None


class IndexLoss(NamedTuple):
    """Arguments of a mean over class indices.

    Args:
        target: class indices.
        class_weights: of each class; None for 1.
        ignore_index: of the targets that do not count.
        compute_sum: computes the sum instead of the mean, in a given dtype or that of torch.
    """

    target: Tensor
    class_weights: Tensor | None
    ignore_index: int
    compute_sum: Callable[..., Tensor]

    def add_weights(self) -> Tensor:
        """Return the sum of the weights of the targets that count, as int64 or float64."""
        is_counted = self.target != self.ignore_index
        if self.class_weights is None:
            return torch.count_nonzero(is_counted)
        indices = self.target.where(is_counted, 0)
        return (self.class_weights.detach()[indices].double() * is_counted).sum()

    def total_weight(self) -> Tensor | float:
        """Return the sum of the weights of the targets that count; a number, if that needs no wait."""
        return read_weight(self.add_weights())

    def reduce(self, *, is_whole: bool) -> tuple[Tensor, Tensor]:
        """Return the mean and :meth:`add_weights` inside of a graph, where no value can be looked at.

        Args:
            is_whole: whether these are all samples of a batch, so that the mean is torch's nan if no target counts, and
                not 0.
        """
        total, weight = self.compute_sum(), self.add_weights()
        dtype = total.dtype
        if dtype in LOW_PRECISION:  # in which the sum may be too large, and the weight, too
            total = self.compute_sum(dtype=torch.float32)
        divisor = weight if is_whole else weight.clamp(min=torch.finfo(torch.float32).tiny)
        return (total / divisor.to(total.dtype)).to(dtype), weight


def read_weight(weight: Tensor) -> Tensor | float:
    """Return the weight of a mean as a number; as a tensor from a device, which is not waited for."""
    return float(weight) if weight.device.type == "cpu" else weight.double()


def parse_function(  # noqa: PLR0913 - torch's signature
    func: TorchFunction,
    input: Tensor,  # noqa: A002 - torch's signature
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,  # noqa: FBT001 - torch's signature
    ignore_index: int = -100,
    reduce: bool | None = None,  # noqa: FBT001 - torch's signature
    reduction: str = "mean",
    **smoothing: Any,  # noqa: ANN401 - of the function
) -> IndexLoss | None:
    """Parse a call of ``F.cross_entropy`` or ``F.nll_loss``; return None if it is not a mean over class indices."""
    if reduction != "mean" or size_average is False or reduce is False or target.is_floating_point():
        return None
    compute_sum = partial(
        compute_in, func, input, target, weight, ignore_index=ignore_index, reduction="sum", **smoothing
    )
    return IndexLoss(target, weight, ignore_index, compute_sum)


def parse_operation(
    func: TorchFunction,
    input: Tensor,  # noqa: A002 - torch's signature
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    *smoothing: float,
    **more: Any,  # noqa: ANN401 - of the operation
) -> IndexLoss | None:
    """Parse a call of the operation that a trace has for them; return None if it is not a mean over class indices."""
    if reduction != MEAN or target.is_floating_point():
        return None
    compute_sum = partial(compute_in, func, input, target, weight, SUM, ignore_index, *smoothing, **more)
    return IndexLoss(target, weight, ignore_index, compute_sum)


def compute_in(
    func: TorchFunction,
    input: Tensor,  # noqa: A002 - torch's signature
    target: Tensor,
    weight: Tensor | None,
    *args: Any,  # noqa: ANN401 - of the function
    dtype: torch.dtype | None = None,
    **options: Any,  # noqa: ANN401 - of the function
) -> Tensor:
    """Call a loss function on logits and class weights in another dtype; None for theirs."""
    if dtype is not None:
        input, weight = input.to(dtype), None if weight is None else weight.to(dtype)  # noqa: A001 - torch's name
    result: Tensor = func(input, target, weight, *args, **options)
    return result


PARSERS: Mapping[TorchFunction, Callable[..., IndexLoss | None]] = {
    F.cross_entropy: parse_function,
    F.nll_loss: parse_function,
    torch.ops.aten.cross_entropy_loss.default: parse_operation,
    torch.ops.aten.nll_loss.default: parse_operation,
    torch.ops.aten.nll_loss_nd.default: parse_operation,
    torch.ops.aten.nll_loss2d.default: parse_operation,
}
"""Torch's losses that divide by the weights of class indices, and how to parse their arguments."""


CASTS: frozenset[TorchFunction] = frozenset(
    {Tensor.to, Tensor.float, Tensor.double, torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default}  # noqa: SLF001 - as traces have it
)
"""What gives a mean in another dtype, such as the fp32 output of a model that computes in bf16."""


class ReductionRecorder:
    """Records torch's means over class indices while the last segment and the loss run on a microbatch.

    Args:
        is_whole: whether these are all samples of a batch, so that what is computed from a mean without targets is nan,
            as in a loop without microbatches.
    """

    def __init__(self, *, is_whole: bool = False) -> None:
        self.is_whole = is_whole
        self.found: list[MeanReduction] = []

    @property
    def replacements(self) -> Mapping[TorchFunction, FunctionReplacement]:
        """The functions that are recorded, for a function mode."""
        return {**dict.fromkeys(PARSERS, self.call), **dict.fromkeys(CASTS, self.cast)}

    def call(self, func: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Compute a loss, and record it if it is a mean over class indices."""
        index_loss = None if torch.compiler.is_compiling() else PARSERS[func](func, *args, **kwargs)
        if index_loss is None:
            return fused_cross_entropy(func, args, kwargs)
        weight = index_loss.total_weight()
        if isinstance(weight, Tensor):
            mean = index_loss.compute_sum() / weight.clamp(min=torch.finfo(torch.float32).tiny)
        else:
            zero = None if weight else index_loss.compute_sum()
            mean = fused_cross_entropy(func, args, kwargs) if zero is None or self.is_whole else zero
            self.found.append(MeanReduction(mean, weight, index_loss.target.numel(), zero))
            return mean
        self.found.append(MeanReduction(mean, weight, index_loss.target.numel()))
        return mean

    def cast(self, func: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Cast a tensor, and record the result if it is the cast of a recorded mean."""
        result = func(*args, **kwargs)
        found = next((reduction for reduction in self.found if reduction.mean is args[0]), None)
        if found is not None and result is not args[0]:
            zero = None if found.zero is None else func(found.zero, *args[1:], **kwargs)
            self.found.append(found._replace(mean=result, zero=zero))
        return result

    def add_found(self, means: Sequence[tuple[Tensor, Tensor, int]]) -> None:
        """Record means that a graph has computed: each with its weight and its number of targets."""
        self.found.extend(MeanReduction(mean, read_weight(weight), count) for mean, weight, count in means)

    def find_mean(self, loss: Tensor) -> tuple[Tensor, Tensor | float | None]:
        """Return a loss, which is 0 if it is one of these means and no target counts, and its weight if it is one."""
        found = next((reduction for reduction in self.found if reduction.mean is loss), None)
        if found is None:
            return loss, None
        return loss if found.zero is None else found.zero, found.weight

    def find_weight(self, loss: Tensor) -> Tensor | float | None:
        """Return the weight of a loss that is one of these means; None for another loss."""
        return self.find_mean(loss)[1]

    def is_sample_mean(self, loss: Tensor) -> bool:
        """Return whether a loss is one of these means, and all its targets count equally."""
        return any(found.mean is loss and float(found.weight) == found.num_targets for found in self.found)

    def require_sample_means(self, what: str) -> None:
        """Check that the means over class indices are means over samples, so that a loss computed from them is one.

        Args:
            what: the samples, for the error.

        Raises:
            DataError: some target did not count, or had another weight than 1.
        """
        for reduction in self.found:
            if reduction.mean.requires_grad and float(reduction.weight) != reduction.num_targets:
                raise DataError(
                    f"the loss of {what} is computed from a mean whose {reduction.num_targets} targets weigh "
                    f"{float(reduction.weight):g} together, by ignore_index or class weights, so it is not a mean over "
                    "samples, and the losses of parts do not add up to that of the batch; return that mean itself, or "
                    "cp.WeightedMean(total, weight) with the sum and what it is divided by, pass "
                    "loss_reduction='batch', or train with one microbatch on one rank"
                )


PLAIN_LOSSES: frozenset[Callable[..., Tensor]] = frozenset({
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.gaussian_nll_loss, F.huber_loss, F.kl_div, F.l1_loss,
    F.mse_loss, F.poisson_nll_loss, F.smooth_l1_loss, F.soft_margin_loss,
})  # fmt: skip
"""Torch's losses of which a function mode sees the call alone, and replaces nothing: they need none."""


def compute_mean_loss(  # noqa: PLR0913 - what a loss is computed from, and how it adds up
    loss_function: LossFunction,
    output: Any,  # noqa: ANN401 - of the model
    targets: Any,  # noqa: ANN401 - whatever the loss takes
    what: str,
    recorder: ReductionRecorder | None = None,
    *,
    is_whole: bool = False,
    is_sum: bool = False,
    random_functions: Mapping[TorchFunction, FunctionReplacement] = MappingProxyType({}),
) -> MeanLoss:
    """Return the mean loss of some samples, or their sum.

    Args:
        loss_function: the user's.
        output: of the model.
        targets: of the samples.
        what: the samples, for errors.
        recorder: has the means over class indices that the model itself has computed.
        is_whole: whether these are all samples of a batch, so that any scalar is its mean.
        is_sum: whether the loss is a sum over samples.
        random_functions: that replace torch's in the loss.

    Raises:
        DataError: the loss is neither a scalar nor a weighted mean, or cannot be added to those of other samples.
    """
    recorder = ReductionRecorder(is_whole=is_whole) if recorder is None else recorder
    is_plain = type(loss_function) is FunctionType and loss_function in PLAIN_LOSSES
    replacements = {} if is_plain else {**random_functions, **recorder.replacements}
    with explain_unreachable_inputs(what), InterceptFunctions(replacements) if replacements else nullcontext():
        loss: Any = loss_function(output, targets)
    if isinstance(loss, Mapping):
        return add_parts(loss, what, recorder, is_whole=is_whole, is_sum=is_sum)
    mean, weight = parse_mean(loss, f"the loss of {what}", recorder, is_sum=is_sum)
    if weight is None and not is_whole and not is_sum:
        recorder.require_sample_means(what)
    return MeanLoss(mean, weight)


@contextmanager
def explain_unreachable_inputs(what: str) -> Iterator[None]:
    """Raise a clear error if a loss differentiates with respect to what its output was not computed from here.

    Args:
        what: the samples, for the error.

    Raises:
        DataError: it does.
    """
    try:
        yield
    except RuntimeError as error:
        if "not have been used in the graph" not in str(error):
            raise
        raise DataError(
            f"the loss of {what} differentiates with respect to a tensor that its output was not computed from: ranks "
            "compute on parts of the inputs, and stages on copies without their graph; compute the gradient in the "
            "model's forward, as in torch.autograd.grad(output.sum(), x, create_graph=True) after x = "
            "x.detach().requires_grad_(), and return it together with the output"
        ) from error


def compute_plain_loss(loss: Tensor | WeightedMean | Mapping[str, Tensor | WeightedMean]) -> Tensor:
    """Return what a loop without microbatches differentiates, given what the loss function returns for a batch.

    Example:
        >>> compute_plain_loss({"a": torch.tensor(1.0), "b": WeightedMean(torch.tensor(6.0), 3)})
        tensor(3.)
    """
    if isinstance(loss, Mapping):
        return cast("Tensor", sum(compute_plain_loss(part) for part in loss.values()))
    return loss.total / loss.weight if isinstance(loss, WeightedMean) else loss


def parse_mean(
    loss: Any,  # noqa: ANN401 - whatever was returned
    what: str,
    recorder: ReductionRecorder,
    *,
    is_sum: bool,
) -> tuple[Tensor, Tensor | float | None]:
    """Return a loss as a mean, and its weight if it is a weighted one; or the sum, and None.

    Args:
        loss: as the loss function returns it.
        what: is named by errors.
        recorder: has the means over class indices.
        is_sum: whether it is a sum over samples.

    Raises:
        DataError: it is neither a scalar nor a weighted mean.
    """
    if isinstance(loss, WeightedMean):
        if is_sum:
            raise DataError(
                f"{what} is a cp.WeightedMean, but loss_reduction='sum' was given; omit loss_reduction, or return the "
                "sum alone"
            )
        return split_weighted_mean(loss, what)
    if not isinstance(loss, Tensor) or loss.dim() > 0:
        actual = f"has the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is a {type(loss).__name__}"
        raise DataError(
            f"{what} {actual}; it must be a 0-dim tensor, the mean over the samples, a cp.WeightedMean, or a dict of "
            "these: keep reduction='mean', and return it without item() or float()"
        )
    return (loss, None) if is_sum else recorder.find_mean(loss)


def add_parts(
    losses: Mapping[str, Any], what: str, recorder: ReductionRecorder, *, is_whole: bool, is_sum: bool
) -> MeanLoss:
    """Return the sum of a dict of losses.

    Over the whole batch each part is divided by its own weight. The parts of a microbatch can be differentiated
    together only if they have the same weight in it, or if all of them are means over samples.

    Args:
        losses: by name.
        what: the samples, for errors.
        recorder: has the means over class indices.
        is_whole: whether these are all samples of a batch, so that any mean is that of the batch.
        is_sum: whether all of them are sums over samples.

    Raises:
        DataError: they are not losses, or have different weights.
    """
    parts = {
        name: parse_mean(loss, f"the part {name!r} of the loss of {what}", recorder, is_sum=is_sum)
        for name, loss in losses.items()
    }
    if not parts:
        raise DataError(f"the loss of {what} is an empty dict; return a dict of losses, or one loss")
    total: Any = sum(mean for mean, _ in parts.values())
    detached = {str(name): (mean.detach(), weight) for name, (mean, weight) in parts.items()}
    weights = [weight for _, weight in parts.values()]
    if None not in weights and len({float(weight) for weight in weights if weight is not None}) == 1:
        return MeanLoss(total, weights[0], detached)
    if is_whole or is_sum:
        is_undefined = any(weight is not None and float(weight) == 0 for weight in weights)  # in a plain loop, too
        return MeanLoss(total * math.nan if is_undefined else total, None, detached)
    if all(weight is None or recorder.is_sample_mean(mean) for mean, weight in parts.values()):
        recorder.require_sample_means(what)
        return MeanLoss(total, None, detached)
    described = ", ".join(
        f"{name!r} {'that of its samples' if weight is None else f'{float(weight):g}'}"
        for name, (_, weight) in detached.items()
    )
    raise DataError(
        f"the parts of the loss of {what} are means with different weights: {described}; over the whole batch each is "
        "divided by its own weight, so the losses of microbatches do not add up: pass loss_reduction='batch', which "
        "evaluates the loss once on the outputs of the whole batch, give all parts one weight as "
        "cp.WeightedMean(total, weight), or train with one microbatch on one rank"
    )


def compute_sample_mean(
    loss_function: LossFunction,
    output: Any,  # noqa: ANN401 - of the model
    targets: Any,  # noqa: ANN401 - whatever the loss takes
    what: str,
    *,
    is_whole: bool,
) -> Tensor:
    """Return the mean loss of some samples where only means over samples can be added up.

    Args:
        loss_function: the user's.
        output: of the model.
        targets: of the samples.
        what: the samples, for errors.
        is_whole: whether these are all samples of a batch, so that a weighted mean is its mean, too.

    Raises:
        DataError: the loss is a weighted mean, and these are not all samples.
    """
    recorder = ReductionRecorder()
    loss, weight, _ = compute_mean_loss(loss_function, output, targets, what, recorder, is_whole=is_whole)
    if weight is not None and not is_whole:
        recorder.require_sample_means(what)
        if recorder.find_weight(loss) is None:
            raise DataError(
                f"the loss of {what} is a cp.WeightedMean, but here the batch is divided among workers that add up "
                "means over samples; train with consistency=asp, where every minibatch is a batch of its own, or with "
                "cp.Trainer under a strategy such as server(n, consistency=bsp)"
            )
    return loss


def split_weighted_mean(loss: WeightedMean, what: str) -> tuple[Tensor, Tensor | float]:
    """Return the mean of some samples and its weight; a mean of 0 for the weight 0.

    Raises:
        DataError: a part is not a number, or there is a total without a weight.
    """
    total, weight = loss
    for name, part in (("total", total), ("weight", weight)):
        is_scalar = isinstance(part, Tensor) and part.numel() == 1
        if not is_scalar and (name == "total" or isinstance(part, bool) or not isinstance(part, int | float)):
            described = f"has the shape {tuple(part.shape)}" if isinstance(part, Tensor) else f"is {part!r}"
            raise DataError(
                f"the {name} of the WeightedMean of {what} {described}; give the sum as a 0-dim tensor and what it is "
                "divided by as a number or a 0-dim tensor"
            )
    total = total.reshape(())
    if isinstance(weight, Tensor):
        weight = weight.detach().reshape(()).double()
        if weight.device.type != "cpu":
            return total / weight.clamp(min=torch.finfo(torch.float32).tiny), weight
    weight = float(weight)
    if not (math.isfinite(weight) and weight >= 0):
        raise DataError(
            f"the weight of the WeightedMean of {what} is {weight}; it is what the total is divided by, such as the "
            "number of tokens: give a number that is not negative"
        )
    if not weight and abs(float(total.detach())) > 0:
        raise DataError(
            f"the WeightedMean of {what} has the total {float(total.detach()):.6g} and the weight 0, so it is not a "
            "mean, and its samples would not count; give the total 0 where nothing has a weight, or every sample a "
            "weight, such as the number of samples"
        )
    return (total / weight if weight else total * 0.0), weight


def choose_unit(weight: float, num_samples: int) -> float:
    """Return the power of two nearest to the weight of a sample; 1 if there is none.

    Example:
        >>> choose_unit(weight=900.0, num_samples=8), choose_unit(0.0, 8)
        (128.0, 1.0)
    """
    return 2.0 ** round(math.log2(weight / num_samples)) if weight > 0 and num_samples else 1.0
