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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from counterpoint.errors import DataError
from counterpoint.partitioning.dry_run import assign_values
from counterpoint.runtime.draw_sites import DrawRecorder, find_unknown_draw, record_loss_draws
from counterpoint.runtime.kernels.cross_entropy import fused_cross_entropy
from counterpoint.runtime.kernels.function_mode import FunctionReplacement, InterceptFunctions, TorchFunction
from counterpoint.runtime.loss_state import LossState, find_running_state
from counterpoint.runtime.new_values import NewValues
from counterpoint.runtime.sample_layout import find_tensor_lists, is_plain_list

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
        compute_sum: computes the sum instead of the mean.
    """

    target: Tensor
    class_weights: Tensor | None
    ignore_index: int
    compute_sum: Callable[[], Tensor]

    def total_weight(self) -> Tensor | float:
        """Return the sum of the weights of the targets that count."""
        is_counted = self.target != self.ignore_index
        if self.class_weights is None:
            weight = torch.count_nonzero(is_counted)
        else:
            indices = self.target.where(is_counted, 0)
            weight = (self.class_weights.detach()[indices].double() * is_counted).sum()
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
    **smoothing: float,
) -> IndexLoss | None:
    """Parse a call of ``F.cross_entropy`` or ``F.nll_loss``; return None if it is no mean over class indices."""
    if reduction != "mean" or size_average is False or reduce is False or target.is_floating_point():
        return None
    compute_sum = partial(func, input, target, weight, ignore_index=ignore_index, reduction="sum", **smoothing)
    return IndexLoss(target, weight, ignore_index, compute_sum)


def parse_operation(
    func: TorchFunction,
    input: Tensor,  # noqa: A002 - torch's signature
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    *smoothing: float,
    **more: float,
) -> IndexLoss | None:
    """Parse a call of the operation that a trace has for them; return None if it is no mean over class indices."""
    if reduction != MEAN or target.is_floating_point():
        return None
    compute_sum = partial(func, input, target, weight, SUM, ignore_index, *smoothing, **more)
    return IndexLoss(target, weight, ignore_index, compute_sum)


PARSERS: Mapping[TorchFunction, Callable[..., IndexLoss | None]] = {
    F.cross_entropy: parse_function,
    F.nll_loss: parse_function,
    torch.ops.aten.cross_entropy_loss.default: parse_operation,
    torch.ops.aten.nll_loss.default: parse_operation,
    torch.ops.aten.nll_loss_nd.default: parse_operation,
    torch.ops.aten.nll_loss2d.default: parse_operation,
}
"""Torch's losses that divide by the weights of class indices, and how to parse their arguments."""


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
        return dict.fromkeys(PARSERS, self.call)

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
                    f"{float(reduction.weight):g} together, by ignore_index or class weights, so it is no mean over "
                    "samples, and the losses of parts do not add up to that of the batch; return that mean itself, or "
                    "cp.WeightedMean(total, weight) with the sum and what it is divided by, pass "
                    "loss_reduction='batch', or train with one microbatch on one rank"
                )


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
    with explain_unreachable_inputs(what), InterceptFunctions({**random_functions, **recorder.replacements}):
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
        DataError: they are no losses, or have different weights.
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


RELATIVE_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}
"""By which the loss of some samples may differ from what its halves add up to; of other dtypes by 5 %."""


class LossOfParts(NamedTuple):
    """The loss of some samples, and those of two parts of them, with their weights and their numbers of samples."""

    total: float
    parts: tuple[float, float]
    weights: tuple[float, float]
    sizes: tuple[int, int]

    @property
    def sum(self) -> float:
        """The sum of the parts' losses."""
        return self.parts[0] + self.parts[1]

    @property
    def mean(self) -> float:
        """The mean of the parts' losses by their weights."""
        weight = self.weights[0] + self.weights[1]
        return (self.parts[0] * self.weights[0] + self.parts[1] * self.weights[1]) / weight if weight else 0.0

    @property
    def magnitude(self) -> float:
        """The sum of the absolute values that are finite."""
        return math.fsum(abs(loss) for loss in (self.total, *self.parts) if math.isfinite(loss))


