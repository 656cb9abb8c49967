"""Check that the loss of a batch is what the losses of its parts add up to, and that calling it has no other effect.

The user declares how a loss is reduced (:mod:`counterpoint.runtime.loss.loss_reduction`), and under a plan the losses
of microbatches are added up accordingly. A sum that is declared as a mean, a mean over tokens that is declared as one
over samples, or a loss that compares samples with each other would then train differently, without an error. So the
loss of some microbatches is computed again, for all samples and for two parts of them, and compared::

    declared     must hold, within rounding
    mean         loss(all) = (weight_0 * loss(part 0) + weight_1 * loss(part 1)) / (weight_0 + weight_1)
    sum          loss(all) = loss(part 0) + loss(part 1)

A loss that keeps a state, or draws random numbers that do not belong to samples, is found in the same way: it is
computed twice from the same samples and the same states of the generators. The check of losses that the model itself
computes is :mod:`counterpoint.training.model_checks.model_loss_check`.

On a device, checks of later steps do not wait for their figures: :func:`find_bad_figures` decides there, so that the
step is not applied, and :meth:`LossCheck.require_good` raises when the figures have arrived.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from counterpoint.errors import CounterpointError, DataError, first_line
from counterpoint.runtime.gradient_code import GradientCodeDetector, gradient_errors
from counterpoint.runtime.kernels.function_mode import FunctionReplacement, TorchFunction
from counterpoint.runtime.loss.loss_reduction import LossFunction, compute_mean_loss
from counterpoint.runtime.loss.loss_state import LossState, find_running_state, preserve_loss
from counterpoint.runtime.loss.new_values import NewValues
from counterpoint.runtime.rng.draw_sites import DrawRecorder, find_unknown_draw, record_loss_draws
from counterpoint.runtime.sample_layout import find_tensor_lists, is_plain_list

RELATIVE_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}
"""By which the loss of some samples may differ from what its halves add up to; of other dtypes by 5 %."""


NUM_READ_STEPS = 2
"""Steps at the beginning whose checks read their figures at once, also from a device."""


class LossOfParts(NamedTuple):
    """The loss of some samples, and those of two parts of them, with their weights and their numbers of samples.

    Args:
        total: of all samples; the figures of a check on a device are tensors until they are read.
        parts: of two parts.
        weights: of the parts.
        sizes: of the parts.
        is_made: whether samples were made for it, so that it counts only if it is finite.
    """

    total: float
    parts: tuple[float, float]
    weights: tuple[float, float]
    sizes: tuple[int, int]
    is_made: bool = False

    @property
    def counts(self) -> bool:
        """Whether it may show a difference."""
        return math.isfinite(self.total + self.sum if self.is_made else self.total)

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
MAX_REPEATED = 1 << 22
"""Elements of the outputs of a whole batch up to which its loss is computed from repeated samples."""
MAX_DIFFERENTIATED = 8
"""Samples whose gradients are compared with those of parts, so that those of all logits are not held once more."""
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


def count_in_place_changes(*nests: Any) -> int:  # noqa: ANN401 - any nests of tensors
    """Return how often the tensors of nests were changed in place."""
    return sum(leaf._version for nest in nests for leaf in tensor_leaves(nest))  # noqa: SLF001 - as torch counts changes


def tensor_leaves(values: Any) -> list[Tensor]:  # noqa: ANN401 - any nest of tensors
    """Return the tensors of a nest; if it is a tensor itself, without torch's walk, which takes 20 us."""
    return (
        [values] if isinstance(values, Tensor) else [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    )


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


class LossFigures(NamedTuple):
    """The figures of a check; on a device tensors until they are read.

    Args:
        value: the loss of the step; None if losses of parts are not compared.
        first: the same loss, computed again.
        second: once more.
        state_tolerance: by which both may differ, relative to the larger one.
        kinds: losses of two parts and of both, for each kind of parts.
        relative: tolerance of the losses of parts.
        absolute: likewise.
    """

    value: Tensor | float | None
    first: LossValue
    second: LossValue
    state_tolerance: float
    kinds: Sequence[Sequence[LossOfParts]]
    relative: float
    absolute: Tensor | float


class LateLossCheck(NamedTuple):
    """A check whose figures are on a device.

    Args:
        step: its number.
        what: the samples, for errors.
        is_divided: whether they are a part of a batch.
        figures: all of them.
        is_bad: whether the check has failed, on the device.
    """

    step: int
    what: str
    is_divided: bool
    figures: LossFigures
    is_bad: Tensor

    def pack(self) -> Tensor:
        """Return what the host has to read, as float64 on the device: whether it has failed, and the figures."""
        leaves = [leaf for leaf in tree_leaves(self.figures) if isinstance(leaf, Tensor)]
        return torch.stack([value.detach().double().reshape(()) for value in (self.is_bad, *leaves)])

    def unpack(self, numbers: Sequence[float]) -> LossFigures:
        """Return the figures as numbers, given what the host has read after the first number."""
        leaves, spec = tree_flatten(self.figures)
        read = iter(numbers)
        figures: LossFigures = tree_unflatten(
            [next(read) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        )
        return figures


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

    def halve(self, times: int = 1) -> LossSamples:
        """Return samples with half of the values, or half of a half."""
        output, targets = (tree_map(partial(_halve, times=times), values) for values in self[:2])
        return LossSamples(output, targets, self.num_samples, self.what)

    def repeat(self, num_samples: int) -> LossSamples:
        """Return these samples again and again, up to a number of samples."""
        repeat = partial(_repeat, num_samples=self.num_samples, total=num_samples)
        output, targets = (tree_map(repeat, values) for values in self[:2])
        return LossSamples(output, targets, num_samples, self.what)

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
        may_be_late: whether the caller reads checks on a device later, by :meth:`require_good`.
    """

    def __init__(
        self,
        loss: LossFunction,
        *,
        is_sum: bool,
        remedy: str = "",
        checks_parts: bool = True,
        may_be_late: bool = False,
    ) -> None:
        self.may_be_late = may_be_late
        self.late_checks: list[LateLossCheck] = []
        self.remedy = remedy
        self.loss = loss
        self.is_sum = is_sum
        self.next_step: float = 0 if checks_parts else math.inf  # after 1, 2, 4, 8, ... steps
        self.last_step = -1  # all microbatches of a step are checked, because one may have no targets that count
        self.next_state_step = 0  # likewise, for the state
        self.single: LossSamples | None = None  # a microbatch of one sample
        self.new_values = NewValues()
        self.checked_sizes = set[tuple[int, int]]()  # of a microbatch and of its batch
        self.has_checked_gradients = False
        self.has_compared_gradients = False  # of parts with those of the whole

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
        leaves = () if weight is not None else tensor_leaves(targets)
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
        batch_size: int = 0,
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
            batch_size: samples of the whole batch; 0 if it is unknown.

        Raises:
            DataError: it is not what the losses of two parts add up to, each call of it changes a state, or it depends
                on the number of samples.
        """
        samples, state = LossSamples(output, targets, num_samples, what), LossState(self.loss)
        if self._start_late_check(state, loss_function, step, samples, value):
            return

        def check() -> None:
            with state.preserve_generators(samples.devices), preserve_loss(self.loss):
                total, changed = self._require_no_state(state, loss_function, step, samples, is_divided=True)
                with state.restored(changed):
                    self._check_parts(loss_function, step, samples, float(value), total)
                    self._require_same_for_batch_size(loss_function, samples, total, batch_size)
                with state.restored(changed), torch.enable_grad():
                    self._require_proportional_gradients(loss_function, samples)
                    self._require_gradients_of_parts(loss_function, samples)

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
        if self._start_late_check(state, loss_function, step, samples, None):
            return

        def check() -> None:
            with state.preserve_generators(samples.devices), preserve_loss(self.loss):
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
            DataError: the second loss differs, or the state has changed further, or the loss is another one after a
                call with other outputs, as one that reads what the call before has kept.
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
        if not name and not draws and not _differ(samples, first, second):
            with suppress(Exception):  # a loss need not take values that no model gives
                with state.preserve_generators(samples.devices):
                    self._compute(loss_function, samples.halve(times=2))
                with state.preserve_generators(samples.devices):  # one on a device may have drawn unseen
                    second = self._compute(loss_function, samples)
        if not name and _differ(samples, first, second):
            name = state.slots[changed[0]].name if changed else "something that it keeps"
        if name:
            self._explain_state(name, first.mean, second.mean, samples.what, is_divided=is_divided)
        if draws and not self.remedy:
            with state.restored(changed):
                self._require_keyed_draws(state, loss_function, samples, is_divided=is_divided)
        self._schedule_state_check(step)
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
        absolute = float(_rounding_error(leaves[0], total.dtype))
        is_undefined = math.isnan(total.mean)  # as of samples without tokens
        if is_undefined and samples.num_samples > 1:
            return
        if not is_undefined and not _is_same_loss(total.mean, value, relative, absolute):
            self.next_step = math.inf  # it draws random numbers
            return
        for kind in self._losses_of_parts(loss_function, samples, total):
            self._require_sum_of_parts(kind, samples.what, relative, absolute)
        self._schedule_check_of_parts(step)

    def _require_sum_of_parts(self, kind: Sequence[LossOfParts], what: str, relative: float, absolute: float) -> None:
        """Raise if one kind of parts does not add up.

        Raises:
            DataError: it does not.
        """
        finite = [losses for losses in kind if losses.counts]  # others are errors of the step itself
        tolerances = [relative * losses.magnitude + absolute for losses in finite]
        pairs = [*zip(finite, tolerances, strict=True)]
        if pairs and not any(
            abs(losses.total - (losses.sum if self.is_sum else losses.mean)) <= tolerance for losses, tolerance in pairs
        ):
            raise DataError(self._explain(finite[0], what, tolerances[0]))

    def _require_same_for_batch_size(
        self, loss_function: LossFunction, samples: LossSamples, total: LossValue, batch_size: int
    ) -> None:
        """Check a loss of as many samples as the whole batch has, which are the microbatch's, repeated.

        A branch on the number of samples may take one side for a microbatch and its halves, but another for the batch.

        Args:
            loss_function: the user's, with the parameters of this step.
            samples: of the microbatch.
            total: the loss of them.
            batch_size: samples of the whole batch.

        Raises:
            DataError: it is not.
        """
        size = samples.num_samples
        leaves = [leaf for leaf in tree_leaves(samples.output) if isinstance(leaf, Tensor)]
        is_known = self.next_step != math.inf and samples.are_along_dim_0 and not samples.has_plain_list
        is_known = is_known and bool(leaves) and math.isfinite(total.mean) and total.mean != 0  # as without tokens
        if not is_known or batch_size <= size or (size, batch_size) in self.checked_sizes:
            return
        if sum(leaf[:1].numel() for leaf in leaves) * batch_size > MAX_REPEATED:
            return
        self.checked_sizes.add((size, batch_size))
        try:  # a loss need not take samples twice
            whole = self._compute(loss_function, samples.repeat(batch_size))
            rest = self._compute(loss_function, samples.repeat(batch_size - size))
        except Exception:  # noqa: BLE001 - as above; what the loss cannot do at all ends the step itself
            return
        losses = LossOfParts(
            whole.mean, (total.mean, rest.mean), (total.weight, rest.weight), (size, batch_size - size), is_made=True
        )
        tolerance = _relative_tolerance(leaves[0], total.dtype) * losses.magnitude
        tolerance += float(_rounding_error(leaves[0], total.dtype))
        expected = losses.sum if self.is_sum else losses.mean
        if losses.counts and abs(losses.total - expected) > tolerance:
            raise DataError(
                f"the loss depends on the number of samples, as with a branch on len(output): for the {size} of "
                f"{samples.what} it is {total.mean:.6g}, but for the same ones, repeated to the {batch_size} of the "
                f"batch, {whole.mean:.6g} instead of {expected:.6g}; a batch is divided into microbatches, of which "
                "the losses must add up to that of the batch: compute the same for any number of samples, give "
                f"the number with the targets, or {self.remedy or STATE_OPTIONS}"
            )

    def _start_late_check(
        self,
        state: LossState,
        loss_function: LossFunction,
        step: int,
        samples: LossSamples,
        value: Tensor | float | None,
    ) -> bool:
        """Start a check whose figures the host reads later, and return True; False if it has to read some now.

        Args:
            state: of the loss.
            loss_function: the user's, with the parameters of this step.
            step: the number of the step.
            samples: from which it is computed.
            value: the loss; None for that of a whole batch, of which only a state is looked for.
        """
        on_device = [leaf for leaf in tree_leaves(samples.output) if isinstance(leaf, Tensor) and not leaf.is_cpu]
        if not self.may_be_late or step < NUM_READ_STEPS or not on_device:
            return False
        is_late = True

        def check() -> None:
            nonlocal is_late
            with state.preserve_generators(samples.devices), preserve_loss(self.loss):
                is_late = self._compare_late(state, loss_function, step, samples, value)

        _run_without_gradients(check)
        return is_late

    def _compare_late(
        self,
        state: LossState,
        loss_function: LossFunction,
        step: int,
        samples: LossSamples,
        value: Tensor | float | None,
    ) -> bool:
        """Compute the loss twice, and of parts; keep the check. Return False if it changes tensors that it keeps."""
        before, generators, losses = state.read(), state.read_generators(), list[LossValue]()

        def compute() -> None:
            with state.preserve_generators(samples.devices):
                losses.append(self._compute(loss_function, samples, is_read=False))
                if state.read_generators() != generators:  # so that parts cannot be compared
                    self.next_step = math.inf

        compute()
        if any(isinstance(state.slots[index].read(), Tensor) for index in state.find_changed(before)):
            return False
        name, changed = find_running_state(state, before, compute)
        if name:
            self._explain_state(name, 0.0, 0.0, samples.what, is_divided=value is not None)
        first, second = losses
        leaves = [leaf for leaf in tree_leaves(samples.output) if isinstance(leaf, Tensor)]
        kinds: list[list[LossOfParts]] = []
        compares_parts = value is not None and self.next_step != math.inf and samples.are_along_dim_0
        if compares_parts:
            with state.restored(changed):
                kinds = [*self._losses_of_parts(loss_function, samples, first, is_read=False)]
        figures = LossFigures(
            value if compares_parts else None,
            first,
            second,
            _state_tolerance(samples, first.dtype),
            kinds,
            _relative_tolerance(leaves[0], first.dtype),
            _rounding_error(leaves[0], first.dtype),
        )
        is_bad = find_bad_figures(figures, samples.num_samples, is_sum=self.is_sum)
        self.late_checks.append(LateLossCheck(step, samples.what, value is not None, figures, is_bad))
        self._schedule_state_check(step)
        if compares_parts:
            self._schedule_check_of_parts(step)
        elif value is not None and not samples.are_along_dim_0:
            self.next_step = math.inf
        return True

    def _schedule_state_check(self, step: int) -> None:
        """Look for a state next after twice as many steps, if it was time to in this one."""
        if step >= self.next_state_step:
            self.next_state_step = max(1, 2 * step)

    def _schedule_check_of_parts(self, step: int) -> None:
        """Compare parts next after twice as many steps, likewise; not if a single sample waits for the next one."""
        if self.single is None and step >= self.next_step:
            self.next_step, self.last_step = max(1, 2 * step), step

    def take_late_checks(self) -> list[LateLossCheck]:
        """Return the checks of this step whose figures are on a device, and forget them."""
        late_checks, self.late_checks = self.late_checks, []
        return late_checks

    def require_good(self, late_check: LateLossCheck, numbers: Sequence[float]) -> None:
        """Raise if a check on a device has failed.

        Args:
            late_check: the check.
            numbers: what it has packed.

        Raises:
            DataError: it has.
        """
        is_bad, *read = numbers
        figures = late_check.unpack(read)
        first, value, absolute = figures.first.mean, figures.value, float(figures.absolute)
        if is_bad:
            for kind in figures.kinds:
                self._require_sum_of_parts(kind, late_check.what, figures.relative, absolute)
            second = figures.second.mean
            self._explain_state("something", first, second, late_check.what, is_divided=late_check.is_divided)
        if value is None:
            return
        if math.isnan(first):  # as of samples without tokens
            self.next_step = min(self.next_step, late_check.step + 1)
        elif not _is_same_loss(first, float(value), figures.relative, absolute):
            self.next_step = math.inf  # it draws random numbers

    def _require_proportional_gradients(self, loss_function: LossFunction, samples: LossSamples) -> None:
        """Check, once, that gradients are twice as large if backward starts from 2, where Python code computes them.

        An autograd function whose ``backward`` ignores its argument is right in a loop, where that is 1.

        Args:
            loss_function: the user's, with the parameters of this step.
            samples: from which it is computed.

        Raises:
            DataError: they are not.
        """
        if self.has_checked_gradients:
            return
        self.has_checked_gradients = True
        output = tree_map(_as_leaf, samples.output)
        leaves = [leaf for leaf in tensor_leaves(output) if leaf.requires_grad]
        detector = GradientCodeDetector()
        with detector:
            loss = compute_mean_loss(
                loss_function, output, samples.targets, samples.what, is_whole=True, is_sum=self.is_sum
            ).mean
        detector.find_functions([loss])
        if not detector.names or not loss.requires_grad or not leaves:
            return

        def differentiate(start: float) -> list[Tensor | None]:
            """Return the gradients if backward starts from a number, divided by it."""
            factor = torch.full_like(loss, start)
            grads: Sequence[Tensor | None] = torch.autograd.grad(
                loss, leaves, factor, retain_graph=True, allow_unused=True
            )
            return [None if grad is None else grad / start for grad in grads]

        if any(gradient_errors(differentiate(1.0), differentiate(2.0), detector.eps)):
            raise DataError(
                f"the gradients of the loss of {samples.what} are not twice as large if backward starts from 2 instead "
                f"of 1, because of {' or '.join(detector.names)}, but a plan multiplies the loss of a part with its "
                "share of the batch; let backward(ctx, grad_output) multiply what it returns with grad_output, and "
                "hooks not clamp or normalize, or train with one microbatch on one rank"
            )

    def _require_gradients_of_parts(self, loss_function: LossFunction, samples: LossSamples) -> None:
        """Check, once, that the gradients of a few samples are what those of two parts of them add up to.

        Losses that add up may have others: ``a / a.detach()`` is 1 for any samples.

        Args:
            loss_function: the user's, with the parameters of this step.
            samples: from which it is computed.

        Raises:
            DataError: they are not.
        """
        is_known = self.next_step != math.inf and samples.are_along_dim_0 and not samples.has_plain_list
        if self.has_compared_gradients or not is_known:
            return
        self.has_compared_gradients = True

        def differentiate(part: LossSamples) -> tuple[list[Tensor | None], float, torch.dtype]:
            """Return the gradients of the outputs, the weight of the loss, and its dtype."""
            output = tree_map(_as_leaf, part.output)
            leaves = [leaf for leaf in tensor_leaves(output) if leaf.requires_grad]
            loss = compute_mean_loss(loss_function, output, part.targets, part.what, is_whole=True, is_sum=self.is_sum)
            grads = torch.autograd.grad(loss.mean, leaves, allow_unused=True)
            weight = float(part.num_samples if loss.weight is None else loss.weight)
            return [*grads], 1.0 if self.is_sum else weight, loss.mean.dtype

        try:  # a loss need not take another number of samples
            few = samples.take(0, min(MAX_DIFFERENTIATED, samples.num_samples), cuts_lists=False)
            few = few if few.num_samples > 1 else few.join(few.halve(), cuts_lists=False)
            middle = few.num_samples // 2
            grads, weight, dtype = differentiate(few)
            halves = [
                differentiate(few.take(start, stop, cuts_lists=False))
                for start, stop in ((0, middle), (middle, few.num_samples))
            ]
        except Exception:  # noqa: BLE001 - as above; what the loss cannot do at all ends the step itself
            return
        weights = [own for _, own, _ in halves]
        if not self.is_sum and not (all(weights) and math.isclose(sum(weights), weight, rel_tol=1e-6)):
            return  # means of different kinds, which have no common mean
        parts = [
            [None if grad is None else grad * (own / weight) for grad in of_half]
            for (of_half, _, _), own in zip(halves, weights, strict=True)
        ]
        sums = [None if one is None or two is None else join(one, two) for one, two in zip(*parts, strict=True)]
        error = max(gradient_errors(grads, sums, torch.finfo(dtype).eps), default=0.0)
        if error:
            raise DataError(
                f"the gradients of the loss at {samples.what} are not those of its parts: for {few.num_samples} "
                f"samples they differ from the sum of the gradients of two halves by {error:.1e} of the largest value, "
                "as where a value of all samples is left out of the graph by detach(), item() or "
                f"torch.no_grad(); compute it from each sample alone; {self.remedy or OTHER_REMEDY}"
            )

    def _losses_of_parts(
        self, loss_function: LossFunction, samples: LossSamples, total: LossValue, *, is_read: bool = True
    ) -> Iterator[list[LossOfParts]]:
        """Yield losses of two parts of samples, and of both; for one kind of parts once, or with lists cut and whole.

        One or two samples are compared with others, too, which are made of them: a median of two samples is a mean. A
        single sample is compared with the next one, which may have targets of another kind, such as padding. One of two
        samples is also taken twice: weights by how often a batch has each class are equal for one sample of each.
        """
        num_samples = samples.num_samples
        cuts = (True, False) if samples.has_plain_list else (False,)

        def compute(
            make: Callable[[bool], tuple[LossSamples, LossSamples]], whole: LossValue | None, *, is_made: bool
        ) -> list[LossOfParts]:
            found = []
            for cuts_lists in cuts:
                # a loss need not take values that no model gives
                with suppress(Exception) if is_made or len(cuts) > 1 else nullcontext():
                    parts = make(cuts_lists)
                    with nullcontext() if is_made else _explain_other_size(samples, self.remedy or OTHER_REMEDY):
                        values = [self._compute(loss_function, part, is_read=is_read) for part in parts]
                    both = whole or self._compute(
                        loss_function, parts[0].join(parts[1], cuts_lists=cuts_lists), is_read=is_read
                    )
                    losses = LossOfParts(
                        both.mean,
                        (values[0].mean, values[1].mean),
                        (values[0].weight, values[1].weight),
                        (parts[0].num_samples, parts[1].num_samples),
                        is_made,
                    )
                    found.append(losses)
            return found

        if num_samples > 1:
            yield compute(lambda cuts: _halves(samples, cuts_lists=cuts), total, is_made=False)
        if num_samples <= 2:
            yield compute(lambda cuts: _with_half_values(samples, cuts_lists=cuts), None, is_made=True)
        if num_samples == 2:
            yield compute(lambda cuts: (samples, samples.take(0, 1, cuts_lists=cuts).halve()), None, is_made=True)
        if num_samples > 1:
            return
        earlier, self.single = self.single, None
        if earlier is not None and _sample_shapes(earlier) == _sample_shapes(samples):
            if torch.is_grad_enabled():  # of a loss that differentiates
                earlier = LossSamples(tree_map(_as_leaf, earlier.output), *earlier[1:])
            yield compute(lambda _: (samples, earlier), None, is_made=False)
            yield compute(lambda cuts: (samples.join(samples.halve(), cuts_lists=cuts), earlier), None, is_made=True)
        else:
            self.single = samples.detach()

    def _compute(
        self,
        loss_function: LossFunction,
        samples: LossSamples,
        random_functions: Mapping[TorchFunction, FunctionReplacement] = MappingProxyType({}),
        *,
        is_read: bool = True,
    ) -> LossValue:
        """Compute the loss of some samples; leave it where it is unless it is read."""
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
        weight = num_samples if loss.weight is None else loss.weight
        mean = loss.mean.detach()
        if is_read:
            return LossValue(float(mean), float(weight), mean.dtype)
        return LossValue(mean, weight, mean.dtype)  # type: ignore[arg-type]  # numbers once they are read

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


def _halves(samples: LossSamples, *, cuts_lists: bool) -> tuple[LossSamples, LossSamples]:
    """Return the first and the second half of some samples."""
    middle = samples.num_samples // 2
    return (
        samples.take(0, middle, cuts_lists=cuts_lists),
        samples.take(middle, samples.num_samples, cuts_lists=cuts_lists),
    )


def _with_half_values(samples: LossSamples, *, cuts_lists: bool) -> tuple[LossSamples, LossSamples]:
    """Return samples, and the same with half of the values; of a single sample, also with a quarter."""
    half = samples.halve()
    return samples, half if samples.num_samples > 1 else half.join(half.halve(), cuts_lists=cuts_lists)


def _differ(samples: LossSamples, first: LossValue, second: LossValue) -> bool:
    """Tell whether two losses of the same samples differ by more than rounding."""
    tolerance = _state_tolerance(samples, first.dtype) * max(abs(first.mean), abs(second.mean))
    return math.isfinite(first.mean + second.mean) and abs(first.mean - second.mean) > tolerance


@contextmanager
def _explain_other_size(samples: LossSamples, remedy: str) -> Iterator[None]:
    """Explain an error of a loss that computes on some samples, but not on parts of them."""
    try:
        yield
    except (CounterpointError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "does not require grad" in str(error):  # a loss that differentiates, which is tried again with gradients
            raise
        reason = first_line(error).strip()
        raise DataError(
            f"the loss computes on the {samples.num_samples} samples of {samples.what}, but not on parts of them: "
            f"{type(error).__name__}{f': {reason}' if reason else ''}; its code depends on the number of samples, as "
            "topk or a view of a fixed size does, so the losses of microbatches would not add up to that of the batch; "
            f"compute it for any number of samples; {remedy}"
        ) from error


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


def _as_leaf(leaf: object) -> object:
    """Return a tensor without its graph, of which gradients can be computed if it can have some."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.is_floating_point() or leaf.is_complex())


def join(first: Tensor, second: Tensor) -> Tensor:
    """Return the samples of two tensors; an autocast to fp16 refuses to join two in bf16, which need no cast."""
    with torch.autocast(first.device.type, enabled=False):
        return torch.cat([first, second])


def _halve(leaf: object, *, times: int) -> object:
    return leaf / 2**times if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _repeat(leaf: object, *, num_samples: int, total: int) -> object:
    """Return the samples of a tensor again and again, up to a number of samples; other values as they are."""
    if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != num_samples:
        return leaf
    return leaf[torch.arange(total, device=leaf.device) % num_samples]


def _concatenate(first: object, second: object, *, joins_lists: bool) -> object:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return join(first, second)
    return [*first, *second] if joins_lists and is_plain_list(first) else second  # type: ignore[misc]


def _never(_: object) -> bool:
    return False


def _rounding_error(output: Tensor, dtype: torch.dtype) -> Tensor | float:
    """Return by how much a loss of an output may differ because of rounding, even if it is about 0; reads no value."""
    if not output.is_floating_point() or not output.numel():
        return 0.0
    eps = max(torch.finfo(output.dtype).eps, torch.finfo(dtype).eps if dtype.is_floating_point else 0.0)
    largest: Tensor = torch.linalg.vector_norm(output.detach(), torch.inf)  # which makes no copy, as abs() would
    return eps * largest.nan_to_num().double()


def find_bad_figures(figures: LossFigures, num_samples: int, *, is_sum: bool) -> Tensor:
    """Return whether a check fails, as :meth:`LossCheck.check` decides, without reading its figures.

    Args:
        figures: of the check.
        num_samples: how many samples it is of.
        is_sum: whether the loss is a sum.
    """
    first, second = (_as_number(value.mean, figures) for value in (figures.first, figures.second))
    larger = torch.maximum(first.abs(), second.abs())
    is_bad = (first + second).isfinite() & ((first - second).abs() > figures.state_tolerance * larger)
    if figures.value is None:
        return is_bad
    value, absolute = (_as_number(number, figures) for number in (figures.value, figures.absolute))
    is_other = (first - value).abs() > 2 * figures.relative * first.abs() + absolute
    is_skipped = ~first.isnan() & is_other
    if num_samples > 1:
        is_skipped = is_skipped | first.isnan()
    for kind in filter(None, figures.kinds):
        counts, adds_up = zip(*(_compare_parts(losses, figures, is_sum=is_sum) for losses in kind), strict=True)
        some_count, some_add_up = (torch.stack(flags).any() for flags in (counts, adds_up))
        is_bad = is_bad | (some_count & ~some_add_up & ~is_skipped)
    return is_bad


def _compare_parts(losses: LossOfParts, figures: LossFigures, *, is_sum: bool) -> tuple[Tensor, Tensor]:
    """Return whether losses count, and whether they do and add up."""
    total, *parts = (_as_number(number, figures) for number in (losses.total, *losses.parts))
    combined, tensors = parts[0] + parts[1], torch.stack([total, *parts])
    counts = (total + combined if losses.is_made else total).isfinite()
    if not is_sum:
        weights = [_as_number(number, figures) for number in losses.weights]
        weight = weights[0] + weights[1]
        mean = (parts[0] * weights[0] + parts[1] * weights[1]) / weight
        combined = torch.where(weight == 0, torch.zeros_like(mean), mean)
    magnitude = torch.where(tensors.isfinite(), tensors.abs(), torch.zeros_like(tensors)).sum()
    tolerance = figures.relative * magnitude + _as_number(figures.absolute, figures)
    return counts, counts & ((total - combined).abs() <= tolerance)


def _as_number(value: Tensor | float, figures: LossFigures) -> Tensor:
    """Return a figure as a float64 where the loss is."""
    if isinstance(value, Tensor):
        return value.detach().double()
    mean: Any = figures.first.mean
    return torch.full((), float(value), dtype=torch.float64, device=mean.device)


def _is_same_loss(again: float, value: float, relative: float, absolute: float) -> bool:
    """Return whether a loss that is computed again is that of the step; another one draws random numbers."""
    return abs(again - value) <= 2 * relative * abs(again) + absolute


def _state_tolerance(samples: LossSamples, dtype: torch.dtype) -> float:
    """Return by how much a loss of this dtype may differ from the same one computed again, relative to the larger."""
    outputs = [leaf for leaf in tree_leaves(samples.output) if isinstance(leaf, Tensor)]
    return max((_relative_tolerance(leaf, dtype) for leaf in outputs), default=0.05)


def _relative_tolerance(output: Tensor, dtype: torch.dtype) -> float:
    """Return by how much a loss of this dtype, of such an output, may differ because of rounding."""
    return max(RELATIVE_TOLERANCES.get(one, 0.05) for one in (dtype, output.dtype) if one.is_floating_point)


def _take_samples(leaf: object, *, num_samples: int, first: int, stop: int) -> object:
    has_samples = isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == num_samples
    if has_samples or (is_plain_list(leaf) and len(leaf) == num_samples):  # type: ignore[arg-type]
        return leaf[first:stop]  # type: ignore[index]
    return leaf
