"""Driver of a training on Spark: one job computes gradients, a second one updates the weights and publishes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from counterpoint.data.sampler import Cursor
from counterpoint.errors import DataError, PlanError
from counterpoint.optim.validation import require_counts
from counterpoint.runtime.commit.step_commit import (
    StepGuard,
    StepReport,
    StepResult,
    decide_step,
    find_unused_params,
    merge_parts,
    require_all_used,
    require_finite,
)
from counterpoint.spark.shuffle import Shuffle, ShuffleData, ShuffleMessage, ShuffleMessageKind
from counterpoint.spark.tasks import (
    BatchAssignment,
    ForwardBackwardTask,
    PartitionReport,
    ReduceGradient,
    UpdateSlice,
    decode_report,
)
from counterpoint.spark.training_spec import TrainingSpec, UnusedParameters
from counterpoint.spark.weight_slices import SliceCodec
from counterpoint.training.checkpointing.save_restore import TrainProgress

MARGIN = 1.01
"""Factor on the time of the slowest partition that is still accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerPolicy:
    """When partitions stop computing a step, and when the whole step is skipped because of that.

    Args:
        drop_fraction: fraction of partitions that may exceed the time limit, in the long run.
        max_missing_fraction: fraction of a batch's samples that may be missing; above it nothing is updated.
        warmup_steps: first steps, without a time limit.
        update_every: steps between updates of the time limit, which is set from the times of these steps.

    Promise:
        The gradient is that of the mean loss over the samples computed in time. Which samples these are depends on
        timing, so runs differ, and a task that runs again may drop others.

    Source:
        BigDL's DistriOptimizer: dropPercentage, maxDropPercentage, warmupIterationNum, computeThresholdbatchSize.
    """

    drop_fraction: float = 0.05
    max_missing_fraction: float = 0.5
    warmup_steps: int = 20
    update_every: int = 20

    def __post_init__(self) -> None:
        require_counts(update_every=self.update_every)
        if not (0 < self.drop_fraction < 1 and 0 < self.max_missing_fraction <= 1 and self.warmup_steps >= 1):
            raise PlanError(
                f"drop_fraction={self.drop_fraction}, max_missing_fraction={self.max_missing_fraction}, "
                f"warmup_steps={self.warmup_steps} are out of range; give fractions "
                "between 0 and 1, and at least 1 warm-up step"
            )

    def is_missing_too_many(self, finished: int, batch_len: int) -> bool:
        """Return whether more samples of a batch are missing than allowed.

        Example:
            >>> policy = StragglerPolicy(max_missing_fraction=0.25)
            >>> policy.is_missing_too_many(75, 100), policy.is_missing_too_many(74, 100)
            (False, True)
        """
        return finished < (1 - self.max_missing_fraction) * batch_len


def straggler_limit_s(seconds: Sequence[float], fraction: float) -> float:
    """Return the time limit that a fraction of the measured partitions would have exceeded.

    Args:
        seconds: measured compute times, at least one.
        fraction: fraction of partitions above the limit.

    Example:
        >>> round(straggler_limit_s([1.0, 2.0, 3.0, 4.0], 0.25), 2)
        3.03
    """
    num_late = min(int(len(seconds) * fraction), len(seconds) - 1)
    return MARGIN * sorted(seconds)[len(seconds) - 1 - num_late]


