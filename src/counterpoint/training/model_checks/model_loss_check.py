"""Check that a loss that the model itself computes adds up over microbatches.

Ranks check losses of outputs that have a sample in each row, by evaluating them again on some of the rows
(:class:`counterpoint.runtime.loss.loss_check.LossCheck`). A scalar that a forward has computed from all its samples can
only be computed again by the model, which before the first step is still whole on every process. Later batches are
checked where they have values that none before had, such as the first padding; any weights will do.

The model computes in the dtype of its parameters here, also under a precision or an autocast: a loss that was computed
in bf16 differs from that of its parts by rounding, as much as a wrong one may. A model that does not run so is checked
as it is trained, up to this rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from counterpoint.errors import DataError
from counterpoint.partitioning.batch_statistics import uses_batch_statistics
from counterpoint.partitioning.compiled_modules import run_eagerly
from counterpoint.partitioning.dry_run import preserve_state, replace_tensors, split_call_args
from counterpoint.partitioning.module_casts import without_casts
from counterpoint.partitioning.partitioned_model import as_call_args
from counterpoint.runtime.kernels.function_mode import InterceptFunctions
from counterpoint.runtime.loss.loss_check import RELATIVE_TOLERANCES, LossOfParts
from counterpoint.runtime.loss.loss_reduction import LossFunction, ReductionRecorder, compute_mean_loss
from counterpoint.runtime.loss.new_values import NewValues
from counterpoint.runtime.microbatches import AsyncPipelineBatches, MicrobatchSource, copy_tensors, slice_samples
from counterpoint.runtime.output_errors import has_fine_rounding, rounded_otherwise
from counterpoint.runtime.sample_independence import (
    CallsForNumber,
    repeat_samples,
    training_without_draws,
)
from counterpoint.runtime.sample_layout import find_tensor_lists, is_plain_list
from counterpoint.terminal_text import warn
from counterpoint.training.between_steps.stale_weights import without_stale_reads


class Samples(NamedTuple):
    """Some samples of a batch.

    Args:
        inputs: of the model.
        targets: of the loss.
        num_samples: how many there are.
    """

    inputs: Any
    targets: Any
    num_samples: int


class LossOfSamples(NamedTuple):
    """A loss of some samples, computed by the model and the loss function.

    Args:
        mean: the loss; or the sum, if it is one.
        loss_weight: what a mean was divided by.
        dtype: of the loss.
        is_weighted: whether it is a weighted mean.
    """

    mean: float
    loss_weight: float
    dtype: torch.dtype
    is_weighted: bool


class ModelLossCheck:
    """Checks a loss that the model computes before the first step, and where a batch has values that are new.

    Args:
        model: the user's; its state is preserved.
        loss: the user's.
        plan: as text, for errors.
        is_sum: whether the loss is a sum over samples.
    """

    def __init__(self, model: nn.Module, loss: LossFunction, plan: str, *, is_sum: bool) -> None:
        self.model, self.loss, self.plan, self.is_sum = model, loss, plan, is_sum
        self.has_checked = False
        self.is_watched = True  # whether later batches are to be checked: not if torch's own mean was recognized
        self.found_own = False  # whether the model was seen to compute such a loss
        self.new_values = NewValues()

    def check(self, batch: MicrobatchSource, micros: Sequence[int], *, has_weights: bool) -> None:
        """Check the loss of a batch, unless it is like an earlier one.

        Args:
            batch: of the next step.
            micros: the microbatches of this process.
            has_weights: whether the model has weights here, those of any step.

        Raises:
            DataError: the losses of microbatches do not add up.
        """
        if not self.is_watched:
            return
        parts = [*micros[:2]] if not self.has_checked else []
        for first in micros:
            size = batch.sizes[first]
            leaves = [leaf for values in (batch.inputs(first), batch.targets(first)) for leaf in tree_leaves(values)]
            whole = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_floating_point()]
            if self.new_values.find(whole, size) and self.has_checked:
                parts = [first] if size > 1 else [*{micros[max(0, micros.index(first) - 1)], first}]
        if parts and not has_weights:
            self.is_watched = False
            warn(
                f"inputs or targets of {type(self.model).__name__} have values that none before had, such as padding, "
                f"with which the loss that it computes cannot be checked under {self.plan}, where no process has all "
                "weights; if it is a mean over tokens, return from the forward what it is computed from, and "
                "cp.WeightedMean(total, weight) from the loss",
                stacklevel=2,
            )
        elif parts:
            self.has_checked = True
            require = partial(
                require_model_loss_adds_up, self.model, self.loss, batch, parts, self.plan, is_sum=self.is_sum
            )
            with without_stale_reads():
                with without_casts(self.model):
                    kind = require()
                if (
                    kind == "unknown"
                ):  # a model may not run in the dtype of its parameters, as one that casts its inputs
                    kind = require()
            self.is_watched, self.found_own = kind != "other", kind == "model"


def require_model_loss_adds_up(
    model: nn.Module, loss: LossFunction, batch: MicrobatchSource, micros: Sequence[int], plan: str, *, is_sum: bool
) -> Literal["model", "other", "unknown"]:
    """Check that the loss of two microbatches is what their losses add up to.

    The model runs on the first two microbatches of this process (or on the halves of its only one), and on both
    together, without gradients, in evaluation mode, and in training mode if the loss is another one there. Nothing is
    checked if all outputs have a sample in each row, where ranks check the loss, if the loss is random in evaluation
    mode too, or if the model does not run.

    A branch on the number of samples may take one side for these, and the other for the batch. If the model calls other
    functions for as many samples as the batch has, it also runs on the first microbatch, repeated to this number.

    Args:
        model: the user's; its state is preserved.
        loss: the user's.
        batch: of the first step.
        micros: the microbatches of this process.
        plan: as text, for the error.
        is_sum: whether the loss is a sum over samples.

    Returns:
        ``model`` if the loss is one that the model computes, and no mean that was recognized; ``other`` if it is
        another; ``unknown`` if nothing was checked.

    Raises:
        DataError: it is not.
    """
    parts = _two_parts(batch, micros)
    if parts is None:
        return "unknown"
    if any(map(uses_batch_statistics, model.modules())):
        return "other"
    whole = _concatenate(*parts)
    if whole is None:
        return "unknown"
    compute, repeated = partial(_compute, model, loss, is_sum=is_sum), None
    evaluating, training = (partial(preserve_state, model, training=False), partial(training_without_draws, model))
    computed = ComputedLoss(model, compute, whole, evaluating)
    what = f"the loss that {type(model).__name__} computes from its samples"
    times = _batch_size(batch, micros[0]) // parts[0].num_samples
    try:
        with evaluating():
            found = _compute_all(compute, parts, whole)
            repeated = _compute_repeated(compute, model, parts[0], times) if found else None
    except Exception:  # noqa: BLE001 - training raises it again, with its location
        return "unknown"
    if found:
        _require_sum_of_parts(what, found, parts, plan, computed, is_sum=is_sum)
        of_part = computed._replace(samples=parts[0])
        _require_same_for_number(of_part, found[0], repeated, plan, is_sum=is_sum)
    trained: list[LossOfSamples] = []
    with suppress(Exception), training():  # training raises it again, with its location
        if any(module.training for module in model.modules()) and compute(parts[0]) not in found[:1]:
            trained = _compute_all(compute, parts, whole)
        repeated = _compute_repeated(compute, model, parts[0], times) if found or trained else None
    _require_sum_of_parts(what, trained, parts, plan, computed._replace(mode=training), is_sum=is_sum)
    if found or trained:
        of_part = computed._replace(samples=parts[0], mode=training)
        _require_same_for_number(of_part, (trained or found)[0], repeated, plan, is_sum=is_sum)
    own = found or trained
    if not own or own[0].is_weighted:
        return "other"
    mode: Mode = evaluating if found else training
    others = _other_weights(model)
    changed = _compute_with_other_weights(model, compute, parts, whole, mode(), others)
    what += " with weights changed for this check"
    _require_sum_of_parts(what, changed, parts, plan, ComputedLoss(model, compute, whole, mode, others), is_sum=is_sum)
    return "model"


Mode: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Puts a model into evaluation or training mode, and restores its state afterwards."""