SUM_REMEDY = "it is a sum: pass loss_reduction='sum', or return the mean over the samples"
OTHER_REMEDY = (
    "if it is a mean over tokens, or over anything else of which samples have different amounts, return "
    "cp.WeightedMean(total, weight) with the sum and what it is divided by; if it compares samples with each other, "
    "pass loss_reduction='batch', which evaluates it once on the outputs of the whole batch, or cross_sample='accept' "
    "if each microbatch may be a batch of its own"
)
SUMS_REMEDY = (
    "return a mean over the samples; other losses are those of the whole batch with cp.Trainer or cp.parallelize, "
    "which have the option loss_reduction"
)
"""Where parts of a batch are added up as means over samples."""


STATE_REMEDY = (
    "keep what changes from step to step outside of the loss: change it after the step, and give it to the loss with "
    "the targets"
)
STATE_OPTIONS = (
    "pass loss_reduction='batch', which computes the loss once on the outputs of the whole batch, or "
    "cross_sample='accept' if each microbatch may be a batch of its own"
)
DRAWS_REMEDY = (
    "draw with torch.rand, randn, bernoulli or F.dropout and without a generator of your own, one entry for each "
    "sample along dim 0, as torch.randn_like(targets) does, or draw in the dataset and give the numbers with the "
    "targets"
)
STATE_PROCESSES = (
    "start one process for each rank (counterpoint run -n N script.py), each of which has a loss of its own"
)


def count_in_place_changes(values: Any) -> int:  # noqa: ANN401 - any nest of tensors
    """Return how often the tensors of a nest were changed in place."""
    if isinstance(values, Tensor):
        return values._version  # noqa: SLF001 - as torch counts changes
    return sum(leaf._version for leaf in tree_leaves(values) if isinstance(leaf, Tensor))  # noqa: SLF001 - as above


class LossValue(NamedTuple):
    """A loss that a check has computed.

    Args:
        mean: over samples, tokens or weights; or the sum, if the loss is one.
        weight: of the mean.
        dtype: of the loss.
    """

    mean: float
    weight: float
    dtype: torch.dtype


class LossSamples(NamedTuple):
    """What a loss is computed from.

    Args:
        output: of the model.
        targets: of the samples.
        num_samples: how many there are.
        what: the samples, for errors.
    """

    output: Any
    targets: Any
    num_samples: int
    what: str

    @property
    def devices(self) -> set[torch.device]:
        """The devices of the outputs."""
        return {leaf.device for leaf in tree_leaves(self.output) if isinstance(leaf, Tensor)}

    @property
    def are_along_dim_0(self) -> bool:
        """Whether outputs have them along dim 0, and no list of tensors may have an entry for each."""
        leaves = [leaf for leaf in tree_leaves(self.output) if isinstance(leaf, Tensor)]
        has_list = any(len(values) == self.num_samples for values in find_tensor_lists(self[:2]))
        return not has_list and all(leaf.dim() and len(leaf) == self.num_samples for leaf in leaves)

    @property
    def has_plain_list(self) -> bool:
        """Whether there is a list without tensors that may have an entry for each sample."""
        leaves = tree_leaves((self.output, self.targets), is_leaf=is_plain_list)
        return any(is_plain_list(leaf) and len(leaf) == self.num_samples for leaf in leaves)

    def take(self, first: int, stop: int, *, cuts_lists: bool) -> LossSamples:
        """Return some of the samples; lists without tensors are cut as well, or belong to all samples."""
        take = partial(_take_samples, num_samples=self.num_samples, first=first, stop=stop)
        is_leaf = is_plain_list if cuts_lists else _never
        output, targets = (tree_map(take, values, is_leaf=is_leaf) for values in self[:2])
        return LossSamples(output, targets, stop - first, self.what)

    def detach(self) -> LossSamples:
        """Return the samples without their graph."""
        output, targets = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, self[:2])
        return LossSamples(output, targets, self.num_samples, self.what)

    def halve(self) -> LossSamples:
        """Return samples with half of the values."""
        output, targets = (tree_map(_halve, values) for values in self[:2])
        return LossSamples(output, targets, self.num_samples, self.what)

    def join(self, other: LossSamples, *, cuts_lists: bool) -> LossSamples:
        """Return these samples and others."""
        join = partial(_concatenate, joins_lists=cuts_lists)
        is_leaf = is_plain_list if cuts_lists else _never
        output, targets = (tree_map(join, *pair, is_leaf=is_leaf) for pair in zip(self[:2], other[:2], strict=True))
        return LossSamples(output, targets, self.num_samples + other.num_samples, self.what)


