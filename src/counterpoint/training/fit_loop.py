"""What a fit does beside its steps, checked when it is said.

The batches of a run, from the cursor on: read when they are needed, or ahead by workers.

One fit: steps in the sampler's order, and at their times evaluations and checkpoints.
"""

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
from counterpoint.runtime.rank_builder import as_call_args
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
from counterpoint.training.checkpointing import save_restore as saving
from counterpoint.training.checkpointing.per_stage import (
    CheckpointMode,
    StageCheckpointer,
    recover_drafts,
    require_checkpoint_mode,
)
from counterpoint.training.evaluation import MetricsFn, evaluate
from counterpoint.training.local_ranks import LocalRanks, trace_step
from counterpoint.training.optimizer_state import apply_group_options, from_json, get_group_options, to_json
from counterpoint.training.validation import require_directory_path


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """What is measured after every epoch and at the end.

    Args:
        dataset: held-out data; None where nothing is measured.
        measure: how.
        every: measure after so many steps, too.

    Raises:
        PlanError: a number makes no sense.
    """

    dataset: MapDataset | None
    metrics: MetricsFn
    every: int | None

    def __post_init__(self) -> None:
        require_counts(optional=True, evaluate_every=self.every)


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Where checkpoints are.

    Args:
        folder: of all of them; None where nothing is saved.
        every: save after so many steps, too.
        keep: how many stay; None keeps all.
        by: who saves; ``stage`` for each stage by itself, without a flush.

    Raises:
        PlanError: it is said when, but not where, or a number makes no sense.
        CheckpointError: there is a file where the folder is to be.
    """

    folder: Path | None
    every: int | None
    keep_last: int | None
    mode: CheckpointMode

    def __post_init__(self) -> None:
        if self.every is not None and self.folder is None:
            raise PlanError(f"save_every={self.every} says when, but not where; give checkpoint_dir=FOLDER as well")
        require_counts(optional=True, save_every=self.every, keep_last=self.keep_last)
        require_directory_path(self.folder)


@dataclass(frozen=True, slots=True)
class DataLoadingConfig:
    """How samples are read.

    Args:
        workers: processes of each rank that do; 0 for none but this.
        prefetch: microbatches that each reads ahead.

    Raises:
        PlanError: a number makes no sense.
    """

    num_workers: int
    prefetch_factor: int

    def __post_init__(self) -> None:
        require_counts(prefetch_factor=self.prefetch_factor)
        require_counts(optional=True, num_workers=self.num_workers or None)


@dataclass(frozen=True, slots=True)
class FitConfig:
    """What a fit is to do.

    Args:
        num_epochs: passes over the dataset.
        max_steps: steps at most.
        evaluating: what is measured.
        saving: where checkpoints are.
        reading: how samples are read.

    Raises:
        PlanError: a number makes no sense.
    """

    num_epochs: int
    max_steps: int | None
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    data_loading: DataLoadingConfig

    def __post_init__(self) -> None:
        require_counts(epochs=self.num_epochs)
        require_counts(optional=True, max_steps=self.max_steps)


INDEX_LOOKAHEAD = 16
"""How many batches' samples are looked up at once."""


