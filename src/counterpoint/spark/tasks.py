"""What a place does in a superstep: compute a share of a batch, or update a slice."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from counterpoint.data.sampler import Sampler, split_batch
from counterpoint.errors import CounterpointError, DataError
from counterpoint.runtime.optimizer_spec import clip_by_value, squared_norm
from counterpoint.runtime.rng import hash_seed
from counterpoint.runtime.step_commit import StepReport, make_step_report
from counterpoint.spark.samples import find_samples
from counterpoint.spark.shuffle import AddressedMessage, ShuffleMessage, ShuffleMessageKind
from counterpoint.spark.training_spec import TrainingSpec, get_replica
from counterpoint.spark.weight_slices import (
    decode_slice,
    decode_values,
    encode_slice,
    encode_values,
    param_views,
    partition_span,
    update_slice,
)


@dataclass(frozen=True, slots=True)
class BatchAssignment:
    """Which samples are where, and in which order they are read.

    Args:
        sampler: of the whole dataset, the same as of a run on one rank.
        starts: the number of each place's first sample, and behind the last that of all samples.
        digests: of each place's samples, as they were when they were first read.
    """

    sampler: Sampler
    starts: tuple[int, ...]
    digests: tuple[str, ...]

    def local_indices(self, partition: int, epoch: int, batch: int) -> Tensor:
        """Return which of a place's samples are in a batch, counted from its first."""
        indices = torch.from_numpy(self.sampler.batch(epoch, batch))
        low, high = self.starts[partition], self.starts[partition + 1]
        return indices[(indices >= low) & (indices < high)] - low


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """What a place tells the driver.

    Args:
        ballot: what it knows of the step.
        failure: what went wrong in code of the user's, empty if nothing did.
        sent_bytes: of what it has sent to other places.
        seconds: how long it computed its samples; 0 where it had none.
    """

    step_report: StepReport
    failure: str = ""
    sent_bytes: int = 0
    seconds: float = 0.0


def encode_report(report: PartitionReport) -> bytes:
    """Return a note as JSON."""
    ballot = report.step_report
    numbers = [repr(ballot.loss_sum), ballot.num_samples, repr(ballot.squared_norm), ballot.nonfinite_micro]
    plain = {
        "numbers": numbers,
        "missing": list(ballot.missing_grads),
        "idle": ballot.is_idle,
        "failure": report.failure,
        "sent": report.sent_bytes,
        "seconds": report.seconds,
    }
    return json.dumps(plain).encode()


def decode_report(text: bytes) -> PartitionReport:
    """Return what ``encode_report`` was given; nan and inf among it.

    Example:
        >>> decode_report(encode_report(PartitionReport(StepReport(float("inf"), 3, 2.0, 1, ("weight",)))))
        PartitionReport(step_report=StepReport(loss_sum=inf, num_samples=3, squared_norm=2.0, nonfinite_micro=1, missing_grads=('weight',), checksum=0, \
is_idle=False), failure='', sent_bytes=0, seconds=0.0)
    """
    plain = json.loads(text)
    loss_sum, count, squared, worst = plain["numbers"]
    ballot = StepReport(float(loss_sum), count, float(squared), worst, tuple(plain["missing"]), is_idle=plain["idle"])
    return PartitionReport(ballot, plain["failure"], plain["sent"], plain["seconds"])


@dataclass(frozen=True, slots=True)
class ForwardBackwardTask:
    """Compute the place's share of a batch with the newest weights; its gradient goes to those who update, in slices.

    Args:
        recipe: of the training.
        share: which samples.
        step: of the run.
        epoch: which.
        batch: of the epoch.
        micros: the microbatches of each place.
        limit_s: no microbatch but the first is begun after so long; None for no limit.
    """

    spec: TrainingSpec
    assignment: BatchAssignment
    step: int
    epoch: int
    batch: int
    microbatches: tuple[tuple[int, ...], ...]
    limit_s: float | None = None

    def __call__(self, partition: int, messages: Sequence[ShuffleMessage]) -> Iterator[AddressedMessage]:
        """Yield slices of the gradient, the place's own state, and a note."""
        num_places = len(self.microbatches)
        (state,) = [one for one in messages if one.kind is ShuffleMessageKind.STATE]
        yield partition, replace(state, step=self.step)
        try:
            gradient, ballot, seconds = self._compute(partition, messages)
        except Exception as error:  # noqa: BLE001 - whatever the model or the loss raise; Spark would only try again
            text = str(error) if isinstance(error, CounterpointError) else _format_user_error(error)
            yield (
                num_places,
                ShuffleMessage(
                    ShuffleMessageKind.REPORT, partition, self.step, encode_report(PartitionReport(StepReport(), text))
                ),
            )
            return
        bounds, sent = self.spec.layout.shard_bounds(num_places), 0
        for target in range(num_places):
            payload = encode_values(gradient[bounds[target] : bounds[target + 1]], self.spec.codec)
            sent += len(payload) if target != partition else 0
            yield target, ShuffleMessage(ShuffleMessageKind.GRADIENT, partition, self.step, payload)
        yield (
            num_places,
            ShuffleMessage(
                ShuffleMessageKind.REPORT,
                partition,
                self.step,
                encode_report(PartitionReport(ballot, "", sent, seconds)),
            ),
        )

    def _compute(self, partition: int, messages: Sequence[ShuffleMessage]) -> tuple[Tensor, StepReport, float]:
        recipe, micros = self.spec, self.microbatches[partition]
        replica = get_replica(recipe)
        load_weights(recipe, replica.flat, messages)
        fields = find_samples(messages, self.assignment.digests[partition], partition)
        rows = self.assignment.local_indices(partition, self.epoch, self.batch)
        whole = self.assignment.sampler.batch_len(self.batch)
        losses: dict[int, float] = {}
        sizes: dict[int, int] = {}
        began = time.perf_counter()
        replica.clear_grads()
        for micro, (low, high) in zip(micros, split_batch(len(rows), len(micros)), strict=True):
            if low == high or self._is_late(began, losses):
                continue
            *inputs, target = (field[rows[low:high]] for field in fields)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(hash_seed(recipe.seed, self.step, micro))
                loss = recipe.loss(replica.model(*inputs), target)
            (loss * ((high - low) / whole)).backward()  # type: ignore[no-untyped-call]
            losses[micro], sizes[micro] = float(loss.detach()), high - low
        missing = replica.params_without_grad(recipe.layout)
        gradient = replica.flat_grad()
        replica.clear_grads()
        squared = squared_norm([gradient]) if losses else 0.0
        seconds = time.perf_counter() - began if losses else 0.0
        return gradient, make_step_report(losses, sizes, squared, missing, is_idle=not losses), seconds

    def _is_late(self, began: float, losses: Mapping[int, float]) -> bool:
        """Tell whether the next microbatch is left out because the place is too slow; its first one never is."""
        return bool(losses) and self.limit_s is not None and time.perf_counter() - began > self.limit_s