class ComputedLoss(NamedTuple):
    """How a loss was computed, to compute it again.

    Args:
        model: the user's.
        compute: returns the loss of some samples.
        samples: of which it was computed.
        mode: of the model.
        weights: those of the model that were others, by ``id`` of the parameter.
    """

    model: nn.Module
    compute: Callable[[Samples], LossOfSamples | None]
    samples: Samples
    mode: Mode
    weights: Mapping[int, Tensor] = MappingProxyType({})

    def is_from_rounding(self, total: float, difference: float) -> bool:
        """Tell whether the loss changes by half as much if weights and inputs are only rounded otherwise.

        A router may have a near tie, which rounding turns: see
        :func:`counterpoint.runtime.output_errors.is_from_rounding`.

        Args:
            total: the loss.
            difference: from what the losses of two parts add up to.
        """
        if not has_fine_rounding(self.model):
            return False
        with suppress(Exception), self.mode(), run_eagerly(self.model):  # it has run before
            for weights, inputs in rounded_otherwise(self.model, self.samples.inputs, self.weights):
                with replace_tensors(self.model, weights):
                    loss = self.compute(self.samples._replace(inputs=inputs))
                if loss is not None and abs(loss.mean - total) >= difference / 2:
                    return True
        return False


def _compute_with_other_weights(
    model: nn.Module,
    compute: Callable[[Samples], LossOfSamples | None],
    parts: tuple[Samples, Samples],
    whole: Samples,
    mode: AbstractContextManager[object],
    weights: Mapping[int, Tensor],
) -> list[LossOfSamples]:
    """Return what :func:`_compute_all` does with other weights; nothing if the model fails with them.

    With the weights of a new model, whose head is zero, say, all samples have one loss, and a mean over tokens is one
    over samples.
    """
    with suppress(Exception), mode, run_eagerly(model), replace_tensors(model, weights):
        return _compute_all(compute, parts, whole)
    return []


