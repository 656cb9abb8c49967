"""One fit: steps in the sampler's order, with evaluations and checkpoints at their times."""

from __future__ import annotations

import signal
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import optim

from counterpoint.checkpoint.file_ops import LOCAL_FILES, FileOps
from counterpoint.checkpoint.reader import state_error
from counterpoint.data.fetch import is_same_dataset
from counterpoint.data.sampler import Cursor, split_batch
from counterpoint.errors import CheckpointError, CheckpointWriteError, PlanError, StoppedBySignal
from counterpoint.optim.validation import require_counts
from counterpoint.partitioning.dry_run import check_single_sample
from counterpoint.partitioning.partitioned_model import as_call_args
from counterpoint.runtime.commit.device_commit import LateResult
from counterpoint.runtime.commit.step_commit import StepResult
from counterpoint.runtime.loss.loss_scale import DynamicLossScale, parse_loss_scale
from counterpoint.runtime.microbatches import MicrobatchSource, SlicedBatch, autocast_as, current_autocasts
from counterpoint.terminal_text import warn
from counterpoint.training.batches.batch_source import BatchSource
from counterpoint.training.batches.global_batch import (
    MicrobatchSelection,
    committed_microbatches,
    microbatches_to_read,
    require_full_batch,
)
from counterpoint.training.callbacks.callback import (
    Callback,
    CheckpointFailed,
    CheckpointSaved,
    EvaluationEnd,
    RunEnd,
    RunStart,
)
from counterpoint.training.callbacks.step_reporter import TRACED_STEP, StepReporter
from counterpoint.training.checkpointing import save_restore
from counterpoint.training.checkpointing.checkpoint_dir import CheckpointDir, claim_checkpoint_dir
from counterpoint.training.checkpointing.per_stage import (
    CheckpointMode,
    StageCheckpointer,
    require_checkpoint_mode,
)
from counterpoint.training.checkpointing.restored_options import (
    describe_options,
    require_same_options,
    restore_options,
)
from counterpoint.training.checkpointing.train_state import decode_position
from counterpoint.training.distributed_world import has_remote_ranks
from counterpoint.training.evaluation import MetricsFn, evaluate, require_metrics_function
from counterpoint.training.model_checks.validation import require_directory_path
from counterpoint.training.ranks.local_ranks import LocalRanks
from counterpoint.training.ranks.step_trace import trace_step
from counterpoint.value_codec import encode_value


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """What is evaluated after every epoch and at the end.

    Args:
        open_batches: returns the batches of the held-out data; None for no evaluation.
        metrics: the metrics function; None for the loss.
        every: evaluate after this many steps, too.

    Raises:
        PlanError: a number is not positive, or the metrics are not a function.
    """

    open_batches: Callable[[], BatchSource] | None
    metrics: MetricsFn | None
    every: int | None

    def __post_init__(self) -> None:
        require_counts(optional=True, evaluate_every=self.every)
        require_metrics_function(self.metrics)


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Where and when checkpoints are written.

    Args:
        folder: the folder of all checkpoints; None for no checkpoints.
        every: save after this many steps, too.
        keep_last: how many are kept; None keeps all.
        mode: ``synchronous``, or ``per_stage`` for each pipeline stage independently, without a flush.
        files: file operations; tests pass failing ones.

    Raises:
        PlanError: a time is given without a folder, or a number is not positive.
        CheckpointError: there is a file at the path of the folder.
    """

    folder: Path | None
    every: int | None
    keep_last: int | None
    mode: CheckpointMode
    files: FileOps = LOCAL_FILES

    def __post_init__(self) -> None:
        if self.every is not None and self.folder is None:
            raise PlanError(f"save_every={self.every} needs a folder; give checkpoint_dir=FOLDER as well")
        require_counts(optional=True, save_every=self.every, keep_last=self.keep_last)
        require_directory_path(self.folder)


@dataclass(frozen=True, slots=True)
class FitConfig:
    """What a fit does.

    Args:
        num_epochs: passes over the dataset.
        max_steps: the largest number of steps.
        evaluation: what is evaluated.
        checkpoint: where checkpoints are.
        resume: what it continues from, if anything.

    Raises:
        PlanError: a number is not positive.
    """

    num_epochs: int
    max_steps: int | None
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    resume: save_restore.ResumeConfig | None = None

    def __post_init__(self) -> None:
        require_counts(epochs=self.num_epochs)
        require_counts(optional=True, max_steps=self.max_steps)

    def without_outputs(self) -> FitConfig:
        """Return the same steps without evaluations, checkpoints and worker processes."""
        return replace(
            self,
            evaluation=EvaluationConfig(None, self.evaluation.metrics, None),
            checkpoint=CheckpointConfig(None, None, None, "synchronous"),
            resume=None,
        )


SIGNAL_PERIOD_S = 2.0
"""Seconds between two exchanges of signals among ranks that commit separately; a longer step delays one."""


class SignalExchange:
    """When ranks that commit on their own exchange signals: after the first step, then about once in a period.

    The steps are the same on all ranks, because all know how long the slowest one has taken.
    """

    def __init__(self) -> None:
        self._last_step = self._next_step = 0
        self._last_s = 0.0

    def start(self, step: int) -> None:
        """Start to count at a step."""
        self._last_step, self._next_step, self._last_s = step, step + 1, time.monotonic()

    def is_due(self, step: int) -> bool:
        """Return whether to exchange signals after so many steps."""
        return step >= self._next_step

    def waited_s(self) -> float:
        """Return the seconds since the last exchange."""
        return time.monotonic() - self._last_s

    def plan_next(self, step: int, seconds: float) -> None:
        """Plan the next exchange.

        Args:
            step: steps taken by now.
            seconds: since the last exchange, of the slowest rank.
        """
        num_steps = max(step - self._last_step, 1)
        factor = min(SIGNAL_PERIOD_S / max(seconds, 1e-9), 2.0)  # the next steps may be slower than the last ones
        self._last_step, self._last_s = step, time.monotonic()
        self._next_step = step + max(int(num_steps * factor), 1)


class AheadBatch(NamedTuple):
    """A batch that was read while an earlier step computes.

    Args:
        step: that will finish it.
        batch: it; None if it could not be read.
        error: why not.
    """

    step: int
    batch: MicrobatchSource | None
    error: Exception | None = None


class FitLoop:
    """One fit of the local ranks.

    Args:
        local_ranks: the ranks.
        batches: the training data.
        config: evaluations and checkpoints.
        lr_scheduler: the learning rate scheduler, if any.
        callbacks: called at every event.

    Attributes:
        run_id: of the run, once it has a folder for checkpoints; of the run that it continues from the start.
        num_failed_saves: the checkpoints that the disk did not take.
    """

    def __init__(
        self,
        local_ranks: LocalRanks,
        batches: BatchSource,
        config: FitConfig,
        lr_scheduler: optim.lr_scheduler.LRScheduler | None,
        callbacks: Iterable[Callback],
    ) -> None:
        self.local_ranks = local_ranks
        self.batches = batches
        self.config = config
        self.lr_scheduler = lr_scheduler
        self.callbacks = list(callbacks)
        world = local_ranks.world
        self.reporter = StepReporter(self.callbacks, world.fabrics[0].num_ranks if has_remote_ranks(world) else 1)
        self.progress = self.first_progress = save_restore.TrainProgress()
        self.num_extra_steps = 0  # that were taken because batches were smaller before a resume
        self.resume_path: Path | None = None
        self.checkpoint_path: Path | None = None  # that was loaded
        self.last_evaluation_step = -1
        self.run_id = ""
        self.checkpoint_dir: CheckpointDir | None = None  # that is held
        self.saved_step = -1  # of the newest checkpoint
        self.num_failed_saves = 0
        self.saved_path: Path | None = None
        self.stop_signal = 0  # that ends the fit before its last step
        self.stop_step: int | None = None  # at which it ends then
        self.signal_exchange = SignalExchange()
        self.stage_checkpointer: StageCheckpointer | None = None
        self.committed_microbatches: list[int] = []  # if other processes have ranks, too
        self.ahead: AheadBatch | None = None  # that no step has used

    @property
    def num_steps(self) -> int | None:
        """The steps of the whole run; None if only the end of its data will tell."""
        counts = [] if self.config.max_steps is None else [self.config.max_steps]
        num_batches = self.batches.num_batches
        if num_batches is not None:
            counts.append(self.config.num_epochs * num_batches + self.num_extra_steps)
        return self.first_progress.step + min(counts) if counts else None

    @property
    def is_finished(self) -> bool:
        """Whether there is no step left."""
        num_steps = self.num_steps
        is_last_step = num_steps is not None and self.progress.step >= num_steps
        return is_last_step or self.progress.cursor.epoch >= self.first_progress.cursor.epoch + self.config.num_epochs

    def continue_from(self, done: save_restore.TrainProgress, run_id: str) -> None:
        """Count on from an earlier fit of this run, at the start of the epoch after its last one."""
        self.run_id = run_id
        epoch = done.cursor.epoch + (done.cursor.batch > 0)
        self.progress = self.first_progress = save_restore.TrainProgress(done.step, Cursor(epoch, 0))

    def run(self) -> None:
        """Take all remaining steps.

        Raises:
            StoppedBySignal: a signal has asked to stop: after a step, with a checkpoint if there is a folder for them.
            CheckpointError: there is no usable folder for checkpoints, or the last one could not be written.
        """
        ranks, progress, checkpoint = self.local_ranks, self.progress, self.config.checkpoint
        assert ranks.compiled is not None, "built"
        event = RunStart(
            ranks.compiled,
            progress.step,
            self.num_steps,
            self.batches.batch_size,
            ranks.choice,
            self.resume_path,
            self.checkpoint_path,
        )
        self.require_valid_last_batch()
        require_checkpoint_mode(self.local_ranks, checkpoint.mode, checkpoint.every)
        if checkpoint.folder is not None:
            self.checkpoint_dir = claim_checkpoint_dir(
                ranks, checkpoint.folder, self.run_id, is_new=not progress.step, files=checkpoint.files
            )
            self.run_id = self.checkpoint_dir.run_id
            if checkpoint.mode == "per_stage":
                self.stage_checkpointer = StageCheckpointer(ranks, self.checkpoint_dir, checkpoint.keep_last)
        for callback in self.callbacks:
            callback.on_start(event)
        self.start_reading()
        first_step, num_steps = self.progress.step, self.num_steps
        self.signal_exchange.start(first_step)
        traced_step = first_step + TRACED_STEP if num_steps is None else min(first_step + TRACED_STEP, num_steps - 1)
        while not self.is_finished:
            self.step(traced=self.progress.step == traced_step or self.reporter.is_trace_due)
            if self.progress.step == self.stop_step:
                self.finish_steps()
                self.save_last()
                self.local_ranks.export_at_end()
                raise StoppedBySignal(self.describe_stop(), self.stop_signal)
            if self.should_evaluate():
                self.evaluate()
            if checkpoint.every is not None and self.progress.step % checkpoint.every == 0:
                self.try_save()
        self.finish_steps()
        if self.config.evaluation.open_batches is not None and self.last_evaluation_step != self.progress.step:
            self.evaluate()
        self.local_ranks.export_at_end()
        self.save_last()

    def require_valid_last_batch(self) -> None:
        """Check that batch norm can train on the last batch of an epoch, if the run reaches it.

        Raises:
            DataError: one of its microbatches has one sample, and batch norm one value per channel of it.
        """
        cursor, count = self.progress.cursor, self.batches.last_batch_len(self.progress.cursor.epoch)
        if count is None or self.batches.num_batches is None or self.num_steps is None:
            return
        sizes = [stop - start for start, stop in split_batch(count, self.local_ranks.global_num_microbatches)]
        if 1 not in sizes or self.num_steps - self.progress.step < self.batches.num_batches - cursor.batch:
            return
        batch = self.batches.sample_batch(1)
        location = f"the last batch of an epoch has {count} samples, and microbatch {sizes.index(1)} of it has only 1"
        with self.local_ranks.stale_weights.unmarked():  # of a resumed run; the values do not matter here
            check_single_sample(self.local_ranks.model, as_call_args(batch.inputs(0)), location)

    def start_reading(self) -> None:
        """Start reading the batches that are left."""
        ranks = self.local_ranks
        assert ranks.compiled is not None, "built"
        micros = microbatches_to_read(
            ranks.compiled.step_variants[-1].program, ranks.ranks, ranks.compiled.model.input_blocks
        )
        if has_remote_ranks(ranks.world):
            program, first = ranks.compiled.step_variants[-1].program, ranks.world.fabrics[0].rank
            self.committed_microbatches = committed_microbatches(program, first)
        selection = MicrobatchSelection(
            micros, ranks.global_num_microbatches, ranks.options.timeout_s, are_kept=ranks.in_flight.lookahead > 0
        )
        num_left = None if self.num_steps is None else self.num_steps - self.progress.step
        self.batches.start(self.progress.cursor, num_left, selection)

    def is_retried(self, result: StepResult | LateResult) -> bool:
        """Return whether all ranks have skipped a step whose gradients were too large for a dynamic loss scale."""
        if not isinstance(parse_loss_scale(self.local_ranks.options.loss_scale), DynamicLossScale):
            return False
        if isinstance(result, LateResult):
            result = result.read()  # the schedule has to know before the next step
        return result.nonfinite == "gradients" and len(result.busy_s) == self.local_ranks.world.fabrics[0].num_ranks

    def step(self, *, traced: bool) -> None:
        """Take one step."""
        start_s = time.perf_counter()
        cursor, number, in_flight = self.progress.cursor, self.progress.step, self.local_ranks.in_flight
        warmup = in_flight.warmup_steps(number)
        for step in range(number, min(number + in_flight.lookahead + 1, self.next_flush())):
            if step not in in_flight.batches:
                in_flight.batches[step] = self.batch_of(step)
        for step in warmup:
            self.local_ranks.step(step, in_flight.batch_source(step))
        source, read_ahead = in_flight.batch_source(number), self.ahead_reader()
        if traced:
            result, trace = trace_step(self.local_ranks, number, source, read_ahead)
        else:
            result, trace = self.local_ranks.step(number, source, read_ahead), None
        batch = in_flight.batches.pop(number)
        if self.committed_microbatches and isinstance(batch, SlicedBatch):  # of a stream, which may differ on ranks
            rank = self.local_ranks.world.fabrics[0].rank
            require_full_batch(rank, number, result.num_samples, batch, self.committed_microbatches)
        num_samples = sum(batch.sizes.values())
        num_left = self.batches.count_left(cursor, 2)  # this batch, and whether there is another one
        self.local_ranks.optimizer_spec.after_step(lambda: not result.skip_reason)
        if self.lr_scheduler is not None and not self.is_retried(result):
            self.lr_scheduler.step()
        self.progress = save_restore.TrainProgress(number + 1, cursor.advance(cursor.batch + num_left))
        self.reporter.report(
            number,
            result,
            epoch=cursor.epoch,
            num_samples=min(result.num_samples, num_samples),
            seconds=time.perf_counter() - start_s,
            options=self.local_ranks.optimizer_spec.options(0),
            trace=trace,
        )
        if not self.stop_signal:
            self.find_stop_signal(result)

    def batch_of(self, step: int) -> MicrobatchSource:
        """Return the batch that a step finishes, read ahead or now."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None and ahead.step == step:
            if ahead.error is not None:
                raise ahead.error
            assert ahead.batch is not None, "there is no error"
            return ahead.batch
        cursor, num_later = self.progress.cursor, step - self.progress.step
        if num_later:
            cursor = replace(cursor, batch=cursor.batch + num_later)
        return self.batches.batch_at(cursor, self.local_ranks.global_num_microbatches)

    def ahead_reader(self) -> Callable[[], None] | None:
        """Return what reads the next batch and starts to copy it to the device; None on the host."""
        if self.local_ranks.accelerator.is_host:
            return None
        autocasts = current_autocasts()  # others than those of the plan, in which it is called

        def read() -> None:
            """Read the batch after those of this step, unless the pipeline is flushed before; count nothing."""
            self.local_ranks.finish_copies()  # the user's iterable may change its pinned tensors again
            step = self.progress.step + self.local_ranks.in_flight.lookahead + 1
            with autocast_as(autocasts):
                try:
                    if step >= self.next_flush(num_more=1):
                        return
                    self.ahead = AheadBatch(step, self.batch_of(step))
                except Exception as error:  # noqa: BLE001 - of the user's data, of any kind; the step raises it
                    self.ahead = AheadBatch(step, None, error)
                    return
                assert self.ahead.batch is not None, "there is no error"
                self.local_ranks.copy_ahead(step, self.ahead.batch)

        return read

    def find_stop_signal(self, result: StepResult | LateResult) -> None:
        """Find out whether a signal has asked the ranks to stop, and after which step they will, the same on all."""
        step, ranks = self.progress.step, self.local_ranks
        if ranks.knows_stop_signal:
            self.stop_signal = ranks.stop_signal_of(result)
        elif self.signal_exchange.is_due(step) or self.is_at_period_end():
            self.stop_signal, waited_s = ranks.exchange_stop_signals(self.signal_exchange.waited_s())
            self.signal_exchange.plan_next(step, waited_s)
        if self.stop_signal:
            self.stop_step = self.next_flush() if ranks.in_flight.batches else step

    def is_at_period_end(self) -> bool:
        """Tell whether all ranks wait for each other now anyway: for an evaluation, a checkpoint or a new epoch."""
        return self.progress.cursor.batch == 0 or any(self.progress.step % period == 0 for period in self.periods())

    def periods(self) -> list[int]:
        """Return the numbers of steps after which a pipeline is flushed for an evaluation or a checkpoint."""
        evaluate_every = self.config.evaluation.every if self.config.evaluation.open_batches is not None else None
        save_every = self.config.checkpoint.every if self.stage_checkpointer is None else None
        return [period for period in (evaluate_every, save_every) if period is not None]

    def describe_stop(self) -> str:
        """Return why and where the fit has ended, and how it can be continued."""
        text = f"stopped by {signal.Signals(self.stop_signal).name} after step {self.progress.step}"
        if self.saved_path is None:
            return f"{text}; nothing was saved, because no checkpoint_dir was given"
        return f"{text}; saved {self.saved_path}; the same call with resume='auto' continues from there"

    def next_flush(self, num_more: int = 0) -> int:
        """Return the step before which the pipeline must be flushed: an evaluation, a checkpoint, or a new epoch.

        Args:
            num_more: the batches after those in flight that may be read to find the end of an epoch.
        """
        step, cursor, num_steps = self.progress.step, self.progress.cursor, self.num_steps
        next_times = [step - step % period + period for period in self.periods()]
        next_times += [] if num_steps is None else [num_steps]
        if self.stop_signal:
            next_times.append(step + len(self.local_ranks.in_flight.batches))
        num_left = self.batches.count_left(cursor, self.local_ranks.in_flight.lookahead + 1 + num_more)
        return min([step + num_left, *next_times])

    def should_evaluate(self) -> bool:
        """Tell whether to evaluate now."""
        if self.config.evaluation.open_batches is None:
            return False
        every = self.config.evaluation.every
        return self.progress.cursor.batch == 0 or (every is not None and self.progress.step % every == 0)

    def finish_steps(self) -> None:
        """Wait for the last step, and report it, if its result was left on a device.

        Raises:
            DataError: the step may not be skipped.
        """
        self.local_ranks.finish_steps()
        self.reporter.flush()

    def evaluate(self) -> None:
        """Evaluate held-out data and call the callbacks."""
        self.finish_steps()
        assert self.config.evaluation.open_batches is not None, "there is held-out data"
        batches = self.config.evaluation.open_batches()
        metrics = evaluate(self.local_ranks, batches, self.config.evaluation.metrics)
        self.last_evaluation_step = self.progress.step
        for callback in self.callbacks:
            callback.on_evaluation(EvaluationEnd(self.progress.step, metrics))

    def try_save(self) -> None:
        """Write a checkpoint; if the disk does not take it, count and report that, and train on."""
        self.finish_steps()
        try:
            if self.stage_checkpointer is None:
                self.save_synchronously()
            else:
                self.stage_checkpointer.save(self.progress, self.checkpoint_metadata())
                self.notify_completed_checkpoints()
        except CheckpointWriteError as error:
            self.num_failed_saves += 1
            event = CheckpointFailed(self.progress.step, self.num_failed_saves, str(error))
            for callback in self.callbacks:
                callback.on_checkpoint_failed(event)

    def save_last(self) -> None:
        """Write the checkpoint of the last step, unless it was written; then a failure is an error.

        Raises:
            CheckpointError: it could not be written.
        """
        if self.checkpoint_dir is None:
            return
        if self.stage_checkpointer is not None:
            self.stage_checkpointer.finish()
            self.notify_completed_checkpoints()
            self.stage_checkpointer.close()
            self.saved_step = self.stage_checkpointer.agree_on_newest(self.saved_step)
        if self.saved_step == self.progress.step:
            return
        try:
            self.save_synchronously()
        except CheckpointWriteError as error:
            saved = f"the newest is that of step {self.saved_step}" if self.saved_step >= 0 else "there is none"
            raise CheckpointError(
                f"the run has ended at step {self.progress.step} without its last checkpoint: {error}; of its earlier "
                f"ones {saved}, {self.num_failed_saves} more could not be saved"
            ) from error

    def notify_completed_checkpoints(self) -> None:
        """Call the callbacks for checkpoints to which the last stage has added its part."""
        assert self.stage_checkpointer is not None, "stages save independently"
        for step, path in self.stage_checkpointer.pop_completed():
            self.notify_checkpoint(step, path)

    def notify_checkpoint(self, step: int, path: Path) -> None:
        """Note that a checkpoint was written, and call the callbacks."""
        self.saved_step, self.saved_path = step, path
        for callback in self.callbacks:
            callback.on_checkpoint(CheckpointSaved(step, path))

    def save_synchronously(self) -> None:
        """Write a checkpoint with all other ranks and call the callbacks."""
        assert self.checkpoint_dir is not None, "there is a folder"
        path = save_restore.save_checkpoint(
            self.local_ranks,
            self.checkpoint_dir,
            self.progress,
            self.checkpoint_metadata(),
            keep_last=self.config.checkpoint.keep_last,
        )
        self.notify_checkpoint(self.progress.step, path)

    def checkpoint_metadata(self) -> dict[str, Any]:
        """Return the metadata of a checkpoint, in addition to tensors and cursor."""
        return {
            **describe_options(self.local_ranks.optimizer_spec, self.lr_scheduler),
            **self.batches.metadata(),
            "data": b64encode(
                encode_value(self.batches.state_at(self.progress.cursor), "the data's position")
            ).decode(),
        }

    def resume(self, config: save_restore.ResumeConfig) -> None:
        """Continue from a checkpoint, if there is one.

        Raises:
            CheckpointError: there is none where one is needed, or it is of another model, dataset, batch size, seed or
                optimizer; nothing has changed.
        """
        path = self.resume_path = config.path
        checkpoint = save_restore.find_checkpoint_together(self.local_ranks, config)
        if checkpoint is None:
            return
        save_restore.require_same_architecture(self.local_ranks, checkpoint)
        state: Any = checkpoint.state
        metadata, step = state["extra"], int(state["step"])
        size = self.batches.batch_size
        is_new_size = config.batch_size == "new" and metadata.get("batch_size", size) != size
        self.require_same_config(path, metadata, is_new_size=is_new_size)
        position, cursor = decode_position(checkpoint), Cursor.from_dict(state["cursor"])
        require_same_options(self.local_ranks.optimizer_spec, self.lr_scheduler, checkpoint)
        if is_new_size:
            cursor = self.use_new_batch_size(checkpoint.folder, step, cursor, metadata, position)
        self.require_steps_left(path, step)
        if not position and self.batches.num_batches is not None and cursor.batch >= self.batches.num_batches:
            raise state_error(
                checkpoint, f"state.cursor.batch is {cursor.batch}, but an epoch has {self.batches.num_batches} batches"
            )
        save_restore.restore_checkpoint(self.local_ranks, checkpoint)
        self.progress, self.checkpoint_path = save_restore.TrainProgress(step, cursor), checkpoint.folder
        self.run_id = str(state.get("run_id", ""))
        spec = self.local_ranks.optimizer_spec
        if self.local_ranks.world.fabrics[0].rank == 0:
            for group, options in zip(spec.optimizer.param_groups, metadata.get("options", ()), strict=False):
                self.warn_restored_lr(path, group, options)
        restore_options(spec, self.lr_scheduler, metadata)
        if "data" in metadata and not is_new_size:
            self.batches.load_state(cursor, position)

    def use_new_batch_size(
        self, path: Path, step: int, cursor: Cursor, metadata: Mapping[str, Any], position: Mapping[str, Any]
    ) -> Cursor:
        """Return where a run continues in batches of another size, and warn of what that changes.

        Args:
            path: of the checkpoint.
            step: the number of steps that are done.
            cursor: the next batch, in batches of the saved size.
            metadata: of the checkpoint.
            position: of the data.

        Raises:
            CheckpointError: the data have no such position.
        """
        size, new_size = int(metadata["batch_size"]), self.batches.batch_size
        moved, num_reread = self.batches.load_resized(cursor, size, position)
        text = f"the run continues at batch {moved.batch} of epoch {moved.epoch}"
        text += f", and reads {num_reread} samples of that epoch again" if num_reread else ""
        if self.batches.num_batches is not None:
            self.num_extra_steps = step - moved.epoch * self.batches.num_batches - moved.batch
            text += f"; an epoch has {self.batches.num_batches} steps"
        if self.lr_scheduler is not None:
            text += f"; the learning rate schedule, which counts steps, continues at step {step}, as saved"
        if self.local_ranks.world.fabrics[0].rank == 0:
            warn(
                f"{path} was saved with batch size {size}, and this run has {new_size}, as resume_batch_size='new' "
                f"asks: {text}; the learning rate is the saved one",
                stacklevel=4,
            )
        return moved

    def require_same_config(self, path: Path, metadata: Mapping[str, Any], *, is_new_size: bool) -> None:
        """Check that a checkpoint's metadata are those of this run.

        Args:
            path: of the checkpoint.
            metadata: of the checkpoint.
            is_new_size: whether the run may have another batch size.

        Raises:
            CheckpointError: they are not.
        """
        own, saved = self.checkpoint_metadata(), dict(metadata)
        for values in (own, saved):
            if "options" in values:  # their values are restored, their number must be equal
                values["number of parameter groups"] = len(values["options"])
        for name in ("dataset", "batch_size", "seed", "optimizer", "number of parameter groups"):
            if name not in saved or name not in own or saved[name] == own[name]:
                continue
            if (name == "dataset" and is_same_dataset(saved[name], own[name])) or (
                name == "batch_size" and is_new_size
            ):
                continue
            remedy = ", or give resume_batch_size='new'" if name == "batch_size" else ", or start a new run"
            raise CheckpointError(
                f"{path} was saved with {name.replace('_', ' ')} {saved[name]}, this run has {own[name]}; a run "
                f"can only continue with the same samples and optimizer; resume with them{remedy}"
            )

    def warn_restored_lr(self, path: Path, given: Mapping[str, Any], restored: Mapping[str, Any]) -> None:
        """Warn if the optimizer was made with another learning rate than the one in the checkpoint."""
        given_lr, restored_lr = (group.get("initial_lr", group.get("lr")) for group in (given, restored))
        if isinstance(given_lr, float) and isinstance(restored_lr, float) and given_lr != restored_lr:
            warn(
                f"the optimizer was made with lr={given_lr:g}, but {path} has {restored_lr:g}, which is restored: the "
                f"global batch is {self.batches.batch_size} samples as before, and needs no other learning rate for "
                "another number of ranks; to change it, set it in trainer.optimizer in a callback's on_start",
                stacklevel=4,
            )

    def require_steps_left(self, path: Path, step: int) -> None:
        """Check that a checkpoint is not of a later step than the last one of this run.

        Raises:
            CheckpointError: it is.
        """
        if self.num_steps is not None and step > self.num_steps:
            raise CheckpointError(
                f"{path} is of step {step}, but this run ends at step {self.num_steps}; epochs and steps are counted "
                "from the start of the run, not from the checkpoint: give more, or resume from an earlier checkpoint"
            )

    def close(self, error: BaseException | None) -> None:
        """Stop the workers, release the folder of checkpoints, and call the callbacks' ``on_end``."""
        self.local_ranks.finish_copies()
        self.reporter.end(error)
        self.batches.close()
        if self.stage_checkpointer is not None:
            self.stage_checkpointer.close()
        if self.checkpoint_dir is not None:
            self.checkpoint_dir.release()
        for callback in self.callbacks:
            callback.on_end(RunEnd(self.progress.step, error))
