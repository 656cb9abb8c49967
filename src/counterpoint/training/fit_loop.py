"""One fit: steps in the sampler's order, with evaluations and checkpoints at their times."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import optim

from counterpoint.data.fetch import MapDataset, fingerprint
from counterpoint.data.loader import MicrobatchLoader, iter_microbatch_indices
from counterpoint.data.microbatch_reader import MicrobatchIndex, MicrobatchReader
from counterpoint.data.sampler import Cursor, Indices, Sampler, split_batch
from counterpoint.errors import CheckpointError, DataError, PlanError
from counterpoint.optim.validation import require_counts
from counterpoint.partitioning.dry_run import check_single_sample
from counterpoint.partitioning.partitioned_model import as_call_args
from counterpoint.training.batches.global_batch import DatasetBatch, microbatches_to_read
from counterpoint.training.callbacks.callback import (
    Callback,
    CheckpointSaved,
    EvaluationEnd,
    RunEnd,
    RunStart,
    StepEnd,
    TraceRecorded,
)
from counterpoint.training.checkpointing import save_restore
from counterpoint.training.checkpointing.per_stage import (
    CheckpointMode,
    StageCheckpointer,
    recover_drafts_together,
    require_checkpoint_mode,
)
from counterpoint.training.evaluation import MetricsFn, evaluate
from counterpoint.training.local_ranks import LocalRanks, trace_step
from counterpoint.training.optimizer_state import apply_group_options, from_json, get_group_options, to_json
from counterpoint.training.validation import require_directory_path


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """What is evaluated after every epoch and at the end.

    Args:
        dataset: held-out data; None for no evaluation.
        metrics: the metrics function.
        every: evaluate after this many steps, too.

    Raises:
        PlanError: a number is not positive.
    """

    dataset: MapDataset | None
    metrics: MetricsFn
    every: int | None

    def __post_init__(self) -> None:
        require_counts(optional=True, evaluate_every=self.every)


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Where and when checkpoints are written.

    Args:
        folder: the folder of all checkpoints; None for no checkpoints.
        every: save after this many steps, too.
        keep_last: how many are kept; None keeps all.
        mode: ``synchronous``, or ``per_stage`` for each pipeline stage independently, without a flush.

    Raises:
        PlanError: a time is given without a folder, or a number is not positive.
        CheckpointError: there is a file at the path of the folder.
    """

    folder: Path | None
    every: int | None
    keep_last: int | None
    mode: CheckpointMode

    def __post_init__(self) -> None:
        if self.every is not None and self.folder is None:
            raise PlanError(f"save_every={self.every} needs a folder; give checkpoint_dir=FOLDER as well")
        require_counts(optional=True, save_every=self.every, keep_last=self.keep_last)
        require_directory_path(self.folder)


@dataclass(frozen=True, slots=True)
class DataLoadingConfig:
    """How samples are read.

    Args:
        num_workers: processes of each rank that read; 0 for none but this one.
        prefetch_factor: microbatches that each reads ahead.

    Raises:
        PlanError: a number is not positive.
    """

    num_workers: int
    prefetch_factor: int

    def __post_init__(self) -> None:
        require_counts(prefetch_factor=self.prefetch_factor)
        require_counts(optional=True, num_workers=self.num_workers or None)


@dataclass(frozen=True, slots=True)
class FitConfig:
    """What a fit does.

    Args:
        num_epochs: passes over the dataset.
        max_steps: the largest number of steps.
        evaluation: what is evaluated.
        checkpoint: where checkpoints are.
        data_loading: how samples are read.

    Raises:
        PlanError: a number is not positive.
    """

    num_epochs: int
    max_steps: int | None
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    data_loading: DataLoadingConfig

    def __post_init__(self) -> None:
        require_counts(epochs=self.num_epochs)
        require_counts(optional=True, max_steps=self.max_steps)

    def without_outputs(self) -> FitConfig:
        """Return the same steps without evaluations, checkpoints and worker processes."""
        return replace(
            self,
            evaluation=EvaluationConfig(None, self.evaluation.metrics, None),
            checkpoint=CheckpointConfig(None, None, None, "synchronous"),
            data_loading=DataLoadingConfig(0, 1),
        )