class BatchSupplier:
    """Gives a run its batches; close it.

    Args:
        team: the ranks that read.
        dataset: what they read.
        sampler: which samples when.
        workers: processes that read; 0 for none but this.
        prefetch: microbatches that each reads ahead.
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
        """Check that all ranks were given the same dataset; all ranks call it together.

        Raises:
            DataError: two were not.
        """
        fabric = self.local_ranks.world.fabrics[0]
        if len(self.local_ranks.world.fabrics) == fabric.num_ranks:
            return
        mine = fingerprint(self.dataset).to_dict()
        for rank, theirs in enumerate(fabric.gather_values("dataset", dict(mine), tuple(range(fabric.num_ranks)))):
            if theirs != mine:
                raise DataError(
                    f"rank {fabric.rank} and rank {rank} were given different datasets, {mine} and {theirs}; every "
                    "rank gives the whole dataset and reads its own samples of it: leave the sharding away"
                )

    def start(self, cursor: Cursor, num_batches: int) -> None:
        """What is left of the run can be read; workers have begun to.

        Args:
            cursor: the next batch.
            num_batches: how many are left.
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
            deadline_s = self.local_ranks.options.timeout_s
            self.loader = MicrobatchLoader(
                reading,
                spots,
                num_workers=self.num_workers,
                prefetch_factor=self.prefetch_factor,
                deadline_s=deadline_s,
            )

    def batch_at(self, cursor: Cursor) -> DatasetBatch:
        """Return a batch."""
        loader, (epoch, batch) = self.loader, (cursor.epoch, cursor.batch)
        reader = None if loader is None else lambda micro: loader.get_fields(MicrobatchIndex(epoch, batch, micro))
        seed, num_micros = self.sampler.seed, self.local_ranks.global_num_microbatches
        return DatasetBatch(
            self.dataset, self.sample_indices(cursor), num_micros, seed=seed, epoch=epoch, reader=reader
        )

    def sample_indices(self, cursor: Cursor) -> Indices:
        """Return the samples of a batch; those of a few batches are looked up at once."""
        if (cursor.epoch, cursor.batch) not in self.index_cache:
            found = self.sampler.batches(cursor.epoch, cursor.batch, INDEX_LOOKAHEAD)
            self.index_cache = {(cursor.epoch, index): batch for index, batch in enumerate(found, cursor.batch)}
        return self.index_cache[cursor.epoch, cursor.batch]

    def close(self) -> None:
        """No worker is left."""
        if self.loader is not None:
            self.loader.close()
            self.loader = None


TRACED_STEP = 3
"""Which step of a run is measured word by word: late enough to be warm."""