class TimeLimit:
    """Time limit of a run, updated every few steps.

    Args:
        policy: None for no limit.
    """

    def __init__(self, policy: StragglerPolicy | None) -> None:
        self.policy = policy
        self.seconds: float | None = None
        self._times: list[float] = []
        self._steps = 0

    def record_step(self, times: Sequence[float]) -> None:
        """Record the compute times of one step, without partitions that had no samples."""
        if self.policy is None:
            return
        self._steps += 1
        self._times += times
        if (
            self._steps >= self.policy.warmup_steps
            and (self._steps - self.policy.warmup_steps) % self.policy.update_every == 0
            and self._times
        ):
            self.seconds = straggler_limit_s(self._times, self.policy.drop_fraction)
            self._times = []


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkOptions:
    """Options of a training in two Spark jobs per step.

    Args:
        batch_size: samples of one *global* batch over all partitions; it needs no particular divisor.
        epochs: passes over the data.
        max_steps: maximum steps of the whole run, including those before a resume.
        num_microbatches: microbatches into which each partition splits its part of a batch.
        seed: of the sample order and of the model's random numbers.
        step_guard: gradient clipping, and the handling of a non-finite loss.
        lr_lambda: maps the step to a factor of the learning rate.
        codec: ``bf16`` sends gradients and published weights in 16 bits, rounded to nearest; sums and updates use the
            dtype of the weights.
        unused_parameters: meaning of a parameter without a gradient: ``error``, or ``zero`` for a zero gradient.
        checkpoint_dir: folder of checkpoints, visible to the driver; one is written at the end.
        save_every: steps between further checkpoints.
        keep_last: number of checkpoints to keep; None keeps all.
        snapshot_every: steps after which the slices are collected at the driver and published again. This bounds what
            Spark has to recompute for a lost executor, and the number of shuffle files.
        straggler_policy: skips the microbatches of slow partitions; None never skips.
        max_retries: number of times that the run restarts from the last collected slices after Spark has aborted a job,
            which it does when a task has failed several times; after that the error is raised.

    Raises:
        PlanError: a number is out of range.
    """

    batch_size: int
    epochs: int = 1
    max_steps: int | None = None
    num_microbatches: int = 1
    seed: int = 0
    step_guard: StepGuard = field(default_factory=StepGuard)
    lr_lambda: Callable[[int], float] | None = None
    codec: SliceCodec = ""
    unused_parameters: UnusedParameters = "error"
    checkpoint_dir: Path | None = None
    save_every: int | None = None
    keep_last: int | None = 3
    snapshot_every: int = 20
    straggler_policy: StragglerPolicy | None = None
    max_retries: int = 0

    def __post_init__(self) -> None:
        require_counts(
            batch_size=self.batch_size,
            epochs=self.epochs,
            num_microbatches=self.num_microbatches,
            snapshot_every=self.snapshot_every,
        )
        require_counts(optional=True, max_steps=self.max_steps, save_every=self.save_every, keep_last=self.keep_last)
        if self.step_guard.loss_scale is not None:
            raise PlanError(
                f"loss_scale={self.step_guard.loss_scale} has no effect on Spark, which trains in the dtype of the "
                "model on CPUs; omit it"
            )
        if type(self.max_retries) is not int or self.max_retries < 0:
            raise PlanError(f"max_retries={self.max_retries!r} is not a count; give 0, 1, 2, ...")

    def num_steps(self, num_batches: int) -> int:
        """Return the number of steps of the whole run."""
        steps = self.epochs * num_batches
        return steps if self.max_steps is None else min(steps, self.max_steps)


@dataclass(frozen=True, slots=True)
class SparkStep:
    """Result of a completed step.

    Args:
        progress: of the run after the step.
        loss: mean over the batch, before the update.
        num_samples: samples that were computed.
        sent_bytes: gradients and weights that partitions sent to other partitions.
        is_skipped: whether the update was skipped.
        slices: of all partitions, if they were collected at the driver in this step.
        loss_parts: of a loss that is a dict, the mean of each part over the batch.
    """

    progress: TrainProgress
    loss: float
    num_samples: int
    sent_bytes: int
    is_skipped: bool = False
    slices: tuple[bytes, ...] = ()
    loss_parts: Mapping[str, float] = field(default_factory=dict)


