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
from counterpoint.errors import CounterpointError, DataError
from counterpoint.server.calls import Task
from counterpoint.server.job import Ssp
from counterpoint.server.messages import Outcome
from counterpoint.server.session import LATER, Later
from counterpoint.server.working.optimizers import require_scalable
from counterpoint.server.working.portions import Portions
from counterpoint.server.working.reading import Place, Reading
from counterpoint.server.working.rhythm import step_of
from counterpoint.server.working.served import Served

Loss: TypeAlias = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Trained:
    """A portion is computed and pushed.

    Args:
        portion: of the whole run.
        loss: mean over its samples; nan where there are none.
        num_samples: of the portion.
    """

    portion: int
    loss: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A task is over.

    Args:
        task: which.
        outcome: how.
        text: why, if it failed.
    """

    task: Task
    outcome: Outcome
    text: str = ""


@dataclass(frozen=True, slots=True)
class Idle:
    """There is data left, but none that may be begun now."""


@dataclass(frozen=True, slots=True)
class Met:
    """The workers of a job without servers have met, and go on together.

    Args:
        generation: in which they are all who belong to the job.
        members: their names, the oldest first.
        step: that comes next.
    """

    generation: int
    members: tuple[str, ...]
    step: int


Event: TypeAlias = Trained | Ended | Idle | Met


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
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
    checkpoint_every: int = 0
    wait_s: float = 1.0
    prefetch: bool = True


def never() -> bool:
    """Tell that nobody wants the worker to go."""
    return False


def require_finite(loss: float, portion: int, habits: Habits) -> bool:
    """Tell whether a loss is finite, and may be; if not, it counts as a gradient of zeros.

    Args:
        loss: of some samples.
        portion: that they are of.
        habits: that say what another loss means.

    Raises:
        DataError: it is not, and that is an error.
    """
    if not isfinite(loss) and habits.nonfinite == "error":
        raise DataError(
            f"the loss of portion {portion} is {loss}; look at its samples, take a smaller learning rate, or give "
            "nonfinite='skip' to count it as zeros"
        )
    return isfinite(loss)


class Worker:
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
        served: Served,
        portions: Portions,
        loss: Loss,
        *,
        habits: Habits | None = None,
        must_go: Callable[[], bool] = never,
    ) -> None:
        self.served, self.portions, self.loss = served, portions, loss
        self.session = served.session
        self.habits = habits or Habits()
        self.must_go = must_go
        self.has_left = False
        self._is_in = False
        portions.require_work(self.session.job.work)
        if self.habits.schedule is not None:
            require_scalable(served.rules)

    def events(self) -> Iterator[Event]:
        """Work, and yield what has been done, until all data is counted or the worker has to go."""
        while not self.must_go():
            task = self.session.lease(self.habits.wait_s)
            if task is None:
                self._rest()
                return
            if isinstance(task, Later):
                assert task is LATER
                self._rest()
                yield Idle()
                continue
            yield from self._carry_out(task)
        self.session.leave()
        self.has_left = True

    def run(self) -> list[Event]:
        """Work until all data is counted or the worker has to go; return what was done."""
        return list(self.events())

    def _rest(self) -> None:
        if self._is_in:
            self._is_in = False
            self.session.rest()

    def _enter(self) -> None:
        if isinstance(self.session.job.consistency, Ssp) and not self._is_in:
            self._is_in = True
            self.session.enter()
            self.served.forget()

    def _carry_out(self, task: Task) -> Iterator[Event]:
        self._enter()
        try:
            is_whole = yield from self._train(task)
            self.served.settle()
        except CounterpointError as error:
            if not isinstance(error, DataError):
                raise
            yield self._failed(task, error)
            return
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            self._end(task, "preempted", "the worker was interrupted")
            raise
        except Exception as error:  # noqa: BLE001 - whatever model, loss or dataset raise is the task's failure
            yield self._failed(task, error)
            return
        yield self._end(task, "done" if is_whole else "preempted", "" if is_whole else "the worker has to go")
        every = self.habits.checkpoint_every
        first = self._number(task, task.start)
        if is_whole and every and first // every != (first + task.stop - task.start) // every:
            self.session.checkpoint()

    def _failed(self, task: Task, error: Exception) -> Ended:
        return self._end(task, "failed", f"{type(error).__name__}: {error}")

    def _end(self, task: Task, outcome: Outcome, text: str) -> Ended:
        if outcome != "done":
            self.served.drop()
        self.session.report(task, outcome, text)
        return Ended(task, outcome, text)

    def _number(self, task: Task, number: int) -> int:
        return task.epoch * self.session.job.work.num_portions + number

    def _train(self, task: Task) -> Generator[Event, None, bool]:
        """Yield the portions of a task as they are done; returns whether that is all of them."""
        numbers = range(task.start, task.stop)
        reading = Reading(self.portions, task.epoch, numbers, max(1, self.served.rhythm.fetch_ahead))
        for portion, places in reading.portions():
            total, count = 0.0, sum(place.minibatch.count for place in places)
            for place in places:
                if self.must_go():
                    return False
                total += place.minibatch.count * self._compute(place, reading.ahead_of(place))
            if not places:
                self.served.pass_over(portion)
            yield Trained(portion, total / count if count else nan, count)
        return True

    def _compute(self, place: Place, ahead: Sequence[Place]) -> float:
        """Compute one minibatch; return its loss.

        Args:
            place: the minibatch.
            ahead: those that come next, as far as they are known.
        """
        served, one, is_last = self.served, place.minibatch, place.is_last
        served.begin(place.portion, one.inputs, is_last=is_last)
        if served.rhythm.fetch_ahead:
            self._expect(ahead)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(sample_key(self.habits.seed, place.portion, place.at))
            loss = self.loss(served.model(*one.inputs), one.fields[-1])
            value = float(loss.detach())
            self._expect(ahead)
            if require_finite(value, place.portion, self.habits):
                (loss * (one.weight * self._factor(place.portion))).backward()  # type: ignore[no-untyped-call]
        served.finish(is_skipped=not isfinite(value))
        return value

    def _expect(self, ahead: Sequence[Place]) -> None:
        for place in ahead if self.habits.prefetch else ():
            self.served.expect(place.minibatch.inputs, place.portion)

    def _factor(self, portion: int) -> float:
        schedule = self.habits.schedule
        if schedule is None:
            return 1.0
        step, following = step_of(self.session.job.consistency, portion)
        return schedule(step if following else portion)
