"""Elastic training: take data, compute it, push what comes out, say that it is done; until all data has been counted.

A worker may come at any time, and go at any time: of its own will, by SIGTERM, or without a word. What it had been
given and not finished is given to others; what it had pushed is counted, and counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from counterpoint.data.sampler import sample_key
from counterpoint.elastic.data_slices import DataSlices, MinibatchPosition, TaskReader
from counterpoint.elastic.optimizer_rules import check_lr_schedulable
from counterpoint.elastic.remote_module import RemoteModule
from counterpoint.elastic.sync_policy import find_step
from counterpoint.errors import CounterpointError, DataError
from counterpoint.ps.job_config import Ssp
from counterpoint.ps.messages import DataTask, TaskOutcome
from counterpoint.ps.session import NO_TASK_YET, NoTaskYet

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class SliceTrained:
    """A portion is computed and pushed.

    Args:
        portion: of the whole run.
        loss: mean over its samples; nan where there are none.
        num_samples: of the portion.
    """

    slice_index: int
    loss: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class TaskEnded:
    """A task is over.

    Args:
        task: which.
        outcome: how.
        text: why, if it failed.
    """

    task: DataTask
    outcome: TaskOutcome
    text: str = ""


@dataclass(frozen=True, slots=True)
class NoTask:
    """There is data left, but none that may be begun now."""


@dataclass(frozen=True, slots=True)
class GroupFormed:
    """The workers of a job without servers have met, and go on together.

    Args:
        generation: in which they are all who belong to the job.
        members: their names, the oldest first.
        step: that comes next.
    """

    generation: int
    members: tuple[str, ...]
    step: int


WorkerEvent: TypeAlias = SliceTrained | TaskEnded | NoTask | GroupFormed


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """How a worker works.

    Args:
        seed: of what the model draws; the same for all workers.
        nonfinite: what a loss that is not finite means: ``error``, or ``skip`` for a gradient of zeros.
        schedule: from the step (or portion, where there are no steps) to a factor of the learning rate; plain SGD only.
        checkpoint_every: a cut of the whole job is asked for after so many portions; 0 for never.
        wait_s: how long it is waited for data before the worker looks whether it has to go.
        prefetch: whether rows of tables are fetched ahead.
    """

    seed: int = 0
    nonfinite: Literal["error", "skip"] = "error"
    schedule: Callable[[int], float] | None = None
    checkpoint_every_slices: int = 0
    poll_s: float = 1.0
    prefetch: bool = True


def never_stop() -> bool:
    """Tell that nobody wants the worker to go."""
    return False


def check_finite_loss(loss: float, slice_index: int, config: WorkerConfig) -> bool:
    """Tell whether a loss is finite, and may be; if not, it counts as a gradient of zeros.

    Args:
        loss: of some samples.
        portion: that they are of.
        habits: that say what another loss means.

    Raises:
        DataError: it is not, and that is an error.
    """
    if not isfinite(loss) and config.nonfinite == "error":
        raise DataError(
            f"the loss of portion {slice_index} is {loss}; look at its samples, take a smaller learning rate, or give "
            "nonfinite='skip' to count it as zeros"
        )
    return isfinite(loss)


class PsWorker:
    """One life of a worker at a job.

    Args:
        served: its model.
        portions: the data.
        loss: from the model's output and the targets to the mean loss.
        habits: how it works.
        must_go: asked between two minibatches; once it holds, the task is given back and the worker leaves.

    Raises:
        PlanError: the data is not the job's, or the schedule not one that servers can follow.
    """

    def __init__(
        self,
        remote: RemoteModule,
        slices: DataSlices,
        loss: LossFunction,
        *,
        config: WorkerConfig | None = None,
        should_stop: Callable[[], bool] = never_stop,
    ) -> None:
        self.remote, self.slices, self.loss = remote, slices, loss
        self.session = remote.session
        self.config = config or WorkerConfig()
        self.should_stop = should_stop
        self.has_left = False
        self._is_in_clock = False
        slices.check_data_config(self.session.job.data)
        if self.config.schedule is not None:
            check_lr_schedulable(remote.rules)

    def events(self) -> Iterator[WorkerEvent]:
        """Work, and yield what has been done, until all data is counted or the worker has to go."""
        while not self.should_stop():
            task = self.session.lease(self.config.poll_s)
            if task is None:
                self._leave_clock()
                return
            if isinstance(task, NoTaskYet):
                assert task is NO_TASK_YET
                self._leave_clock()
                yield NoTask()
                continue
            yield from self._run_task(task)
        self.session.leave()
        self.has_left = True

    def run(self) -> list[WorkerEvent]:
        """Work until all data is counted or the worker has to go; return what was done."""
        return list(self.events())

    def _leave_clock(self) -> None:
        if self._is_in_clock:
            self._is_in_clock = False
            self.session.leave_clock()

    def _join_clock(self) -> None:
        if isinstance(self.session.job.consistency, Ssp) and not self._is_in_clock:
            self._is_in_clock = True
            self.session.join_clock()
            self.remote.invalidate()

    def _run_task(self, task: DataTask) -> Iterator[WorkerEvent]:
        self._join_clock()
        try:
            is_whole = yield from self._train(task)
            self.remote.flush()
        except CounterpointError as error:
            if not isinstance(error, DataError):
                raise
            yield self._report_failure(task, error)
            return
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            self._report_end(task, "preempted", "the worker was interrupted")
            raise
        except Exception as error:  # noqa: BLE001 - whatever model, loss or dataset raise is the task's failure
            yield self._report_failure(task, error)
            return
        yield self._report_end(task, "done" if is_whole else "preempted", "" if is_whole else "the worker has to go")
        every = self.config.checkpoint_every_slices
        first = self._global_index(task, task.start)
        if is_whole and every and first // every != (first + task.stop - task.start) // every:
            self.session.checkpoint()

    def _report_failure(self, task: DataTask, error: Exception) -> TaskEnded:
        return self._report_end(task, "failed", f"{type(error).__name__}: {error}")

    def _report_end(self, task: DataTask, outcome: TaskOutcome, text: str) -> TaskEnded:
        if outcome != "done":
            self.remote.discard()
        self.session.report(task, outcome, text)
        return TaskEnded(task, outcome, text)

    def _global_index(self, task: DataTask, number: int) -> int:
        return task.epoch * self.session.job.data.num_slices + number

    def _train(self, task: DataTask) -> Generator[WorkerEvent, None, bool]:
        """Yield the portions of a task as they are done; returns whether that is all of them."""
        numbers = range(task.start, task.stop)
        reading = TaskReader(self.slices, task.epoch, numbers, max(1, self.remote.sync.pull_ahead))
        for portion, places in reading.slices():
            total, count = 0.0, sum(place.minibatch.num_samples for place in places)
            for place in places:
                if self.should_stop():
                    return False
                total += place.minibatch.num_samples * self._compute(place, reading.upcoming(place))
            if not places:
                self.remote.push_zeros(portion)
            yield SliceTrained(portion, total / count if count else nan, count)
        return True

    def _compute(self, place: MinibatchPosition, ahead: Sequence[MinibatchPosition]) -> float:
        """Compute one minibatch; return its loss.

        Args:
            place: the minibatch.
            ahead: those that come next, as far as they are known.
        """
        served, one, is_last = self.remote, place.minibatch, place.is_last
        served.begin_minibatch(place.slice_index, one.inputs, is_last_minibatch=is_last)
        if served.sync.pull_ahead:
            self._prefetch(ahead)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(sample_key(self.config.seed, place.slice_index, place.index))
            loss = self.loss(served.model(*one.inputs), one.fields[-1])
            value = float(loss.detach())
            self._prefetch(ahead)
            if check_finite_loss(value, place.slice_index, self.config):
                (loss * (one.loss_weight * self._lr_factor(place.slice_index))).backward()  # type: ignore[no-untyped-call]
        served.finish_minibatch(is_skipped=not isfinite(value))
        return value

    def _prefetch(self, ahead: Sequence[MinibatchPosition]) -> None:
        for place in ahead if self.config.prefetch else ():
            self.remote.prefetch(place.minibatch.inputs, place.slice_index)

    def _lr_factor(self, slice_index: int) -> float:
        schedule = self.config.schedule
        if schedule is None:
            return 1.0
        step, following = find_step(self.session.job.consistency, slice_index)
        return schedule(step if following else slice_index)