INDEX_LOOKAHEAD = 16
"""The number of batches whose sample indices are computed at once."""


class BatchSupplier:
    """Reads the batches of a run; close it.

    Args:
        local_ranks: the ranks that read.
        dataset: the dataset.
        sampler: the order of samples.
        num_workers: processes that read; 0 for none but this one.
        prefetch_factor: microbatches that each reads ahead.
    """

    def __init__(
        self, local_ranks: LocalRanks, dataset: MapDataset, sampler: Sampler, *, num_workers: int, prefetch_factor: int
    ) -> None:
        self.local_ranks = local_ranks
        self.dataset = dataset
        self.sampler = sampler
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.index_cache: dict[tuple[int, int], Indices] = {}
        self.loader: MicrobatchLoader | None = None

    def require_same_dataset(self) -> None:
        """Check that all ranks were given the same dataset; a collective call.

        Raises:
            DataError: two were not.
        """
        fabric = self.local_ranks.world.fabrics[0]
        if len(self.local_ranks.world.fabrics) == fabric.num_ranks:
            return
        local = fingerprint(self.dataset).to_dict()
        for rank, other in enumerate(fabric.gather_values("dataset", dict(local), tuple(range(fabric.num_ranks)))):
            if other != local:
                raise DataError(
                    f"rank {fabric.rank} and rank {rank} were given different datasets, {local} and {other}; every "
                    "rank passes the whole dataset and reads its own samples of it: remove the sharding"
                )

    def start(self, cursor: Cursor, num_batches: int) -> None:
        """Start reading from the cursor on, with workers if there are any.

        Args:
            cursor: the next batch.
            num_batches: how many batches are left.
        """
        assert self.local_ranks.compiled is not None, "built"
        reading = MicrobatchReader(self.dataset, self.sampler, self.local_ranks.global_num_microbatches)
        compiled = self.local_ranks.compiled
        micros = microbatches_to_read(
            compiled.step_variants[-1].program, self.local_ranks.ranks, compiled.model.input_blocks
        )
        if not micros or not num_batches:
            return
        reading.warn_of_shared_rng(MicrobatchIndex(cursor.epoch, cursor.batch, micros[0]))
        if self.num_workers:
            spots = iter_microbatch_indices(reading, (cursor.epoch, cursor.batch), num_batches, micros)
            self.loader = MicrobatchLoader(
                reading,
                spots,
                num_workers=self.num_workers,
                prefetch_factor=self.prefetch_factor,
                timeout_s=self.local_ranks.options.timeout_s,
            )

    def batch_at(self, cursor: Cursor) -> DatasetBatch:
        """Return the batch at a cursor."""
        loader, (epoch, batch) = self.loader, (cursor.epoch, cursor.batch)
        reader = None if loader is None else lambda micro: loader.get_fields(MicrobatchIndex(epoch, batch, micro))
        seed, num_micros = self.sampler.seed, self.local_ranks.global_num_microbatches
        return DatasetBatch(
            self.dataset, self.sample_indices(cursor), num_micros, seed=seed, epoch=epoch, reader=reader
        )

    def sample_indices(self, cursor: Cursor) -> Indices:
        """Return the sample indices of a batch; those of a few batches are computed at once."""
        if (cursor.epoch, cursor.batch) not in self.index_cache:
            batches = self.sampler.batches(cursor.epoch, cursor.batch, INDEX_LOOKAHEAD)
            self.index_cache = {(cursor.epoch, index): batch for index, batch in enumerate(batches, cursor.batch)}
        return self.index_cache[cursor.epoch, cursor.batch]

    def close(self) -> None:
        """Stop the workers."""
        if self.loader is not None:
            self.loader.close()
            self.loader = None


TRACED_STEP = 3
"""The step of a run that is traced: late enough to be warm."""


