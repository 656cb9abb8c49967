"""Elastic training with parameter servers: request a task, compute it, push gradients, report it.

A worker may join at any time, and leave at any time: voluntarily, by SIGTERM, or without notice. Its unfinished task is
assigned to others; what it has pushed is counted, exactly once.
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
from counterpoint.errors import CounterpointError, DataError
from counterpoint.ps.consistency import Ssp, find_step
from counterpoint.ps.messages import DataTask, TaskOutcome
from counterpoint.ps.session import NO_TASK_YET, NoTaskYet

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class SliceTrained:
    """A data slice was computed and pushed.

    Args:
        slice_index: counted over the whole run.
        loss: mean over its samples; nan if there are none.
        num_samples: of the slice.
    """

    slice_index: int
    loss: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class TaskEnded:
    """A task ended.

    Args:
        task: which.
        outcome: done, failed or preempted.
        text: error message, if it failed.
    """

    task: DataTask
    outcome: TaskOutcome
    text: str = ""


@dataclass(frozen=True, slots=True)
class NoTask:
    """There is data left, but no task may start now."""


@dataclass(frozen=True, slots=True)
class GroupFormed:
    """The workers of a job without servers are connected.

    Args:
        generation: of which they are all members.
        members: their names, the oldest first.
        step: next step.
    """

    generation: int
    members: tuple[str, ...]
    step: int


WorkerEvent: TypeAlias = SliceTrained | TaskEnded | NoTask | GroupFormed


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Options of a worker.

    Args:
        seed: of the model's random numbers; the same for all workers.
        nonfinite: what a non-finite loss means: ``error``, or ``skip`` for a gradient of zeros.
        schedule: from the step (or slice, if there are no steps) to a factor of the learning rate; plain SGD only.
        checkpoint_every_slices: request a snapshot of the whole job after this many slices; 0 for never.
        poll_s: longest wait for a task before the worker checks whether it should stop.
        prefetch: whether to prefetch rows of tables.
    """

    seed: int = 0
    nonfinite: Literal["error", "skip"] = "error"
    schedule: Callable[[int], float] | None = None
    checkpoint_every_slices: int = 0
    poll_s: float = 1.0
    prefetch: bool = True


def never_stop() -> bool:
    """Return False."""
    return False


def check_finite_loss(loss: float, slice_index: int, config: WorkerConfig) -> bool:
    """Tell whether a loss is finite; a non-finite one counts as a gradient of zeros.

    Args:
        loss: of some samples.
        slice_index: their data slice.
        config: options of the worker.

    Raises:
        DataError: it is not finite, and that is an error.
    """
    if not isfinite(loss) and config.nonfinite == "error":
        raise DataError(
            f"the loss of slice {slice_index} is {loss}; check its samples, use a smaller learning rate, or give "
            "nonfinite='skip' to count it as zeros"
        )
    return isfinite(loss)


class PsWorker:
    """One incarnation of a worker of a job with parameter servers.

    Args:
        remote: its model.
        slices: the data.
        loss: from the model's output and the targets to the mean loss.
        config: options of the worker.
        should_stop: polled between minibatches; when it holds, the task is given back and the worker leaves.

    Raises:
        PlanError: the data is not the job's, or servers cannot follow the schedule.
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
        """Train and yield events until all data has been processed or the worker should stop."""
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
        """Train until all data has been processed or the worker should stop; return the events."""
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
            is_complete = yield from self._train(task)
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
        yield self._report_end(
            task, "done" if is_complete else "preempted", "" if is_complete else "the worker was asked to stop"
        )
        interval = self.config.checkpoint_every_slices
        first_slice = self._global_index(task, task.start)
        if is_complete and interval and first_slice // interval != (first_slice + task.stop - task.start) // interval:
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
        """Yield each slice of a task when it is done; return whether all of them are."""
        slice_numbers = range(task.start, task.stop)
        reader = TaskReader(self.slices, task.epoch, slice_numbers, max(1, self.remote.sync_policy.pull_ahead))
        for slice_index, positions in reader.slices():
            total, count = 0.0, sum(position.minibatch.num_samples for position in positions)
            for position in positions:
                if self.should_stop():
                    return False
                total += position.minibatch.num_samples * self._compute(position, reader.upcoming(position))
            if not positions:
                self.remote.push_zeros(slice_index)
            yield SliceTrained(slice_index, total / count if count else nan, count)
        return True

    def _compute(self, position: MinibatchPosition, upcoming: Sequence[MinibatchPosition]) -> float:
        """Compute one minibatch; return its loss.

        Args:
            position: the minibatch.
            upcoming: the next minibatches that are known.
        """
        remote, minibatch, is_last = self.remote, position.minibatch, position.is_last
        remote.begin_minibatch(position.slice_index, minibatch.inputs, is_last_minibatch=is_last)
        if remote.sync_policy.pull_ahead:
            self._prefetch(upcoming)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(sample_key(self.config.seed, position.slice_index, position.index))
            loss = self.loss(remote.model(*minibatch.inputs), minibatch.fields[-1])
            value = float(loss.detach())
            self._prefetch(upcoming)
            if check_finite_loss(value, position.slice_index, self.config):
                (loss * (minibatch.loss_factor * self._lr_factor(position.slice_index))).backward()  # type: ignore[no-untyped-call]
        remote.finish_minibatch(is_skipped=not isfinite(value))
        return value

    def _prefetch(self, upcoming: Sequence[MinibatchPosition]) -> None:
        for position in upcoming if self.config.prefetch else ():
            self.remote.prefetch(position.minibatch.inputs, position.slice_index)

    def _lr_factor(self, slice_index: int) -> float:
        schedule = self.config.schedule
        if schedule is None:
            return 1.0
        step, next_step = find_step(self.session.job.consistency, slice_index)
        return schedule(step if next_step else slice_index)
