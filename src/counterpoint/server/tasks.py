"""The data that is left to do: tasks are given, taken back and done, and none is ever left out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from counterpoint.server.calls import Task
from counterpoint.server.job import Budget, Work
from counterpoint.server.messages import Outcome

Place: TypeAlias = tuple[int, int]
"""Epoch and first portion: what a task is, however often it is begun."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a task was done: the attempt that said so first, and the newest version its pushes made."""

    attempt: int
    version: int


class Queue:
    """Tasks of all epochs, one epoch after the other.

    Args:
        work: what there is to do.
        budget: how often a task may go wrong.

    Example:
        >>> queue = Queue(Work(num_portions=3, num_epochs=1, task_portions=2), Budget())
        >>> first = queue.give("worker-0")
        >>> first
        Task(epoch=0, start=0, stop=2, attempt=0)
        >>> queue.end(first, "preempted", 0, "")
        >>> queue.upcoming()
        Task(epoch=0, start=0, stop=2, attempt=1)
    """

    def __init__(self, work: Work, budget: Budget) -> None:
        self.work, self.budget = work, budget
        self.epoch = 0
        self.todo: deque[Task] = deque()
        self.doing: dict[Place, tuple[Task, str]] = {}
        self.done: dict[Place, Finished] = {}
        self.failures: dict[Place, int] = {}
        self.preemptions: dict[Place, int] = {}
        self.stopped = ""
        self._fill()

    def _fill(self) -> None:
        if self.epoch < self.work.num_epochs:
            starts = range(0, self.work.num_portions, self.work.task_portions)
            last = self.work.num_portions
            self.todo.extend(Task(self.epoch, at, min(last, at + self.work.task_portions)) for at in starts)

    @property
    def is_finished(self) -> bool:
        """Whether everything has been done."""
        return not self.todo and not self.doing

    @property
    def is_settled(self) -> bool:
        """Whether no task has been begun without being done."""
        return not self.doing and not any(task.attempt for task in self.todo)

    def upcoming(self, *, begun_only: bool = False) -> Task | Literal["later"] | None:
        """Return the next task; ``later`` where one has to wait, None where all is done.

        Args:
            begun_only: pass over tasks that have never been begun.
        """
        if self.is_finished:
            return None
        if not self.todo or (begun_only and not self.todo[0].attempt):
            return "later"
        task = self.todo[0]
        if self.work.step_portions and self._step(task) > self._first_step():
            return "later"
        return task

    def _step(self, task: Task) -> int:
        return (task.epoch * self.work.num_portions + task.start) // self.work.step_portions

    def _first_step(self) -> int:
        """Return the first step that is not done."""
        open_tasks = [task for task, _ in self.doing.values()]
        return min(self._step(task) for task in (*open_tasks, self.todo[0]))

    def give(self, worker: str) -> Task | None:
        """The next task is this worker's; returns it, or None where there is none."""
        if not self.todo:
            return None
        task = self.todo.popleft()
        self.doing[task.epoch, task.start] = (task, worker)
        return task

    def end(self, task: Task, outcome: Outcome, version: int, text: str) -> None:
        """The task is done, or to be given again; what is done already stays so.

        Args:
            task: which.
            outcome: done, failed or preempted.
            version: the newest that its pushes made.
            text: why, if it failed.
        """
        place = task.epoch, task.start
        if place in self.done or task.stop != min(self.work.num_portions, task.start + self.work.task_portions):
            return
        if outcome == "done":
            if self.doing.pop(place, None) is None:
                self.todo = deque(one for one in self.todo if (one.epoch, one.start) != place)
            self.done[place] = Finished(task.attempt, version)
            if not self.todo and not self.doing:
                self.epoch += 1
                self._fill()
        elif self.doing.get(place, (None,))[0] == task:
            self._return(task, outcome, text)

    def _return(self, task: Task, outcome: Outcome, text: str) -> None:
        place = task.epoch, task.start
        del self.doing[place]
        self.todo.appendleft(replace(task, attempt=task.attempt + 1))
        counts, most = (
            (self.failures, self.budget.failures)
            if outcome == "failed"
            else (self.preemptions, self.budget.preemptions)
        )
        counts[place] = counts.get(place, 0) + 1
        if counts[place] > most:
            self.stopped = (
                f"portions {task.start} to {task.stop} of epoch {task.epoch} were {outcome} {counts[place]} times, "
                f"more than the {most} of the budget{': ' if text else ''}{text}; data is never left out, so the job "
                "stops: mend what fails, or give Budget more, and go on from the last checkpoint"
            )

    def recall(self, worker: str) -> None:
        """What this worker has not done is to be given again."""
        for task, owner in list(self.doing.values()):
            if owner == worker:
                self._return(task, "preempted", f"{worker} is gone")