class FitLoop:
    """One fit of the local ranks.

    Args:
        local_ranks: the ranks.
        dataset: the training data.
        sampler: the order of samples.
        config: evaluations, checkpoints and data loading.
        lr_scheduler: the learning rate scheduler, if any.
        callbacks: called at every event.
    """

    def __init__(
        self,
        local_ranks: LocalRanks,
        dataset: MapDataset,
        sampler: Sampler,
        config: FitConfig,
        lr_scheduler: optim.lr_scheduler.LRScheduler | None,
        callbacks: Iterable[Callback],
    ) -> None:
        self.local_ranks = local_ranks
        self.dataset = dataset
        self.sampler = sampler
        self.config = config
        self.lr_scheduler = lr_scheduler
        self.callbacks = list(callbacks)
        self.progress = self.first_progress = save_restore.TrainProgress()
        self.last_evaluation_step = -1
        self.stage_checkpointer: StageCheckpointer | None = None
        self.batch_supplier = BatchSupplier(
            local_ranks,
            dataset,
            sampler,
            num_workers=config.data_loading.num_workers,
            prefetch_factor=config.data_loading.prefetch_factor,
        )

    @property
    def num_steps(self) -> int:
        """The steps of the whole run."""
        steps = self.config.num_epochs * self.sampler.num_batches
        return self.first_progress.step + (
            steps if self.config.max_steps is None else min(steps, self.config.max_steps)
        )

    def continue_from(self, done: save_restore.TrainProgress) -> None:
        """Count on from an earlier fit, at the start of the epoch after its last one."""
        epoch = done.cursor.epoch + (done.cursor.batch > 0)
        self.progress = self.first_progress = save_restore.TrainProgress(done.step, Cursor(epoch, 0))

    def run(self) -> None:
        """Take all remaining steps."""
        ranks, progress, checkpoint = self.local_ranks, self.progress, self.config.checkpoint
        assert ranks.compiled is not None, "built"
        event = RunStart(ranks.compiled, progress.step, self.num_steps, self.sampler.batch_size, ranks.choice)
        self.batch_supplier.require_same_dataset()
        self.require_valid_last_batch()
        require_checkpoint_mode(self.local_ranks, checkpoint.mode, checkpoint.every)
        for callback in self.callbacks:
            callback.on_start(event)
        save_restore.create_checkpoint_dir(self.local_ranks, checkpoint.folder)
        if checkpoint.mode == "per_stage" and checkpoint.folder is not None:
            self.stage_checkpointer = StageCheckpointer(self.local_ranks, checkpoint.folder, checkpoint.keep_last)
        self.batch_supplier.start(self.progress.cursor, self.num_steps - self.progress.step)
        first_step = self.progress.step
        while self.progress.step < self.num_steps:
            self.step(traced=self.progress.step == min(first_step + TRACED_STEP, self.num_steps - 1))
            if self.should_evaluate():
                self.evaluate()
            if checkpoint.every is not None and self.progress.step % checkpoint.every == 0:
                self.save_checkpoint()
        if self.config.evaluation.dataset is not None and self.last_evaluation_step != self.progress.step:
            self.evaluate()
        self.local_ranks.export_weights()
        if self.stage_checkpointer is not None:
            self.stage_checkpointer.finish()
            self.notify_completed_checkpoints()
        if checkpoint.folder is not None and (
            checkpoint.every is None or self.progress.step % checkpoint.every or first_step == self.progress.step
        ):
            self.save_synchronously()

    def require_valid_last_batch(self) -> None:
        """Check that batch norm can train on the last batch of an epoch, if the run reaches it.

        Raises:
            DataError: one of its microbatches has one sample, and batch norm one value per channel of it.
        """
        last_index, cursor = self.sampler.num_batches - 1, self.progress.cursor
        count = self.sampler.batch_len(last_index)
        sizes = [stop - start for start, stop in split_batch(count, self.local_ranks.global_num_microbatches)]
        if 1 not in sizes or self.num_steps - self.progress.step <= last_index - cursor.batch:
            return
        batch = DatasetBatch(self.dataset, self.sampler.batch(cursor.epoch, last_index)[:1], 1)
        location = f"the last batch of an epoch has {count} samples, and microbatch {sizes.index(1)} of it has only 1"
        check_single_sample(self.local_ranks.model, as_call_args(batch.inputs(0)), location)

    def step(self, *, traced: bool) -> None:
        """Take one step."""
        start_s = time.perf_counter()
        cursor, number, in_flight = self.progress.cursor, self.progress.step, self.local_ranks.in_flight
        warmup = in_flight.warmup_steps(number)
        for step in range(number, min(number + in_flight.lookahead + 1, self.next_flush())):
            if step not in in_flight.batches:
                in_flight.batches[step] = self.batch_supplier.batch_at(
                    replace(cursor, batch=cursor.batch + step - number)
                )
        for step in warmup:
            self.local_ranks.step(step, in_flight.batch_source(step))
        if traced:
            result, trace = trace_step(self.local_ranks, number, in_flight.batch_source(number))
        else:
            result, trace = self.local_ranks.step(number, in_flight.batch_source(number)), None
        num_samples = sum(in_flight.batches.pop(number).sizes.values())
        self.local_ranks.optimizer_spec.after_step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.progress = save_restore.TrainProgress(number + 1, cursor.advance(self.sampler.num_batches))
        event = StepEnd(
            number,
            cursor.epoch,
            result.loss,
            min(result.num_samples, num_samples),
            time.perf_counter() - start_s,
            result.norm,
            result.skip_reason,
            numeric_options(self.local_ranks.optimizer_spec.options(0)),
        )
        for callback in self.callbacks:
            callback.on_step(event)
            if trace is not None:
                callback.on_trace(TraceRecorded(number, trace))

    def next_flush(self) -> int:
        """Return the step before which the pipeline must be flushed: an evaluation, a checkpoint, or a new epoch."""
        step, cursor = self.progress.step, self.progress.cursor
        evaluate_every = self.config.evaluation.every if self.config.evaluation.dataset is not None else None
        save_every = self.config.checkpoint.every if self.stage_checkpointer is None else None
        periods = [period for period in (evaluate_every, save_every) if period is not None]
        next_times = [step - step % period + period for period in periods]
        return min(self.num_steps, step + self.sampler.num_batches - cursor.batch, *next_times)

    def should_evaluate(self) -> bool:
        """Tell whether to evaluate now."""
        if self.config.evaluation.dataset is None:
            return False
        every = self.config.evaluation.every
        return self.progress.cursor.batch == 0 or (every is not None and self.progress.step % every == 0)

    def evaluate(self) -> None:
        """Evaluate held-out data and call the callbacks."""
        assert self.config.evaluation.dataset is not None, "there is held-out data"
        size = max(self.sampler.batch_size, self.local_ranks.global_num_microbatches)
        metrics = evaluate(self.local_ranks, self.config.evaluation.dataset, self.config.evaluation.metrics, size)
        self.last_evaluation_step = self.progress.step
        for callback in self.callbacks:
            callback.on_evaluation(EvaluationEnd(self.progress.step, metrics))

    def save_checkpoint(self) -> None:
        """Write a checkpoint, or the parts of this process's ranks, and report what is complete."""
        if self.stage_checkpointer is None:
            self.save_synchronously()
            return
        self.stage_checkpointer.save(self.progress, self.checkpoint_metadata())
        self.notify_completed_checkpoints()

    def notify_completed_checkpoints(self) -> None:
        """Call the callbacks for checkpoints to which the last stage has added its part."""
        assert self.stage_checkpointer is not None, "stages save independently"
        for step, path in self.stage_checkpointer.pop_completed():
            for callback in self.callbacks:
                callback.on_checkpoint(CheckpointSaved(step, path))

    def save_synchronously(self) -> None:
        """Write a checkpoint with all other ranks and call the callbacks."""
        checkpoint = self.config.checkpoint
        assert checkpoint.folder is not None, "there is a folder"
        path = save_restore.save_checkpoint(
            self.local_ranks,
            checkpoint.folder,
            self.progress,
            self.checkpoint_metadata(),
            keep_last=checkpoint.keep_last,
        )
        for callback in self.callbacks:
            callback.on_checkpoint(CheckpointSaved(self.progress.step, path))

    def checkpoint_metadata(self) -> dict[str, Any]:
        """Return the metadata of a checkpoint, in addition to tensors and cursor."""
        return {
            "schedule": to_json(self.lr_scheduler.state_dict()) if self.lr_scheduler is not None else None,
            "dataset": fingerprint(self.dataset).to_dict(),
            "batch_size": self.sampler.batch_size,
            "seed": self.sampler.seed,
            "optimizer": self.local_ranks.optimizer_spec.optimizer_class.__name__,
            "options": [get_group_options(group) for group in self.local_ranks.optimizer_spec.optimizer.param_groups],
        }

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint.

        Raises:
            CheckpointError: it is of another model, dataset, batch size, seed or optimizer; nothing has changed.
        """
        recover_drafts_together(self.local_ranks, path)
        checkpoint = save_restore.find_checkpoint(path)
        save_restore.require_same_architecture(self.local_ranks, checkpoint)
        state: Any = checkpoint.state
        metadata = state["extra"]
        self.require_same_config(path, metadata)
        self.require_steps_left(path, int(state["step"]))
        self.progress, _ = save_restore.restore_checkpoint(self.local_ranks, checkpoint)
        if self.lr_scheduler is not None and metadata.get("schedule") is not None:
            self.lr_scheduler.load_state_dict(from_json(metadata["schedule"], self.lr_scheduler.state_dict()))
        for group, options in zip(
            self.local_ranks.optimizer_spec.optimizer.param_groups, metadata.get("options", ()), strict=False
        ):
            if self.local_ranks.world.fabrics[0].rank == 0:
                self.warn_restored_lr(path, group, options)
            apply_group_options(group, options)

    def require_same_config(self, path: Path, metadata: Mapping[str, Any]) -> None:
        """Check that a checkpoint's metadata are those of this run.

        Raises:
            CheckpointError: they are not.
        """
        own, saved = self.checkpoint_metadata(), dict(metadata)
        for values in (own, saved):
            if "options" in values:  # their values are restored, their number must be equal
                values["number of parameter groups"] = len(values["options"])
        for name in ("dataset", "batch_size", "seed", "optimizer", "number of parameter groups"):
            if name in saved and saved[name] != own[name]:
                raise CheckpointError(
                    f"{path} was saved with {name.replace('_', ' ')} {saved[name]}, this run has {own[name]}; a run "
                    "can only continue with the same samples and optimizer; resume with them, or start a new run"
                )

    def warn_restored_lr(self, path: Path, given: Mapping[str, Any], restored: Mapping[str, Any]) -> None:
        """Warn if the optimizer was made with another learning rate than the one in the checkpoint."""
        given_lr, restored_lr = (group.get("initial_lr", group.get("lr")) for group in (given, restored))
        if isinstance(given_lr, float) and isinstance(restored_lr, float) and given_lr != restored_lr:
            warnings.warn(
                f"the optimizer was made with lr={given_lr:g}, but {path} has {restored_lr:g}, which is restored: the "
                f"global batch is {self.sampler.batch_size} samples as before, and needs no other learning rate for "
                "another number of ranks; to change it, set it in trainer.optimizer in a callback's on_start",
                stacklevel=4,
            )

    def require_steps_left(self, path: Path, step: int) -> None:
        """Check that a checkpoint is not of a later step than the last one of this run.

        Raises:
            CheckpointError: it is.
        """
        if step > self.num_steps:
            raise CheckpointError(
                f"{path} is of step {step}, but this run ends at step {self.num_steps}; epochs and steps are counted "
                "from the start of the run, not from the checkpoint: give more, or resume from an earlier checkpoint"
            )

    def close(self, error: BaseException | None) -> None:
        """Stop the workers, and call the callbacks' ``on_end``."""
        self.batch_supplier.close()
        if self.stage_checkpointer is not None:
            self.stage_checkpointer.close()
        for callback in self.callbacks:
            callback.on_end(RunEnd(self.progress.step, error))


def numeric_options(options: dict[str, Any]) -> dict[str, float]:
    """Return the options that are finite numbers, such as the learning rate."""
    return {
        key: float(value)
        for key, value in options.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