class LossCheck:
    """Checks that a loss of some samples is what the losses of their parts add up to, and that it keeps no state.

    It checks after 1, 2, 4, 8, ... steps, and, unless the loss is torch's own mean over class indices, where targets
    have values that none before had, such as the first padding.

    Args:
        loss: the user's; a check calls it some times more, without gradients.
        is_sum: whether it is a sum over samples.
        remedy: for the error; by default that of a plan.
        checks_parts: whether losses of parts must add up; if not, only a state is looked for.
    """

    def __init__(self, loss: LossFunction, *, is_sum: bool, remedy: str = "", checks_parts: bool = True) -> None:
        self.remedy = remedy
        self.loss = loss
        self.is_sum = is_sum
        self.next_step: float = 0 if checks_parts else math.inf  # after 1, 2, 4, 8, ... steps
        self.last_step = -1  # all microbatches of a step are checked, because one may have no targets that count
        self.next_state_step = 0  # likewise, for the state
        self.single: LossSamples | None = None  # a microbatch of one sample
        self.new_values = NewValues()

    def is_due(self, step: int, targets: Any, num_samples: int, weight: Tensor | float | None) -> bool:  # noqa: ANN401
        """Return whether it is time to check the loss of a microbatch.

        Args:
            step: the number of the step.
            targets: of the samples.
            num_samples: how many there are.
            weight: of a mean over class indices that torch has computed; None for another loss.
        """
        if self.next_step == math.inf:
            return step >= self.next_state_step
        leaves = () if weight is not None else (leaf for leaf in tree_leaves(targets) if isinstance(leaf, Tensor))
        has_new_values = self.new_values.find(leaves, num_samples)
        return has_new_values or step >= min(self.next_step, self.next_state_step) or step == self.last_step

    def check(  # noqa: PLR0913 - what a loss was computed from
        self,
        loss_function: LossFunction,
        step: int,
        output: Any,  # noqa: ANN401 - of the model
        targets: Any,  # noqa: ANN401 - whatever the loss takes
        value: Tensor | float,
        num_samples: int,
        what: str,
    ) -> None:
        """Check the loss of a microbatch, of a single sample together with the next such one.

        Whether it adds up is not checked if outputs have no samples along dim 0, or lists of tensors that may have an
        entry for each sample, or if the loss draws random numbers.

        Args:
            loss_function: the user's, with the parameters of this step.
            step: the number of the step.
            output: of the model.
            targets: of the samples.
            value: the loss, for a weighted mean without its weight; read only if it is checked.
            num_samples: how many there are.
            what: the samples, for the error.

        Raises:
            DataError: it is not what the losses of two parts add up to, or each call of it changes a state.
        """
        samples, state = LossSamples(output, targets, num_samples, what), LossState(self.loss)

        def check() -> None:
            with state.preserve_generators(samples.devices):
                total, changed = self._require_no_state(state, loss_function, step, samples, is_divided=True)
                with state.restored(changed):
                    self._check_parts(loss_function, step, samples, float(value), total)

        _run_without_gradients(check)

    def check_state(self, loss_function: LossFunction, step: int, samples: LossSamples) -> None:
        """Check that a loss of a whole batch keeps no state, where a process computes it several times in a step.

        Args:
            loss_function: the user's, with the parameters of this step.
            step: the number of the step.
            samples: all of the batch.

        Raises:
            DataError: it does.
        """
        if step < self.next_state_step:
            return
        state = LossState(self.loss)

        def check() -> None:
            with state.preserve_generators(samples.devices):
                self._require_no_state(state, loss_function, step, samples, is_divided=False)

        _run_without_gradients(check)

    def _require_no_state(
        self, state: LossState, loss_function: LossFunction, step: int, samples: LossSamples, *, is_divided: bool
    ) -> tuple[LossValue, list[int]]:
        """Compute the loss twice more, with the same random numbers.

        Args:
            state: of the loss.
            loss_function: the user's, with the parameters of this step.
            step: the number of the step.
            samples: from which it is computed.
            is_divided: whether they are a part of a batch.

        Returns:
            The loss, and which values of the state have changed.

        Raises:
            DataError: the second loss differs, or the state has changed further.
        """
        losses: list[LossValue] = []
        draws = False

        def compute() -> None:
            nonlocal draws
            with state.preserve_generators(samples.devices):
                generators = state.read_generators()
                losses.append(self._compute(loss_function, samples))
                if state.read_generators() != generators:  # so that parts cannot be compared
                    draws, self.next_step = True, math.inf

        before = state.read()
        compute()
        name, changed = find_running_state(state, before, compute)
        first, second = losses
        if not name and math.isfinite(first.mean + second.mean):
            outputs = [leaf for leaf in tree_leaves(samples.output) if isinstance(leaf, Tensor)]
            tolerance = max((_relative_tolerance(leaf, first.dtype) for leaf in outputs), default=0.05)
            is_other = abs(first.mean - second.mean) > tolerance * max(abs(first.mean), abs(second.mean))
            name = "something" if is_other else ""
        if name:
            self._explain_state(name, first.mean, second.mean, samples.what, is_divided=is_divided)
        if draws and not self.remedy:
            with state.restored(changed):
                self._require_keyed_draws(state, loss_function, samples, is_divided=is_divided)
        if step >= self.next_state_step:
            self.next_state_step = max(1, 2 * step)
        return first, changed

    def _require_keyed_draws(
        self, state: LossState, loss_function: LossFunction, samples: LossSamples, *, is_divided: bool
    ) -> None:
        """Check that a loss of parts draws what that of the whole batch draws.

        Args:
            state: of the loss.
            loss_function: the user's, with the parameters of this step.
            samples: from which it is computed.
            is_divided: whether they are a part of a batch.

        Raises:
            DataError: it draws from a generator of its own, or numbers of which the samples are unknown.
        """

        def record(part: LossSamples) -> DrawRecorder:
            def compute(replacements: Mapping[TorchFunction, FunctionReplacement]) -> None:
                self._compute(loss_function, part, replacements)

            with state.preserve_generators(samples.devices):
                return record_loss_draws(compute, state.generators)

        recorder = record(samples)
        for source in recorder.unkeyed.values():
            calls = "for each of its parts" if is_divided else "several times, as the ranks of a process share a loss"
            raise DataError(
                f"the random numbers of the loss come from {source}, which are not keyed by sample ({samples.what}); a "
                "loop without microbatches calls the loss once for a batch, but here it is called "
                f"{calls}, which would draw others; {DRAWS_REMEDY}; or "
                f"{STATE_OPTIONS if is_divided else STATE_PROCESSES}"
            )
        if not is_divided:
            return
        draws, others = [*recorder.draws.values()], None
        middle, cuts_lists = samples.num_samples // 2, samples.has_plain_list
        other = (
            samples.take(0, middle, cuts_lists=cuts_lists) if middle else samples.join(samples, cuts_lists=cuts_lists)
        )
        if draws and samples.are_along_dim_0:
            with suppress(Exception):  # a loss need not take another number of samples
                others = [*record(other).draws.values()]
        unknown = find_unknown_draw(draws, samples.num_samples, others, other.num_samples)
        if unknown is not None:
            raise DataError(
                f"the loss draws random numbers of the shape {tuple(unknown.shape)} for {samples.num_samples} samples "
                f"({samples.what}), and which of them belong to which sample is unknown, so that it would draw others "
                f"for parts of a batch than for the whole; {DRAWS_REMEDY}; or {STATE_OPTIONS}"
            )

    def _explain_state(self, name: str, first: float, second: float, what: str, *, is_divided: bool) -> NoReturn:
        again = "" if first == second else f", so that it is {first:.6g}, then {second:.6g} for the same output"
        calls = "for each of its parts" if is_divided else "several times, as the ranks of a process share a loss"
        options = "" if self.remedy else f"; or {STATE_OPTIONS if is_divided else STATE_PROCESSES}"
        raise DataError(
            f"each call of the loss changes {name}{again} ({what}); a loop without microbatches calls the loss once "
            f"for a batch, but here it is called {calls}, and its values would be others; {STATE_REMEDY}{options}"
        )

    def _check_parts(
        self, loss_function: LossFunction, step: int, samples: LossSamples, value: float, total: LossValue
    ) -> None:
        """Check that the losses of parts add up.

        Args:
            loss_function: the user's, with the parameters of this step.
            step: the number of the step.
            samples: from which the loss was computed.
            value: the loss.
            total: the loss, computed again.
        """
        leaves = [leaf for leaf in tree_leaves(samples.output) if isinstance(leaf, Tensor)]
        if not leaves or self.next_step == math.inf:
            return
        if not samples.are_along_dim_0:
            self.next_step = math.inf
            return
        relative = _relative_tolerance(leaves[0], total.dtype)
        absolute = _rounding_error(leaves[0], total.dtype)
        is_undefined = math.isnan(total.mean)  # as of samples without tokens
        if is_undefined and samples.num_samples > 1:
            return
        if not is_undefined and not abs(total.mean - value) <= 2 * relative * abs(total.mean) + absolute:
            self.next_step = math.inf  # it draws random numbers
            return
        for kinds in self._losses_of_parts(loss_function, samples, total):
            finite = [losses for losses in kinds if math.isfinite(losses.total)]  # others are errors of the step itself
            tolerances = [relative * losses.magnitude + absolute for losses in finite]
            pairs = [*zip(finite, tolerances, strict=True)]
            if pairs and not any(
                abs(losses.total - (losses.sum if self.is_sum else losses.mean)) <= tolerance
                for losses, tolerance in pairs
            ):
                raise DataError(self._explain(finite[0], samples.what, tolerances[0]))
        if self.single is None and step >= self.next_step:
            self.next_step, self.last_step = max(1, 2 * step), step

    def _losses_of_parts(
        self, loss_function: LossFunction, samples: LossSamples, total: LossValue
    ) -> Iterator[list[LossOfParts]]:
        """Yield losses of two parts of samples, and of both; for one kind of parts once, or with lists cut and whole.

        One or two samples are compared with others, too, which are made of them: a median of two samples is a mean. A
        single sample is compared with the next one, which may have targets of another kind, such as padding.
        """
        num_samples, middle = samples.num_samples, samples.num_samples // 2
        cuts = (True, False) if samples.has_plain_list else (False,)

        def compute(
            make: Callable[[bool], tuple[LossSamples, LossSamples]], whole: LossValue | None, *, is_made: bool
        ) -> list[LossOfParts]:
            found = []
            for cuts_lists in cuts:
                # a loss need not take values that no model gives
                with suppress(Exception) if is_made or len(cuts) > 1 else nullcontext():
                    parts = make(cuts_lists)
                    values = [self._compute(loss_function, part) for part in parts]
                    both = whole or self._compute(loss_function, parts[0].join(parts[1], cuts_lists=cuts_lists))
                    losses = LossOfParts(
                        both.mean,
                        (values[0].mean, values[1].mean),
                        (values[0].weight, values[1].weight),
                        (parts[0].num_samples, parts[1].num_samples),
                    )
                    if not is_made or math.isfinite(losses.total + losses.sum):
                        found.append(losses)
            return found

        def cut(cuts_lists: bool) -> tuple[LossSamples, LossSamples]:  # noqa: FBT001 - one of two kinds
            return (
                samples.take(0, middle, cuts_lists=cuts_lists),
                samples.take(middle, num_samples, cuts_lists=cuts_lists),
            )

        def add(cuts_lists: bool) -> tuple[LossSamples, LossSamples]:  # noqa: FBT001 - as above
            half = samples.halve()
            return samples, half if num_samples > 1 else half.join(half.halve(), cuts_lists=cuts_lists)

        if num_samples > 1:
            yield compute(cut, total, is_made=False)
        if num_samples <= 2:
            yield compute(add, None, is_made=True)
        if num_samples > 1:
            return
        earlier, self.single = self.single, None
        if earlier is not None and _sample_shapes(earlier) == _sample_shapes(samples):
            yield compute(lambda _: (samples, earlier), None, is_made=False)
        else:
            self.single = samples.detach()

    def _compute(
        self,
        loss_function: LossFunction,
        samples: LossSamples,
        random_functions: Mapping[TorchFunction, FunctionReplacement] = MappingProxyType({}),
    ) -> LossValue:
        """Compute the loss of some samples."""
        output, targets, num_samples, what = samples
        loss = compute_mean_loss(
            loss_function,
            output,
            targets,
            what,
            is_whole=True,
            is_sum=self.is_sum,
            random_functions=random_functions,
        )
        weight = num_samples if loss.weight is None else float(loss.weight)
        return LossValue(float(loss.mean.detach()), weight, loss.mean.dtype)

    def _explain(self, losses: LossOfParts, what: str, tolerance: float) -> str:
        is_sum = not self.is_sum and abs(losses.total - losses.sum) <= tolerance
        remedy = self.remedy or (SUM_REMEDY if is_sum else OTHER_REMEDY)
        left, right = losses.sizes
        return (
            f"the loss at {what} is {losses.total:.6g} for {left + right} samples, but {losses.parts[0]:.6g} for the "
            f"first {left} and {losses.parts[1]:.6g} for the other {right}, of which the "
            f"{f'sum is {losses.sum:.6g}' if self.is_sum else f'mean is {losses.mean:.6g}'}, so the losses of parts do "
            f"not add up to that of the batch; {remedy}"
        )