class FitLoop:
    """One fit of one team.

    Args:
        team: the ranks.
        dataset: what is trained on.
        sampler: which samples when.
        goals: what is done beside.
        schedule: the learning rate scheduler, if any.
        listeners: who is told.
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
        self.progress = self.first_progress = saving.TrainProgress()
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
        """Steps of the whole run."""
        steps = self.config.num_epochs * self.sampler.num_batches
        return self.first_progress.step + (
            steps if self.config.max_steps is None else min(steps, self.config.max_steps)
        )

    def continue_from(self, done: saving.TrainProgress) -> None:
        """Count on from an earlier fit, at the beginning of the epoch after its last one."""
        epoch = done.cursor.epoch + (done.cursor.batch > 0)
        self.progress = self.first_progress = saving.TrainProgress(done.step, Cursor(epoch, 0))

    def run(self) -> None:
        """Take all steps that are left."""
        team, progress, saves = self.local_ranks, self.progress, self.config.checkpoint
        assert team.compiled is not None, "built"
        start = RunStart(team.compiled, progress.step, self.num_steps, self.sampler.batch_size, team.choice)
        self.batch_supplier.require_same_dataset()
        self.require_valid_last_batch()
        require_checkpoint_mode(self.local_ranks, saves.mode, saves.every)
        for listener in self.callbacks:
            listener.on_start(start)
        saving.create_checkpoint_dir(self.local_ranks, saves.folder)
        if saves.mode == "per_stage" and saves.folder is not None:
            self.stage_checkpointer = StageCheckpointer(self.local_ranks, saves.folder, saves.keep_last)
        self.batch_supplier.start(self.progress.cursor, self.num_steps - self.progress.step)
        first = self.progress.step
        while self.progress.step < self.num_steps:
            self.step(traced=self.progress.step == min(first + TRACED_STEP, self.num_steps - 1))
            if self.should_evaluate():
                self.evaluate()
            if saves.every is not None and self.progress.step % saves.every == 0:
                self.save_checkpoint()
        if self.config.evaluation.dataset is not None and self.last_evaluation_step != self.progress.step:
            self.evaluate()
        self.local_ranks.export_weights()
        if self.stage_checkpointer is not None:
            self.stage_checkpointer.finish()
            self.notify_completed_checkpoints()
        if saves.folder is not None and (
            saves.every is None or self.progress.step % saves.every or first == self.progress.step
        ):
            self.save_synchronously()

    def require_valid_last_batch(self) -> None:
        """Check that batch norm can do with the last batch of an epoch, if that is reached.

        Raises:
            DataError: a microbatch of it has one sample, and batch norm one value per channel of it.
        """
        last, cursor = self.sampler.num_batches - 1, self.progress.cursor
        count = self.sampler.batch_len(last)
        sizes = [stop - start for start, stop in split_batch(count, self.local_ranks.global_num_microbatches)]
        if 1 not in sizes or self.num_steps - self.progress.step <= last - cursor.batch:
            return
        feed = DatasetBatch(self.dataset, self.sampler.batch(cursor.epoch, last)[:1], 1)
        where = f"the last batch of an epoch has {count} samples, and microbatch {sizes.index(1)} of it has only 1"
        check_single_sample(self.local_ranks.model, as_call_args(feed.inputs(0)), where)

    def step(self, *, traced: bool) -> None:
        """Take one step."""
        began = time.perf_counter()
        cursor, number, flight = self.progress.cursor, self.progress.step, self.local_ranks.in_flight
        fill = flight.warmup_steps(number)
        for at in range(number, min(number + flight.lookahead + 1, self.next_flush())):
            if at not in flight.batches:
                flight.batches[at] = self.batch_supplier.batch_at(replace(cursor, batch=cursor.batch + at - number))
        for at in fill:
            self.local_ranks.step(at, flight.batch_source(at))
        if traced:
            verdict, trace = trace_step(self.local_ranks, number, flight.batch_source(number))
        else:
            verdict, trace = self.local_ranks.step(number, flight.batch_source(number)), None
        num_samples = sum(flight.batches.pop(number).sizes.values())
        self.local_ranks.optimizer_spec.after_step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.progress = saving.TrainProgress(number + 1, cursor.advance(self.sampler.num_batches))
        end = StepEnd(
            number,
            cursor.epoch,
            verdict.loss,
            min(verdict.num_samples, num_samples),
            time.perf_counter() - began,
            verdict.norm,
            verdict.skip_reason,
            numeric_options(self.local_ranks.optimizer_spec.options(0)),
        )
        for listener in self.callbacks:
            listener.on_step(end)
            if trace is not None:
                listener.on_trace(TraceRecorded(number, trace))

    def next_flush(self) -> int:
        """Return the step before which nothing may be under way: of an evaluation or checkpoint, or a new epoch."""
        step, cursor = self.progress.step, self.progress.cursor
        evaluations = self.config.evaluation.every if self.config.evaluation.dataset is not None else None
        saves = self.config.checkpoint.every if self.stage_checkpointer is None else None
        periods = [every for every in (evaluations, saves) if every is not None]
        times = [step - step % every + every for every in periods]
        return min(self.num_steps, step + self.sampler.num_batches - cursor.batch, *times)

    def should_evaluate(self) -> bool:
        """Tell whether held-out data is measured now."""
        if self.config.evaluation.dataset is None:
            return False
        every = self.config.evaluation.every
        return self.progress.cursor.batch == 0 or (every is not None and self.progress.step % every == 0)

    def evaluate(self) -> None:
        """Measure held-out data and tell the listeners."""
        assert self.config.evaluation.dataset is not None, "there is something to measure"
        size = max(self.sampler.batch_size, self.local_ranks.global_num_microbatches)
        metrics = evaluate(self.local_ranks, self.config.evaluation.dataset, self.config.evaluation.metrics, size)
        self.last_evaluation_step = self.progress.step
        for listener in self.callbacks:
            listener.on_evaluation(EvaluationEnd(self.progress.step, metrics))

    def save_checkpoint(self) -> None:
        """Write a checkpoint, or the parts of this process's ranks, and tell the listeners of what is complete."""
        if self.stage_checkpointer is None:
            self.save_synchronously()
            return
        self.stage_checkpointer.save(self.progress, self.checkpoint_metadata())
        self.notify_completed_checkpoints()

    def notify_completed_checkpoints(self) -> None:
        """Tell the listeners of checkpoints to which the last stage has added its part by now."""
        assert self.stage_checkpointer is not None, "ranks save apart"
        for step, path in self.stage_checkpointer.pop_completed():
            for listener in self.callbacks:
                listener.on_checkpoint(CheckpointSaved(step, path))

    def save_synchronously(self) -> None:
        """Write a checkpoint with all other ranks and tell the listeners."""
        saves = self.config.checkpoint
        assert saves.folder is not None, "there is somewhere to save"
        path = saving.save_checkpoint(
            self.local_ranks, saves.folder, self.progress, self.checkpoint_metadata(), keep_last=saves.keep_last
        )
        for listener in self.callbacks:
            listener.on_checkpoint(CheckpointSaved(self.progress.step, path))

    def checkpoint_metadata(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside tensors and cursor."""
        return {
            "schedule": to_json(self.lr_scheduler.state_dict()) if self.lr_scheduler is not None else None,
            "dataset": fingerprint(self.dataset).to_dict(),
            "batch_size": self.sampler.batch_size,
            "seed": self.sampler.seed,
            "optimizer": self.local_ranks.optimizer_spec.optimizer_class.__name__,
            "options": [get_group_options(group) for group in self.local_ranks.optimizer_spec.optimizer.param_groups],
        }

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            CheckpointError: it is of another model, dataset, batch size, seed or optimizer; nothing has changed.
        """
        recover_drafts(self.local_ranks, path)
        checkpoint = saving.find_checkpoint(path)
        saving.require_same_architecture(self.local_ranks, checkpoint)
        state: Any = checkpoint.state
        extra = state["extra"]
        self.require_same_config(path, extra)
        self.require_steps_left(path, int(state["step"]))
        self.progress, _ = saving.restore_checkpoint(self.local_ranks, checkpoint)
        if self.lr_scheduler is not None and extra.get("schedule") is not None:
            self.lr_scheduler.load_state_dict(from_json(extra["schedule"], self.lr_scheduler.state_dict()))
        for group, options in zip(
            self.local_ranks.optimizer_spec.optimizer.param_groups, extra.get("options", ()), strict=False
        ):
            if self.local_ranks.world.fabrics[0].rank == 0:
                self.warn_restored_lr(path, group, options)
            apply_group_options(group, options)

    def require_same_config(self, path: Path, metadata: Mapping[str, Any]) -> None:
        """Check that what was kept with a checkpoint is what this run would keep.

        Raises:
            CheckpointError: it is not.
        """
        mine, theirs = self.checkpoint_metadata(), dict(metadata)
        for kept in (mine, theirs):
            if "options" in kept:  # their values go on, their number must stay
                kept["number of parameter groups"] = len(kept["options"])
        for name in ("dataset", "batch_size", "seed", "optimizer", "number of parameter groups"):
            if name in theirs and theirs[name] != mine[name]:
                raise CheckpointError(
                    f"{path} was saved with {name.replace('_', ' ')} {theirs[name]}, this run has {mine[name]}; a run "
                    "goes on only with the samples and the optimizer it had; resume with the same, or start a new run"
                )

    def warn_restored_lr(self, path: Path, given: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """Warn where the optimizer was made with another learning rate than the one that goes on."""
        mine, theirs = (group.get("initial_lr", group.get("lr")) for group in (given, kept))
        if isinstance(mine, float) and isinstance(theirs, float) and mine != theirs:
            warnings.warn(
                f"the optimizer was made with lr={mine:g}, but {path} goes on with its own, {theirs:g}: the global "
                f"batch is {self.sampler.batch_size} samples as before, and needs no other learning rate however many "
                "ranks share it; to train at another one, set it in trainer.optimizer in a callback's on_start",
                stacklevel=4,
            )

    def require_steps_left(self, path: Path, step: int) -> None:
        """Check that a checkpoint is not of a later step than the last one of this run.

        Raises:
            CheckpointError: it is.
        """
        if step > self.num_steps:
            raise CheckpointError(
                f"{path} is of step {step}, but this run ends at step {self.num_steps}; epochs and steps count from "
                "the beginning of the run, not from the checkpoint: ask for more, or resume from an earlier checkpoint"
            )

    def close(self, error: BaseException | None) -> None:
        """End the workers, and tell the listeners that it is over."""
        self.batch_supplier.close()
        if self.stage_checkpointer is not None:
            self.stage_checkpointer.close()
        for listener in self.callbacks:
            listener.on_end(RunEnd(self.progress.step, error))


def numeric_options(options: dict[str, Any]) -> dict[str, float]:
    """Return the options that are plain numbers, the learning rate for instance."""
    return {
        key: float(value)
        for key, value in options.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