@dataclass(frozen=True, slots=True)
class ReduceGradient:
    """Add up the slices of a gradient, and say how long it is: what clipping by the norm has to know before an update.

    Args:
        recipe: of the training.
        step: of the run.
        num_places: how many there are.
    """

    spec: TrainingSpec
    step: int
    num_partitions: int

    def __call__(self, partition: int, messages: Sequence[ShuffleMessage]) -> Iterator[AddressedMessage]:
        """Yield the place's slice of the sum, its own state, and a note."""
        total = sum_gradients(self.spec, messages)
        yield partition, next(one for one in messages if one.kind is ShuffleMessageKind.STATE)
        yield partition, ShuffleMessage(ShuffleMessageKind.GRADIENT, partition, self.step, encode_values(total, ""))
        squared = squared_norm([total]) if total.numel() else 0.0
        yield (
            self.num_partitions,
            ShuffleMessage(
                ShuffleMessageKind.REPORT,
                partition,
                self.step,
                encode_report(PartitionReport(StepReport(squared_norm=squared))),
            ),
        )


@dataclass(frozen=True, slots=True)
class UpdateSlice:
    """Add up the slices of a gradient, apply the optimizer to the place's slice, and publish it.

    Args:
        recipe: of the training.
        step: of the run.
        num_places: how many there are.
        is_applied: whether anything is updated; else weights are published as they are.
        is_added: whether the slices are added up already.
        is_told: whether the driver is told the slice, too.
        lr_factor: what the learning rate is multiplied with.
        scale: what gradients are multiplied with.
        clip_value: what numbers of the gradient are brought to at most.
    """

    spec: TrainingSpec
    step: int
    num_partitions: int
    is_applied: bool = True
    is_reduced: bool = False
    collects_state: bool = False
    lr_factor: float = 1.0
    scale: float = 1.0
    clip_value: float | None = None

    def __call__(self, partition: int, messages: Sequence[ShuffleMessage]) -> Iterator[AddressedMessage]:
        """Yield the slice's weights for everybody and its state for the place itself."""
        recipe = self.spec
        text = next(one.payload for one in messages if one.kind is ShuffleMessageKind.STATE)
        weights, states = decode_slice(text)
        if self.is_applied:
            total = sum_gradients(replace(recipe, codec="") if self.is_reduced else recipe, messages)
            if self.scale != 1.0:
                total *= self.scale
            if self.clip_value is not None:
                clip_by_value(total, self.clip_value)
            span = partition_span(partition, self.num_partitions)
            parts, gradients = (param_views(recipe.layout, span, flat) for flat in (weights, total))
            kept = update_slice(recipe.slice_optimizer, parts, gradients, states, self.lr_factor)
            text = encode_slice(weights, kept)
        published = encode_values(weights, recipe.codec)
        for target in range(self.num_partitions):
            yield target, ShuffleMessage(ShuffleMessageKind.WEIGHTS, partition, self.step, published)
        yield partition, ShuffleMessage(ShuffleMessageKind.STATE, partition, self.step, text)
        sent = len(published) * (self.num_partitions - 1)
        yield (
            self.num_partitions,
            ShuffleMessage(
                ShuffleMessageKind.REPORT,
                partition,
                self.step,
                encode_report(PartitionReport(StepReport(), sent_bytes=sent)),
            ),
        )
        if self.collects_state:
            yield self.num_partitions, ShuffleMessage(ShuffleMessageKind.STATE, partition, self.step, text)


def sum_gradients(spec: TrainingSpec, messages: Sequence[ShuffleMessage]) -> Tensor:
    """Return the sum of gradients, in the order of those who sent them, each brought to the weights' dtype first."""
    found = [
        decode_values(one.payload, spec.layout.dtype, spec.codec)
        for one in messages
        if one.kind is ShuffleMessageKind.GRADIENT
    ]
    total = found[0]
    for gradient in found[1:]:
        total += gradient
    return total


def load_weights(spec: TrainingSpec, flat: Tensor, messages: Sequence[ShuffleMessage]) -> None:
    """The vector has the weights of all slices.

    Raises:
        DataError: it is not all of them that have come.
    """
    found = [
        decode_values(one.payload, flat.dtype, spec.codec) for one in messages if one.kind is ShuffleMessageKind.WEIGHTS
    ]
    whole = torch.cat(found) if found else flat[:0]
    if whole.numel() != flat.numel():
        raise DataError(f"{whole.numel():,} of {flat.numel():,} weights have come; the shuffle has lost the others")
    flat.copy_(whole)


def _format_user_error(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