def _run_without_gradients(check: Callable[[], None]) -> None:
    """Run a check without gradients; with them if the loss differentiates, as a penalty on gradients does."""
    try:
        with torch.no_grad():
            check()
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        with torch.enable_grad():
            check()


def _sample_shapes(samples: LossSamples) -> list[torch.Size]:
    """Return the shape of a sample of each tensor."""
    return [leaf.shape[1:] for leaf in tree_leaves(samples[:2]) if isinstance(leaf, Tensor)]


def _halve(leaf: object) -> object:
    return leaf / 2 if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _concatenate(first: object, second: object, *, joins_lists: bool) -> object:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.cat([first, second])
    return [*first, *second] if joins_lists and is_plain_list(first) else second  # type: ignore[misc]


def _never(_: object) -> bool:
    return False


def _rounding_error(output: Tensor, dtype: torch.dtype) -> float:
    """Return by how much a loss of an output may differ because of rounding, even if it is about 0."""
    if not output.is_floating_point() or not output.numel():
        return 0.0
    eps = max(torch.finfo(output.dtype).eps, torch.finfo(dtype).eps if dtype.is_floating_point else 0.0)
    return eps * float(output.detach().abs().max().nan_to_num())


def _relative_tolerance(output: Tensor, dtype: torch.dtype) -> float:
    """Return by how much a loss of this dtype, of such an output, may differ because of rounding."""
    return max(RELATIVE_TOLERANCES.get(one, 0.05) for one in (dtype, output.dtype) if one.is_floating_point)


