"""Tasks of a partition in a superstep: compute its part of a batch, reduce a gradient slice, or update a slice."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from counterpoint.data.sampler import Sampler, split_batch
from counterpoint.errors import CounterpointError, DataError
from counterpoint.runtime.commit.step_commit import StepReport, make_step_report, merge_parts
from counterpoint.runtime.kernels.function_mode import InterceptFunctions
from counterpoint.runtime.loss.loss_check import SUMS_REMEDY, LossCheck
from counterpoint.runtime.loss.loss_reduction import PartTotal, ReductionRecorder, compute_mean_loss
from counterpoint.runtime.optimizer_spec import clip_by_value, squared_norm
from counterpoint.runtime.params.grad_check import GradCheck, GradReport
from counterpoint.runtime.rng.sample_rng import hash_seed
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
    """Which samples are in which partition, and the order in which they are read.

    Args:
        sampler: of the whole dataset, the same as for a run on one rank.
        starts: index of each partition's first sample, then the total number of samples.
        digests: checksum of each partition's samples when they were first read.
    """

    sampler: Sampler
    starts: tuple[int, ...]
    digests: tuple[str, ...]

    def local_indices(self, partition: int, epoch: int, batch: int) -> Tensor:
        """Return the indices within the partition of its samples of a batch."""
        indices = torch.from_numpy(self.sampler.batch(epoch, batch))
        low, high = self.starts[partition], self.starts[partition + 1]
        return indices[(indices >= low) & (indices < high)] - low


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """Report of a partition to the driver.

    Args:
        step_report: losses and gradient checks of the step.
        failure: error raised by the user's code; empty if there was none.
        sent_bytes: bytes sent to other partitions.
        seconds: compute time; 0 without samples.
        loss_parts: of a loss that is a dict, by name.
    """

    step_report: StepReport
    failure: str = ""
    sent_bytes: int = 0
    seconds: float = 0.0
    loss_parts: Mapping[str, PartTotal] = field(default_factory=dict)


def encode_report(report: PartitionReport) -> bytes:
    """Return a report as JSON."""
    step_report = report.step_report
    figures = [
        repr(step_report.loss_sum),
        step_report.num_samples,
        step_report.loss_weight,
        step_report.loss_kinds,
        repr(step_report.squared_norm),
        step_report.nonfinite_micro,
        repr(step_report.grads.share),
        step_report.grads.micro,
        step_report.grads.name,
    ]
    plain = {
        "numbers": figures,
        "missing": list(step_report.missing_grads),
        "idle": step_report.is_idle,
        "failure": report.failure,
        "sent": report.sent_bytes,
        "seconds": report.seconds,
        "parts": {name: [repr(number) for number in total] for name, total in report.loss_parts.items()},
    }
    return json.dumps(plain).encode()


def decode_report(text: bytes) -> PartitionReport:
    """Return the report given to ``encode_report``, including nan and inf.

    Example:
        >>> decode_report(encode_report(PartitionReport(StepReport(float("inf"), 3, 3.0, 1, 2.0, 1, ("weight",)))))
        PartitionReport(step_report=StepReport(loss_sum=inf, num_samples=3, loss_weight=3.0, loss_kinds=1, \
        squared_norm=2.0, nonfinite_micro=1, missing_grads=('weight',), checksum=0, is_idle=False, \
        grads=GradReport(micro=-1, name='', share=0.0), has_overflow=False, given_digest=0, busy_s=0.0, \
        stop_signal=0), failure='', sent_bytes=0, seconds=0.0, loss_parts={})
    """
    plain = json.loads(text)
    loss_sum, count, loss_weight, kinds, squared_norm, nonfinite_micro, share, micro, name = plain["numbers"]
    step_report = StepReport(
        float(loss_sum),
        count,
        loss_weight,
        kinds,
        float(squared_norm),
        nonfinite_micro,
        tuple(plain["missing"]),
        is_idle=plain["idle"],
        grads=GradReport(micro, name, float(share)),
    )
    loss_parts = {name: PartTotal(*map(float, total)) for name, total in plain["parts"].items()}
    return PartitionReport(step_report, plain["failure"], plain["sent"], plain["seconds"], loss_parts)


@dataclass(frozen=True, slots=True)
class ForwardBackwardTask:
    """Compute the partition's part of a batch with the newest weights, and send each gradient slice to its owner.

    Args:
        spec: of the training.
        assignment: of samples to partitions.
        step: of the run.
        epoch: of the run.
        batch: of the epoch.
        microbatches: of each partition.
        limit_s: time after which no further microbatch starts, except the first; None for no limit.
    """

    spec: TrainingSpec
    assignment: BatchAssignment
    step: int
    epoch: int
    batch: int
    microbatches: tuple[tuple[int, ...], ...]
    limit_s: float | None = None

    def __call__(self, partition: int, messages: Sequence[ShuffleMessage]) -> Iterator[AddressedMessage]:
        """Yield the gradient slices, the partition's own state, and a report."""
        num_partitions = len(self.microbatches)
        (state,) = [message for message in messages if message.kind is ShuffleMessageKind.STATE]
        yield partition, replace(state, step=self.step)
        try:
            gradient, report = self._compute(partition, messages)
        except Exception as error:  # noqa: BLE001 - any error of the user's code; Spark would retry it
            text = str(error) if isinstance(error, CounterpointError) else _format_user_error(error)
            yield (
                num_partitions,
                ShuffleMessage(
                    ShuffleMessageKind.REPORT, partition, self.step, encode_report(PartitionReport(StepReport(), text))
                ),
            )
            return
        bounds, sent_bytes = self.spec.layout.shard_bounds(num_partitions), 0
        for target in range(num_partitions):
            payload = encode_values(gradient[bounds[target] : bounds[target + 1]], self.spec.codec)
            sent_bytes += len(payload) if target != partition else 0
            yield target, ShuffleMessage(ShuffleMessageKind.GRADIENT, partition, self.step, payload)
        yield (
            num_partitions,
            ShuffleMessage(
                ShuffleMessageKind.REPORT,
                partition,
                self.step,
                encode_report(replace(report, sent_bytes=sent_bytes)),
            ),
        )

    def _compute(self, partition: int, messages: Sequence[ShuffleMessage]) -> tuple[Tensor, PartitionReport]:
        spec, microbatches = self.spec, self.microbatches[partition]
        replica = get_replica(spec)
        load_weights(spec, replica.flat, messages)
        fields = find_samples(messages, self.assignment.digests[partition], partition)
        indices = self.assignment.local_indices(partition, self.epoch, self.batch)
        batch_len = self.assignment.sampler.batch_len(self.batch)
        losses: dict[int, float] = {}
        sizes: dict[int, int] = {}
        loss_weights: dict[int, float] = {}
        loss_parts: list[dict[str, PartTotal]] = []
        began = time.perf_counter()
        replica.clear_grads()
        grad_check, is_checked = GradCheck(is_enabled=True), self.step & (self.step - 1) == 0  # 0, 1, 2, 4, 8, ...
        loss_check = LossCheck(spec.loss, is_sum=False, remedy=SUMS_REMEDY) if is_checked else None
        for microbatch, (start, stop) in zip(microbatches, split_batch(len(indices), len(microbatches)), strict=True):
            if start == stop or self._is_late(began, losses):
                continue
            *inputs, target = (field[indices[start:stop]] for field in fields)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(hash_seed(spec.seed, self.step, microbatch))
                recorder = ReductionRecorder()
                with InterceptFunctions(recorder.replacements):
                    output = replica.model(*inputs)
                what, num_samples = f"microbatch {microbatch}", stop - start
                loss, loss_weight, parts = compute_mean_loss(spec.loss, output, target, what, recorder)
                if loss_check is not None:
                    value = float(loss.detach())
                    loss_check.check(spec.loss, self.step, output, target, value, num_samples, what)
            with grad_check.check_backward(microbatch, replica.param_group):
                (loss * ((stop - start if loss_weight is None else loss_weight) / batch_len)).backward()  # type: ignore[no-untyped-call]
            losses[microbatch], sizes[microbatch] = float(loss.detach()), stop - start
            if loss_weight is not None:
                loss_weights[microbatch] = float(loss_weight)
            counts = {name: float(num_samples if own is None else own) for name, (_, own) in parts.items()}
            loss_parts.append({name: PartTotal(float(parts[name][0]) * count, count) for name, count in counts.items()})
        missing_grads = replica.params_without_grad(spec.layout)
        gradient = replica.flat_grad()
        replica.clear_grads()
        grad_squared_norm = squared_norm([gradient]) if losses else 0.0
        seconds = time.perf_counter() - began if losses else 0.0
        report = make_step_report(
            losses,
            sizes,
            grad_squared_norm,
            missing_grads,
            grads=grad_check.take_report(losses),
            loss_weights=loss_weights,
            is_idle=not losses,
        )
        return gradient, PartitionReport(report, seconds=seconds, loss_parts=merge_parts(loss_parts))

    def _is_late(self, began: float, losses: Mapping[int, float]) -> bool:
        """Return whether the next microbatch is skipped because the time limit has passed; the first never is."""
        return bool(losses) and self.limit_s is not None and time.perf_counter() - began > self.limit_s