def _other_weights(model: nn.Module) -> dict[int, Tensor]:
    """Return weights with noise, by ``id`` of the parameter: of the last ones, and of those that are not too large."""
    generator, found, num_values = torch.Generator().manual_seed(0), dict[int, Tensor](), 0
    for param in reversed([*model.parameters()]):
        if not param.is_floating_point() or num_values + param.numel() > MAX_CHANGED_VALUES:
            continue
        num_values += param.numel()
        values = param.detach().float()
        noise = torch.randn(values.shape, generator=generator).to(values.device)
        found[id(param)] = (values + noise * (0.1 + 0.5 * values.square().mean().sqrt())).to(param.dtype)
    return found


MAX_CHANGED_VALUES = 1 << 26
"""Of weights that are changed for a check, which are copied."""


def _compute_all(
    compute: Callable[[Samples], LossOfSamples | None], parts: tuple[Samples, Samples], whole: Samples
) -> list[LossOfSamples]:
    """Return the losses of both parts and of the whole; none if there is none of the model's own."""
    first = compute(parts[0])
    found = [] if first is None else [first, compute(parts[1]), compute(whole)]
    return [] if None in found else cast("list[LossOfSamples]", found)


def _batch_size(batch: MicrobatchSource, micro: int) -> int:
    """Return the number of samples of the batch of which a microbatch is a part."""
    per_batch = batch.microbatches_per_batch if isinstance(batch, AsyncPipelineBatches) else len(batch.sizes)
    own = range(micro - micro % per_batch, micro - micro % per_batch + per_batch)
    return sum(batch.sizes.get(index, 0) for index in own)


def _compute_repeated(
    compute: Callable[[Samples], LossOfSamples | None], model: nn.Module, samples: Samples, times: int
) -> LossOfSamples | None:
    """Return the loss of samples that are repeated; None if the model does the same for them, or is too large."""
    inputs, targets = (repeat_samples(values, samples.num_samples, times, cuts_lists=True) for values in samples[:2])
    num_elements = sum(leaf.numel() for leaf in tree_leaves((inputs, targets)) if isinstance(leaf, Tensor))
    if times < 2 or num_elements > MAX_REPEATED_ELEMENTS:
        return None
    with run_eagerly(model):
        if CallsForNumber.compare(model, as_call_args(samples.inputs), times, cuts_lists=True) is CallsForNumber.SAME:
            return None
    with suppress(Exception):  # nor on more samples
        return compute(Samples(inputs, targets, samples.num_samples * times))
    return None


MAX_REPEATED_ELEMENTS = 4_000_000
"""Of inputs and targets of a batch on which a model is run to find out what it does for as many samples."""


def _require_same_for_number(
    computed: ComputedLoss, one: LossOfSamples, repeated: LossOfSamples | None, plan: str, *, is_sum: bool
) -> None:
    """Check that the loss of samples is that of the same ones, repeated to as many as the batch has.

    Raises:
        DataError: it is not.
    """
    if repeated is None:
        return
    times = repeated.loss_weight / one.loss_weight if is_sum and not one.is_weighted else 1.0
    expected = one.mean * times
    difference = abs(repeated.mean - expected)
    is_small = difference <= RELATIVE_TOLERANCES.get(one.dtype, 0.05) * max(abs(expected), abs(repeated.mean))
    if not is_small and not computed.is_from_rounding(one.mean, difference / times):
        count = computed.samples.num_samples
        raise DataError(
            f"the loss that {type(computed.model).__name__} computes from its samples is {one.mean:.6g} for {count} "
            f"samples, but {repeated.mean:.6g} for the same ones, repeated to as many as the batch has, where it "
            f"should be {expected:.6g}, so it depends on the number of samples, and under {plan} the losses of "
            "microbatches do not add up to that of the batch; let no branch or factor of the forward depend on the "
            "number of samples, "
            "compute the loss in the loss function and pass loss_reduction='batch', or pass cross_sample='accept' if "
            "each microbatch may be a batch of its own"
        )