def _take_samples(leaf: object, *, num_samples: int, first: int, stop: int) -> object:
    has_samples = isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == num_samples
    if has_samples or (is_plain_list(leaf) and len(leaf) == num_samples):  # type: ignore[arg-type]
        return leaf[first:stop]  # type: ignore[index]
    return leaf


@contextmanager
def unchanged_loss(module: nn.Module | None) -> Iterator[None]:
    """Restore the buffers and the gradients of a loss that has a module; inside, it has no gradients."""
    params = [] if module is None else list(module.parameters())
    grads = [param.grad for param in params]
    buffers = [] if module is None else list(module.buffers())
    before = [buffer.clone() for buffer in buffers]
    for param in params:
        param.grad = None
    try:
        yield
    finally:
        for buffer, values in zip(buffers, before, strict=True):
            if not torch.equal(buffer, values):
                assign_values(buffer, values)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad


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
        DataError: a part is no number, or there is a total without a weight.
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
            f"the WeightedMean of {what} has the total {float(total.detach()):.6g} and the weight 0, so it is no mean, "
            "and its samples would not count; give the total 0 where nothing has a weight, or every sample a weight, "
            "such as the number of samples"
        )
    return (total / weight if weight else total * 0.0), weight


def choose_unit(weight: float, num_samples: int) -> float:
    """Return the power of two nearest to the weight of a sample; 1 if there is none.

    Example:
        >>> choose_unit(weight=900.0, num_samples=8), choose_unit(0.0, 8)
        (128.0, 1.0)
    """
    return 2.0 ** round(math.log2(weight / num_samples)) if weight > 0 and num_samples else 1.0