class SparkTrainingLoop:
    """Loop over the steps of a training, each one or two supersteps of a shuffle.

    Args:
        shuffle: between partitions that have samples.
        spec: what every task needs.
        assignment: which samples are in which partition.
        microbatches: by partition, those of its rank program.
        options: of the run.
    """

    def __init__(
        self,
        shuffle: Shuffle,
        spec: TrainingSpec,
        assignment: BatchAssignment,
        microbatches: tuple[tuple[int, ...], ...],
        options: SparkOptions,
    ) -> None:
        self.shuffle, self.spec, self.assignment, self.microbatches, self.options = (
            shuffle,
            spec,
            assignment,
            microbatches,
            options,
        )
        self.partitions = range(shuffle.num_partitions)
        self.num_batches = assignment.sampler.num_batches
        self.limit = TimeLimit(options.straggler_policy)
        self.num_steps = options.num_steps(self.num_batches)

    def run(self, slices: Sequence[bytes], progress: TrainProgress) -> Iterator[SparkStep]:
        """Yield every step from the given slices and progress to the end; the last step has the final slices.

        Raises:
            DataError: a loss is not finite, a parameter is unused, or the model or the loss failed on some samples.
            LaunchError: Spark aborted a job.
        """
        data, num_skipped = self._publish(slices, progress.step), 0
        while progress.step < self.num_steps:
            step, batch_len = progress.step, self.assignment.sampler.batch_len(progress.cursor.batch)
            data, result, sent_bytes = self._compute(data, step, progress.cursor)
            result, guard = self._apply_straggler_policy(result, batch_len)
            num_skipped = num_skipped + 1 if result.skip_reason else 0
            require_finite(result, step, num_skipped, guard)
            progress = TrainProgress(step + 1, progress.cursor.advance(self.num_batches))
            collects_state = self._collects_state(progress.step)
            data, collected, published_bytes = self._update(
                data, result, step, batch_len, collects_state=collects_state
            )
            if collects_state:
                self.shuffle.release(data)  # a retry starts from the slices, so earlier shuffle files are not needed
                data = self._publish(collected, progress.step)
            yield SparkStep(
                progress,
                result.loss,
                result.num_samples,
                sent_bytes + published_bytes,
                bool(result.skip_reason),
                tuple(collected),
                {name: total.mean for name, total in result.loss_parts.items()},
            )

    def _apply_straggler_policy(self, result: StepResult, batch_len: int) -> tuple[StepResult, StepGuard]:
        """Return the result, marked as skipped if too many samples are missing, and the guard that applies to it."""
        guard, policy = self.options.step_guard, self.options.straggler_policy
        if result.skip_reason or policy is None or not policy.is_missing_too_many(result.num_samples, batch_len):
            return result, guard
        skip_reason = f"{result.num_samples} of {batch_len} samples were computed in time"
        return replace(result, skip_reason=skip_reason), replace(guard, nonfinite="skip")

    def _collects_state(self, step: int) -> bool:
        """Return whether the slices are collected at the driver after ``step`` steps."""
        every = self.options.save_every if self.options.checkpoint_dir is not None else None
        is_saved = every is not None and step % every == 0
        return is_saved or step == self.num_steps or step % self.options.snapshot_every == 0

    def _publish(self, slices: Sequence[bytes], step: int) -> ShuffleData:
        """Send slices from the driver to their partitions, which publish the weights; runs with the next superstep."""
        messages = [
            (partition, ShuffleMessage(ShuffleMessageKind.STATE, partition, step, state))
            for partition, state in enumerate(slices)
        ]
        task = UpdateSlice(self.spec, step, len(self.partitions), is_applied=False)
        return self.shuffle.map_and_shuffle(self.shuffle.place_messages(messages), task, f"step {step}")

    def _compute(self, data: ShuffleData, step: int, cursor: Cursor) -> tuple[ShuffleData, StepResult, int]:
        """Run the first superstep: forward, backward, and a reduce-scatter of gradients."""
        label = f"forward-backward of step {step}"
        limit_s = self.limit.seconds
        task = ForwardBackwardTask(
            self.spec, self.assignment, step, cursor.epoch, cursor.batch, self.microbatches, limit_s
        )
        data = self.shuffle.map_and_shuffle(data, task, label, with_samples=True)
        reports = self._collect_reports(data, label)
        self.limit.record_step([report.seconds for report in reports if report.seconds])
        step_reports = [report.step_report for report in reports]
        self._check_unused_parameters(step_reports, step)
        guard = replace(self.options.step_guard, clip_norm=None)
        result = replace(
            decide_step(step_reports, self.partitions, guard),
            loss_parts=merge_parts(report.loss_parts for report in reports),
        )
        return data, result, sum(report.sent_bytes for report in reports)

    def _update(
        self, data: ShuffleData, result: StepResult, step: int, batch_len: int, *, collects_state: bool
    ) -> tuple[ShuffleData, list[bytes], int]:
        """Run the second superstep (and before it a third for clipping by norm): update slices, all-gather weights."""
        guard = self.options.step_guard
        scale = batch_len / result.loss_weight if result.loss_weight else 1.0  # 1 for means over samples
        is_reduced = guard.clip_norm is not None and not result.skip_reason
        if is_reduced:
            label = f"norm of step {step}"
            data = self.shuffle.map_and_shuffle(data, ReduceGradient(self.spec, step, len(self.partitions)), label)
            squares = (report.step_report.squared_norm * scale**2 for report in self._collect_reports(data, label))
            scale *= decide_step([StepReport(squared_norm=square) for square in squares], self.partitions, guard).scale
        label = f"parameter synchronization of step {step}"
        task = UpdateSlice(
            self.spec,
            step,
            len(self.partitions),
            is_applied=not result.skip_reason,
            is_reduced=is_reduced,
            collects_state=collects_state,
            lr_factor=self.options.lr_lambda(step) if self.options.lr_lambda is not None else 1.0,
            scale=scale,
            clip_value=guard.clip_value,
        )
        data = self.shuffle.map_and_shuffle(data, task, label)
        messages = self.shuffle.collect_reports(data, label)
        sent_bytes = sum(
            decode_report(message.payload).sent_bytes
            for message in messages
            if message.kind is ShuffleMessageKind.REPORT
        )
        return data, [message.payload for message in messages if message.kind is ShuffleMessageKind.STATE], sent_bytes

    def _collect_reports(self, data: ShuffleData, label: str) -> list[PartitionReport]:
        """Return the reports of all partitions.

        Raises:
            DataError: the user's model or loss failed in a partition.
        """
        messages = self.shuffle.collect_reports(data, label)
        reports = [decode_report(message.payload) for message in messages]
        for message, report in zip(messages, reports, strict=True):
            if report.failure:
                raise DataError(f"partition {message.sender} failed in the {label}: {report.failure}")
        return reports

    def _check_unused_parameters(self, reports: Sequence[StepReport], step: int) -> None:
        if self.options.unused_parameters == "error":
            busy = [report for report in reports if not report.is_idle]
            computing_ranks: Mapping[str, tuple[int, ...]] = {
                slot.name: tuple(range(len(busy))) for slot in self.spec.layout.slots
            }
            require_all_used(find_unused_params(busy, computing_ranks), step)
