"""Leaving out what the slowest partitions have not computed in time: BigDL's rule, by microbatches.

A training as the driver sees it: one superstep computes gradients, a second updates and hands out weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from counterpoint.data.sampler import Cursor
from counterpoint.errors import DataError, PlanError
from counterpoint.optim.validation import require_counts
from counterpoint.runtime.step_commit import (
    StepGuard,
    StepReport,
    StepResult,
    decide_step,
    find_unused_params,
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
"""What the time of the slowest that still counts is multiplied with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerPolicy:
    """When partitions stop computing a step, and when the step is left out for that.

    Args:
        fraction: of partitions' shares that may come too late, in the long run.
        most: of the samples of a batch that may be missing; if more are, nothing is updated.
        warmup: steps of which nothing is left out.
        every: after so many steps the limit is set anew, by the times of these.

    Promise:
        The gradient is that of the mean loss over the samples that were computed in time; which these are depends on
        the clock, so runs differ, and a task that runs again may leave out others.

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
                f"drop_fraction={self.drop_fraction}, max_missing_fraction={self.max_missing_fraction}, warmup_steps={self.warmup_steps} make no sense; give fractions "
                "between 0 and 1, and 1 step or more without a limit"
            )

    def is_missing_too_many(self, finished: int, batch_len: int) -> bool:
        """Tell whether a batch lacks more samples than may be missing.

        Example:
            >>> drop = StragglerPolicy(max_missing_fraction=0.25)
            >>> drop.is_missing_too_many(75, 100), drop.is_missing_too_many(74, 100)
            (False, True)
        """
        return finished < (1 - self.max_missing_fraction) * batch_len


def straggler_limit_s(seconds: Sequence[float], fraction: float) -> float:
    """Return how long a partition may compute, so that a fraction of those that were measured would have been too slow.

    Args:
        seconds: that shares took, one or more.
        fraction: of them.

    Example:
        >>> round(straggler_limit_s([1.0, 2.0, 3.0, 4.0], 0.25), 2)
        3.03
    """
    late = min(int(len(seconds) * fraction), len(seconds) - 1)
    return MARGIN * sorted(seconds)[len(seconds) - 1 - late]


class TimeLimit:
    """The limit of a run, set anew every few steps.

    Args:
        drop: the rule; None for no limit.
    """

    def __init__(self, policy: StragglerPolicy | None) -> None:
        self.policy = policy
        self.seconds: float | None = None
        self._times: list[float] = []
        self._steps = 0

    def record_step(self, times: Sequence[float]) -> None:
        """A step is over, in which shares took so long; those of nobody's samples are not told."""
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
    """How long is trained, and how.

    Args:
        batch_size: samples of one *global* batch, over all partitions; it need not divide into anything.
        epochs: passes over the data.
        max_steps: steps of the whole run at most, those before a resume included.
        micros: into how many microbatches a partition cuts its share of a batch.
        seed: of the order of samples, and of what the model draws.
        guard: clipping, and what a loss that is not finite means.
        schedule: from the step to a factor of the learning rate.
        code: ``bf16`` for gradients and published weights in 16 bits, rounded to the nearest; sums and updates are made
            in the dtype of the weights.
        unused: what a parameter without a gradient means: ``error``, or ``zero`` for a gradient of zeros.
        save_to: folder of checkpoints, which the driver sees; written at the end.
        save_every: also save after so many steps.
        keep: how many checkpoints stay; None keeps all.
        cut_every: after so many steps slices come to the driver and begin there anew, so that what Spark would have to
            compute again for a lost executor, and its shuffle files, go back no further.
        drop: when partitions that are too slow are left out of a step, by microbatches; None for never.
        retries: so often the run goes on from the last slices that came to the driver where Spark has given up a job,
            which it does when a task has failed several times; then the error is raised.

    Raises:
        PlanError: a number makes no sense.
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
        if type(self.max_retries) is not int or self.max_retries < 0:
            raise PlanError(f"max_retries={self.max_retries!r} is no number of times; give 0 for none, or 1, 2, ...")

    def num_steps(self, num_batches: int) -> int:
        """Return how many steps the whole run has."""
        steps = self.epochs * num_batches
        return steps if self.max_steps is None else min(steps, self.max_steps)


@dataclass(frozen=True, slots=True)
class SparkStep:
    """A step is over.

    Args:
        progress: how far the run has come with it.
        loss: mean over the batch, before the update.
        num_samples: of the batch.
        sent_bytes: what places have sent to other places: gradients there, weights back.
        is_skipped: whether nothing was updated.
        slices: of all places, where they have come to the driver with this step.
    """

    progress: TrainProgress
    loss: float
    num_samples: int
    sent_bytes: int
    is_skipped: bool = False
    slices: tuple[bytes, ...] = ()


class SparkTrainingLoop:
    """A training over an exchange.

    Args:
        exchange: between places that have samples.
        recipe: what places have to know.
        share: which samples are where.
        micros: the microbatches of each place's row of the program.
        options: how long, and how.
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
        """Train from slices and a place in the run to its end; the last step has the slices that came out.

        Raises:
            DataError: a loss is not finite, a parameter is unused, or the model or the loss failed on some samples.
            LaunchError: Spark gave up a job.
        """
        held, skipped = self._publish(slices, progress.step), 0
        while progress.step < self.num_steps:
            step, whole = progress.step, self.assignment.sampler.batch_len(progress.cursor.batch)
            held, verdict, sent = self._compute(held, step, progress.cursor)
            verdict, guard = self._apply_straggler_policy(verdict, whole)
            skipped = skipped + 1 if verdict.skip_reason else 0
            require_finite(verdict.skip_reason, step, skipped, guard)
            progress = TrainProgress(step + 1, progress.cursor.advance(self.num_batches))
            is_told = self._collects_state(progress.step)
            held, told, published = self._update(held, verdict, step, whole, collects_state=is_told)
            if is_told:
                self.shuffle.release(held)  # it goes on from the slices, if at all
                held = self._publish(told, progress.step)
            yield SparkStep(
                progress, verdict.loss, verdict.num_samples, sent + published, bool(verdict.skip_reason), tuple(told)
            )

    def _apply_straggler_policy(self, result: StepResult, batch_len: int) -> tuple[StepResult, StepGuard]:
        """Return the verdict, against a step of which too much came too late, and what its fault means."""
        guard, drop = self.options.step_guard, self.options.straggler_policy
        if result.skip_reason or drop is None or not drop.is_missing_too_many(result.num_samples, batch_len):
            return result, guard
        fault = f"{result.num_samples} of {batch_len} samples were computed in time"
        return replace(result, skip_reason=fault), replace(guard, nonfinite="skip")

    def _collects_state(self, step: int) -> bool:
        """Tell whether slices come to the driver with the step that makes the run so long."""
        every = self.options.save_every if self.options.checkpoint_dir is not None else None
        is_saved = every is not None and step % every == 0
        return is_saved or step == self.num_steps or step % self.options.snapshot_every == 0

    def _publish(self, slices: Sequence[bytes], step: int) -> ShuffleData:
        """Hand out the weights of slices that are at the driver; it runs with the next superstep."""
        parcels = [
            (place, ShuffleMessage(ShuffleMessageKind.STATE, place, step, text)) for place, text in enumerate(slices)
        ]
        work = UpdateSlice(self.spec, step, len(self.partitions), is_applied=False)
        return self.shuffle.map_and_shuffle(self.shuffle.place_messages(parcels), work, f"step {step}")

    def _compute(self, data: ShuffleData, step: int, cursor: Cursor) -> tuple[ShuffleData, StepResult, int]:
        """Carry out the first superstep: forward, backward, gradients to those who update them."""
        label = f"forward-backward of step {step}"
        limit_s = self.limit.seconds
        work = ForwardBackwardTask(
            self.spec, self.assignment, step, cursor.epoch, cursor.batch, self.microbatches, limit_s
        )
        data = self.shuffle.map_and_shuffle(data, work, label, with_samples=True)
        notes = self._collect_reports(data, label)
        self.limit.record_step([note.seconds for note in notes if note.seconds])
        ballots = [note.step_report for note in notes]
        self._check_unused_parameters(ballots, step)
        guard = replace(self.options.step_guard, clip_norm=None, check_finite="gradients")
        return data, decide_step(ballots, self.partitions, guard), sum(note.sent_bytes for note in notes)

    def _update(
        self, data: ShuffleData, result: StepResult, step: int, batch_len: int, *, collects_state: bool
    ) -> tuple[ShuffleData, list[bytes], int]:
        """Carry out the second superstep, or with clipping by the norm two: sums, updates, weights to everybody."""
        guard = self.options.step_guard
        scale = batch_len / result.num_samples if result.num_samples else 1.0  # 1, but where samples came too late
        is_added = guard.clip_norm is not None and not result.skip_reason
        if is_added:
            label = f"norm of step {step}"
            data = self.shuffle.map_and_shuffle(data, ReduceGradient(self.spec, step, len(self.partitions)), label)
            squares = (note.step_report.squared_norm * scale**2 for note in self._collect_reports(data, label))
            scale *= decide_step([StepReport(squared_norm=square) for square in squares], self.partitions, guard).scale
        label = f"parameter synchronization of step {step}"
        work = UpdateSlice(
            self.spec,
            step,
            len(self.partitions),
            is_applied=not result.skip_reason,
            is_reduced=is_added,
            collects_state=collects_state,
            lr_factor=self.options.lr_lambda(step) if self.options.lr_lambda is not None else 1.0,
            scale=scale,
            clip_value=guard.clip_value,
        )
        data = self.shuffle.map_and_shuffle(data, work, label)
        parcels = self.shuffle.collect_reports(data, label)
        sent = sum(decode_report(one.payload).sent_bytes for one in parcels if one.kind is ShuffleMessageKind.REPORT)
        return data, [one.payload for one in parcels if one.kind is ShuffleMessageKind.STATE], sent

    def _collect_reports(self, data: ShuffleData, label: str) -> list[PartitionReport]:
        """Return what all places tell.

        Raises:
            DataError: code of the user's failed in one.
        """
        parcels = self.shuffle.collect_reports(data, label)
        notes = [decode_report(parcel.payload) for parcel in parcels]
        for parcel, note in zip(parcels, notes, strict=True):
            if note.failure:
                raise DataError(f"partition {parcel.sender} failed in the {label}: {note.failure}")
        return notes

    def _check_unused_parameters(self, reports: Sequence[StepReport], step: int) -> None:
        if self.options.unused_parameters == "error":
            busy = [ballot for ballot in reports if not ballot.is_idle]
            readers: Mapping[str, tuple[int, ...]] = {
                slot.name: tuple(range(len(busy))) for slot in self.spec.layout.slots
            }
            require_all_used(find_unused_params(busy, readers), step)