def _require_sum_of_parts(
    what: str,
    found: Sequence[LossOfSamples],
    parts: tuple[Samples, Samples],
    plan: str,
    computed: ComputedLoss,
    *,
    is_sum: bool,
) -> None:
    """Check that the losses of two parts add up to that of the whole.

    Args:
        what: the loss, for the error.
        found: the losses of both parts and of the whole; empty for nothing to check.
        parts: the samples.
        plan: as text, for the error.
        computed: how that of the whole was computed.
        is_sum: whether the loss is a sum over samples.

    Raises:
        DataError: they do not.
    """
    if not found:
        return
    first, second, total = found
    counts = (parts[0].num_samples, parts[1].num_samples)
    losses = LossOfParts(total.mean, (first.mean, second.mean), (first.loss_weight, second.loss_weight), counts)
    expected = losses.sum if is_sum else losses.mean
    difference = abs(losses.total - expected)
    is_small = difference <= RELATIVE_TOLERANCES.get(total.dtype, 0.05) * losses.magnitude
    if not is_small and not computed.is_from_rounding(total.mean, difference):
        raise DataError(
            f"{what} is {losses.total:.6g} for "
            f"{sum(counts)} samples, but {first.mean:.6g} for the first {counts[0]} and {second.mean:.6g} for "
            f"the other {counts[1]}, of which the {'sum' if is_sum else 'mean'} is {expected:.6g}, so under {plan} "
            "the losses of microbatches do not add up to that of the batch; if it is a mean over tokens, return from "
            "the forward what it is computed from, and cp.WeightedMean(total, weight) from the loss; if it compares "
            "samples (a load balance, a contrast), compute it in the loss function and pass loss_reduction='batch'; "
            "pass cross_sample='accept' if each microbatch may be a batch of its own"
        )


def _two_parts(batch: MicrobatchSource, micros: Sequence[int]) -> tuple[Samples, Samples] | None:
    """Return the first two microbatches with samples, or the halves of the only one; None if there is one sample."""
    found = [Samples(batch.inputs(micro), batch.targets(micro), batch.sizes[micro]) for micro in micros[:2]]
    if len(found) == 2:
        return found[0], found[1]
    if not found or found[0].num_samples < 2:
        return None
    middle = found[0].num_samples // 2
    return _take(found[0], 0, middle), _take(found[0], middle, found[0].num_samples)


def _take(samples: Samples, start: int, stop: int) -> Samples:
    inputs, targets = (slice_samples(values, start, stop) for values in samples[:2])
    return Samples(inputs, targets, stop - start)


def _concatenate(first: Samples, second: Samples) -> Samples | None:
    """Return the samples of both; None if their tensors are not rows of samples, or have different lengths.

    None, too, if there are lists that may have an entry for each sample.
    """
    counts = first.num_samples, second.num_samples
    pairs: list[tuple[Any, Any]] = []
    for one, other in zip(first[:2], second[:2], strict=True):
        leaves, others = tree_leaves(one), tree_leaves(other)
        has_list = any(is_plain_list(leaf) and len(leaf) == counts[0] for leaf in tree_leaves(one, is_plain_list))
        if has_list or any(find_tensor_lists(one)) or len(leaves) != len(others):
            return None
        pairs += zip(leaves, others, strict=True)
    tensors = [pair for pair in pairs if isinstance(pair[0], Tensor) and pair[0].dim()]
    if any((len(one), len(other)) != counts or one.shape[1:] != other.shape[1:] for one, other in tensors):
        return None
    inputs, targets = (tree_map(_join, *values) for values in zip(first[:2], second[:2], strict=True))
    return Samples(inputs, targets, sum(counts))


def _join(one: object, other: object) -> object:
    return torch.cat([one, other]) if isinstance(one, Tensor) and isinstance(other, Tensor) and one.dim() else one


def _compute(model: nn.Module, loss: LossFunction, samples: Samples, *, is_sum: bool) -> LossOfSamples | None:
    """Run the model and the loss on some samples, in the mode that the model is in.

    Returns:
        None if all outputs have the samples along dim 0, or if random numbers were drawn.
    """
    inputs, targets = copy_tensors(samples[:2])
    args, kwargs = split_call_args(as_call_args(inputs))
    recorder = ReductionRecorder(is_whole=True)
    state = torch.get_rng_state()
    with InterceptFunctions(recorder.replacements):
        output = model(*args, **kwargs)
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if all(leaf.dim() and len(leaf) == samples.num_samples for leaf in leaves):
        return None
    mean, loss_weight, _ = compute_mean_loss(loss, output, targets, "a batch", recorder, is_whole=True, is_sum=is_sum)
    if not torch.equal(torch.get_rng_state(), state):
        return None
    divisor = samples.num_samples if loss_weight is None else float(loss_weight)
    return LossOfSamples(float(mean), divisor, mean.dtype, is_weighted=loss_weight is not None)