@dataclass(frozen=True, slots=True)
class ReduceGradient:
    """Sum the parts of a gradient slice and report its squared norm, needed to clip by norm before the update.

    Args:
        spec: of the training.
        step: of the run.
        num_partitions: of the training.
    """

    spec: TrainingSpec
    step: int
    num_partitions: int

    def __call__(self, partition: int, messages: Sequence[ShuffleMessage]) -> Iterator[AddressedMessage]:
        """Yield the summed slice, the partition's own state, and a report."""
        total = sum_gradients(self.spec, messages)
        yield partition, next(message for message in messages if message.kind is ShuffleMessageKind.STATE)
        yield partition, ShuffleMessage(ShuffleMessageKind.GRADIENT, partition, self.step, encode_values(total, ""))
        total_squared = squared_norm([total]) if total.numel() else 0.0
        yield (
            self.num_partitions,
            ShuffleMessage(
                ShuffleMessageKind.REPORT,
                partition,
                self.step,
                encode_report(PartitionReport(StepReport(squared_norm=total_squared))),
            ),
        )


@dataclass(frozen=True, slots=True)
class UpdateSlice:
    """Sum the parts of a gradient slice, apply the optimizer to the partition's slice, and publish its weights.

    Args:
        spec: of the training.
        step: of the run.
        num_partitions: of the training.
        is_applied: whether to update; otherwise the weights are only published.
        is_reduced: whether the parts have been summed by :class:`ReduceGradient`.
        collects_state: whether to send the slice to the driver, too.
        lr_factor: factor of the learning rate.
        scale: factor of the gradients.
        clip_value: largest absolute value of a gradient element; None for no clipping.
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
        """Yield the slice's weights for every partition, and its state for the partition itself."""
        spec = self.spec
        text = next(message.payload for message in messages if message.kind is ShuffleMessageKind.STATE)
        weights, states = decode_slice(text)
        if self.is_applied:
            total = sum_gradients(replace(spec, codec="") if self.is_reduced else spec, messages)
            if self.scale != 1.0:
                total *= self.scale
            if self.clip_value is not None:
                clip_by_value(total, self.clip_value)
            span = partition_span(partition, self.num_partitions)
            params, gradients = (param_views(spec.layout, span, flat) for flat in (weights, total))
            new_states = update_slice(spec.slice_optimizer, params, gradients, states, self.lr_factor)
            text = encode_slice(weights, new_states)
        published = encode_values(weights, spec.codec)
        for target in range(self.num_partitions):
            yield target, ShuffleMessage(ShuffleMessageKind.WEIGHTS, partition, self.step, published)
        yield partition, ShuffleMessage(ShuffleMessageKind.STATE, partition, self.step, text)
        sent_bytes = len(published) * (self.num_partitions - 1)
        yield (
            self.num_partitions,
            ShuffleMessage(
                ShuffleMessageKind.REPORT,
                partition,
                self.step,
                encode_report(PartitionReport(StepReport(), sent_bytes=sent_bytes)),
            ),
        )
        if self.collects_state:
            yield self.num_partitions, ShuffleMessage(ShuffleMessageKind.STATE, partition, self.step, text)


def sum_gradients(spec: TrainingSpec, messages: Sequence[ShuffleMessage]) -> Tensor:
    """Return the sum of the gradient parts, in the order of their senders, in the weights' dtype."""
    parts = [
        decode_values(message.payload, spec.layout.dtype, spec.codec)
        for message in messages
        if message.kind is ShuffleMessageKind.GRADIENT
    ]
    total = parts[0]
    for gradient in parts[1:]:
        total += gradient
    return total


def load_weights(spec: TrainingSpec, flat: Tensor, messages: Sequence[ShuffleMessage]) -> None:
    """Copy the weights of all slices into the flat vector.

    Raises:
        DataError: some are missing.
    """
    slices = [
        decode_values(message.payload, flat.dtype, spec.codec)
        for message in messages
        if message.kind is ShuffleMessageKind.WEIGHTS
    ]
    whole = torch.cat(slices) if slices else flat[:0]
    if whole.numel() != flat.numel():
        raise DataError(f"{whole.numel():,} of {flat.numel():,} weights arrived; the shuffle lost the others")
    flat.copy_(whole)


def _format_user_error(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
