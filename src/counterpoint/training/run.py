"""One fit: steps in the sampler's order, and at their times evaluations and checkpoints."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import optim

from counterpoint.cutting.eager import check_single
from counterpoint.data.fetch import MapDataset, fingerprint
from counterpoint.data.sampler import Cursor, Sampler, split
from counterpoint.errors import CheckpointError
from counterpoint.runtime.build import call_form
from counterpoint.training import saving
from counterpoint.training.apart import Apart, require_apart, rescue_for_all
from counterpoint.training.evaluation import evaluate
from counterpoint.training.events import Callback, Evaluated, RunEnd, RunStart, Saved, StepEnd, Timed
from counterpoint.training.feeds import DatasetFeed
from counterpoint.training.goals import Goals
from counterpoint.training.kept import plain, revived
from counterpoint.training.settings import put_settings, settings
from counterpoint.training.supply import Supply
from counterpoint.training.team import Team
from counterpoint.training.tracing import measured_step

TRACED_STEP = 3
"""Which step of a run is measured word by word: late enough to be warm."""


class Run:
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
        team: Team,
        dataset: MapDataset,
        sampler: Sampler,
        goals: Goals,
        schedule: optim.lr_scheduler.LRScheduler | None,
        listeners: Iterable[Callback],
    ) -> None:
        self.team = team
        self.dataset = dataset
        self.sampler = sampler
        self.goals = goals
        self.schedule = schedule
        self.listeners = list(listeners)
        self.progress = self.base = saving.Progress()
        self.evaluated_at = -1
        self.apart: Apart | None = None
        self.supply = Supply(team, dataset, sampler, workers=goals.reading.workers, prefetch=goals.reading.prefetch)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        steps = self.goals.num_epochs * self.sampler.num_batches
        return self.base.step + (steps if self.goals.max_steps is None else min(steps, self.goals.max_steps))

    def go_on_after(self, done: saving.Progress) -> None:
        """Count on from an earlier fit, at the beginning of the epoch after its last one."""
        epoch = done.cursor.epoch + (done.cursor.batch > 0)
        self.progress = self.base = saving.Progress(done.step, Cursor(epoch, 0))

    def go(self) -> None:
        """Take all steps that are left."""
        team, progress, saves = self.team, self.progress, self.goals.saving
        assert team.compiled is not None, "built"
        start = RunStart(team.compiled, progress.step, self.num_steps, self.sampler.batch_size, team.choice)
        self.supply.require_same_data()
        self.require_no_lone_sample()
        require_apart(self.team, saves.by, saves.every)
        for listener in self.listeners:
            listener.on_start(start)
        saving.make_root(self.team, saves.folder)
        if saves.by == "stage" and saves.folder is not None:
            self.apart = Apart(self.team, saves.folder, saves.keep)
        self.supply.open(self.progress.cursor, self.num_steps - self.progress.step)
        first = self.progress.step
        while self.progress.step < self.num_steps:
            self.step(traced=self.progress.step == min(first + TRACED_STEP, self.num_steps - 1))
            if self.is_time_to_evaluate():
                self.evaluate()
            if saves.every is not None and self.progress.step % saves.every == 0:
                self.save()
        if self.goals.evaluating.dataset is not None and self.evaluated_at != self.progress.step:
            self.evaluate()
        self.team.give_back()
        if self.apart is not None:
            self.apart.finish()
            self.tell_of_completed()
        if saves.folder is not None and (
            saves.every is None or self.progress.step % saves.every or first == self.progress.step
        ):
            self.save_together()

    def require_no_lone_sample(self) -> None:
        """Check that batch norm can do with the last batch of an epoch, if that is reached.

        Raises:
            DataError: a microbatch of it has one sample, and batch norm one value per channel of it.
        """
        last, cursor = self.sampler.num_batches - 1, self.progress.cursor
        count = self.sampler.batch_len(last)
        sizes = [stop - start for start, stop in split(count, self.team.num_micros)]
        if 1 not in sizes or self.num_steps - self.progress.step <= last - cursor.batch:
            return
        feed = DatasetFeed(self.dataset, self.sampler.batch(cursor.epoch, last)[:1], 1)
        where = f"the last batch of an epoch has {count} samples, and microbatch {sizes.index(1)} of it has only 1"
        check_single(self.team.model, call_form(feed.inputs(0)), where)

    def step(self, *, traced: bool) -> None:
        """Take one step."""
        began = time.perf_counter()
        cursor, number, flight = self.progress.cursor, self.progress.step, self.team.flight
        fill = flight.filling(number)
        for at in range(number, min(number + flight.ahead + 1, self.next_flush())):
            if at not in flight.feeds:
                flight.feeds[at] = self.supply.feed(replace(cursor, batch=cursor.batch + at - number))
        for at in fill:
            self.team.step(at, flight.feed(at))
        if traced:
            verdict, trace = measured_step(self.team, number, flight.feed(number))
        else:
            verdict, trace = self.team.step(number, flight.feed(number)), None
        num_samples = sum(flight.feeds.pop(number).sizes.values())
        self.team.face.stepped()
        if self.schedule is not None:
            self.schedule.step()
        self.progress = saving.Progress(number + 1, cursor.advance(self.sampler.num_batches))
        end = StepEnd(
            number,
            cursor.epoch,
            verdict.loss,
            min(verdict.num_samples, num_samples),
            time.perf_counter() - began,
            verdict.norm,
            verdict.fault,
            numbers(self.team.face.options(0)),
        )
        for listener in self.listeners:
            listener.on_step(end)
            if trace is not None:
                listener.on_trace(Timed(number, trace))

    def next_flush(self) -> int:
        """Return the step before which nothing may be under way: of an evaluation or checkpoint, or a new epoch."""
        step, cursor = self.progress.step, self.progress.cursor
        evaluations = self.goals.evaluating.every if self.goals.evaluating.dataset is not None else None
        saves = self.goals.saving.every if self.apart is None else None
        periods = [every for every in (evaluations, saves) if every is not None]
        times = [step - step % every + every for every in periods]
        return min(self.num_steps, step + self.sampler.num_batches - cursor.batch, *times)

    def is_time_to_evaluate(self) -> bool:
        """Tell whether held-out data is measured now."""
        if self.goals.evaluating.dataset is None:
            return False
        every = self.goals.evaluating.every
        return self.progress.cursor.batch == 0 or (every is not None and self.progress.step % every == 0)

    def evaluate(self) -> None:
        """Measure held-out data and tell the listeners."""
        assert self.goals.evaluating.dataset is not None, "there is something to measure"
        size = max(self.sampler.batch_size, self.team.num_micros)
        metrics = evaluate(self.team, self.goals.evaluating.dataset, self.goals.evaluating.measure, size)
        self.evaluated_at = self.progress.step
        for listener in self.listeners:
            listener.on_evaluation(Evaluated(self.progress.step, metrics))

    def save(self) -> None:
        """Write a checkpoint, or the parts of this process's ranks, and tell the listeners of what is complete."""
        if self.apart is None:
            self.save_together()
            return
        self.apart.save(self.progress, self.extra())
        self.tell_of_completed()

    def tell_of_completed(self) -> None:
        """Tell the listeners of checkpoints to which the last stage has added its part by now."""
        assert self.apart is not None, "ranks save apart"
        for step, path in self.apart.completed():
            for listener in self.listeners:
                listener.on_saved(Saved(step, path))

    def save_together(self) -> None:
        """Write a checkpoint with all other ranks and tell the listeners."""
        saves = self.goals.saving
        assert saves.folder is not None, "there is somewhere to save"
        path = saving.save(self.team, saves.folder, self.progress, self.extra(), keep=saves.keep)
        for listener in self.listeners:
            listener.on_saved(Saved(self.progress.step, path))

    def extra(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside tensors and cursor."""
        return {
            "schedule": plain(self.schedule.state_dict()) if self.schedule is not None else None,
            "dataset": fingerprint(self.dataset).to_dict(),
            "batch_size": self.sampler.batch_size,
            "seed": self.sampler.seed,
            "optimizer": self.team.face.kind.__name__,
            "options": [settings(group) for group in self.team.face.optimizer.param_groups],
        }

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            CheckpointError: it is of another model, dataset, batch size, seed or optimizer; nothing has changed.
        """
        rescue_for_all(self.team, path)
        checkpoint = saving.find(path)
        saving.require_same_model(self.team, checkpoint)
        state: Any = checkpoint.state
        extra = state["extra"]
        self.require_same_run(path, extra)
        self.require_rest(path, int(state["step"]))
        self.progress, _ = saving.restore(self.team, checkpoint)
        if self.schedule is not None and extra.get("schedule") is not None:
            self.schedule.load_state_dict(revived(extra["schedule"], self.schedule.state_dict()))
        for group, options in zip(self.team.face.optimizer.param_groups, extra.get("options", ()), strict=False):
            if self.team.world.fabrics[0].rank == 0:
                self.tell_of_kept_rate(path, group, options)
            put_settings(group, options)

    def require_same_run(self, path: Path, extra: Mapping[str, Any]) -> None:
        """Check that what was kept with a checkpoint is what this run would keep.

        Raises:
            CheckpointError: it is not.
        """
        mine, theirs = self.extra(), dict(extra)
        for kept in (mine, theirs):
            if "options" in kept:  # their values go on, their number must stay
                kept["number of parameter groups"] = len(kept["options"])
        for name in ("dataset", "batch_size", "seed", "optimizer", "number of parameter groups"):
            if name in theirs and theirs[name] != mine[name]:
                raise CheckpointError(
                    f"{path} was saved with {name.replace('_', ' ')} {theirs[name]}, this run has {mine[name]}; a run "
                    "goes on only with the samples and the optimizer it had; resume with the same, or start a new run"
                )

    def tell_of_kept_rate(self, path: Path, given: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """Warn where the optimizer was made with another learning rate than the one that goes on."""
        mine, theirs = (group.get("initial_lr", group.get("lr")) for group in (given, kept))
        if isinstance(mine, float) and isinstance(theirs, float) and mine != theirs:
            warnings.warn(
                f"the optimizer was made with lr={mine:g}, but {path} goes on with its own, {theirs:g}: the global "
                f"batch is {self.sampler.batch_size} samples as before, and needs no other learning rate however many "
                "ranks share it; to train at another one, set it in trainer.optimizer in a callback's on_start",
                stacklevel=4,
            )

    def require_rest(self, path: Path, step: int) -> None:
        """Check that a checkpoint is not of a later step than the last one of this run.

        Raises:
            CheckpointError: it is.
        """
        if step > self.num_steps:
            raise CheckpointError(
                f"{path} is of step {step}, but this run ends at step {self.num_steps}; epochs and steps count from "
                "the beginning of the run, not from the checkpoint: ask for more, or resume from an earlier checkpoint"
            )

    def end(self, error: BaseException | None) -> None:
        """End the workers, and tell the listeners that it is over."""
        self.supply.close()
        if self.apart is not None:
            self.apart.close()
        for listener in self.listeners:
            listener.on_end(RunEnd(self.progress.step, error))


def numbers(options: dict[str, Any]) -> dict[str, float]:
    """Return the options that are plain numbers, the learning rate for instance."""
    return {
        key: float(value)
        for key, value in options.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
