"""Elastic training without servers: all workers take the same steps together, whoever they are at the moment.

Who belongs to the job is the coordinator's to say, by generations. The workers of a generation meet and add up what
each has computed of a batch. When one of them goes, dies or comes, all leave, meet in the next generation, and go on
from the copy of who has taken most steps. No two are more than one step apart, for a step is taken when the gradients
of all parts are added up, and that needs everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import isfinite, nan

import torch
from torch import Tensor

from counterpoint.data.sampler import sample_key, split
from counterpoint.errors import CounterpointError, DataError, PeerError, PlanError
from counterpoint.fabric.meeting import Transport
from counterpoint.server.calls import Task, View
from counterpoint.server.session import Later, Session
from counterpoint.server.working.circle import Circle, JobStoppedError, met
from counterpoint.server.working.loop import Ended, Event, Habits, Loss, Met, Trained, never, require_finite
from counterpoint.server.working.portions import Minibatch, Portions
from counterpoint.server.working.replica import Flats, Replica, align
from counterpoint.server.working.trees import Subtree, add, sum_of_parts

MOST_MEETINGS = 3
"""So often the workers of one generation try to meet."""


@dataclass(slots=True)
class Share:
    """What one worker has computed of a step.

    Attributes:
        had: for each parameter, how many of its parts had a gradient.
        trees: sums of the gradients of its parts, by dtype.
        trained: its parts.
        error: why it is not complete.
    """

    had: Tensor
    trees: dict[torch.dtype, list[Subtree]] = field(default_factory=dict)
    trained: list[Trained] = field(default_factory=list)
    error: Exception | None = None


class Lockstep:
    """One life of a worker at a job without servers.

    Args:
        replica: its copy.
        session: its belonging to the job.
        portions: the data.
        loss: from the model's output and the targets to the mean loss.
        habits: how it works.
        must_go: asked once in a step; when it holds, the worker leaves before the next one.
        transport: see :func:`counterpoint.fabric.meeting.connect`.

    Raises:
        PlanError: the data is not the job's, or checkpoints have no folder.
        CheckpointError: the copy is a checkpoint of training on other data.
    """

    def __init__(  # noqa: PLR0913 - as of `Worker`, most by keyword
        self,
        replica: Replica,
        session: Session,
        portions: Portions,
        loss: Loss,
        *,
        habits: Habits | None = None,
        must_go: Callable[[], bool] = never,
        transport: Transport = "auto",
    ) -> None:
        portions.require_work(session.job.work)
        replica.begin_on(str(portions.sampler))
        self.replica, self.session, self.portions, self.loss = replica, session, portions, loss
        self.habits, self.must_go, self.transport = habits or Habits(), must_go, transport
        self.has_left = False
        self._task: Task | None = None
        self._is_recorded = False
        if self.habits.checkpoint_every and replica.folder is None:
            raise PlanError(
                f"checkpoint_every={self.habits.checkpoint_every}, and no server keeps the weights; give the folder "
                "that workers save in, as train(..., folder=Path('checkpoints')), or 0"
            )

    @property
    def num_steps(self) -> int:
        """Steps of the whole job."""
        return self.session.job.work.num_epochs * self.portions.sampler.num_batches

    @property
    def is_complete(self) -> bool:
        """Whether all steps have been taken."""
        return self.replica.progress.steps >= self.num_steps

    def events(self) -> Iterator[Event]:
        """Work, and yield what has been done, until all steps have been taken or the worker has to go.

        Raises:
            PeerError: the job goes on without this worker, or cannot go on at all.
        """
        view, attempt = self.session.view, 0
        while not self.must_go():
            error: PeerError | None = None
            try:
                with met(self.session, view, attempt, must_go=self.must_go, transport=self.transport) as circle:
                    recorded = self._recorded() if circle.fabric.rank == 0 else 0
                    align(self.replica, circle, recorded)
                    yield Met(circle.generation, tuple(one.name for one in circle.members), self.replica.progress.steps)
                    yield from self._steps(circle)
            except JobStoppedError:
                raise
            except PeerError as found:
                error = found
            newer = self._await_newer(view, error)
            is_over = error is None and self.is_complete and set(newer.workers) <= set(view.workers)
            if is_over or self.must_go():
                break
            attempt = attempt + 1 if newer.generation == view.generation else 0
            self._require_sense(newer, attempt, error)
            view = newer
        self._leave()

    def run(self) -> list[Event]:
        """Work until all steps have been taken or the worker has to go; return what was done."""
        return list(self.events())

    def _leave(self) -> None:
        """The worker belongs to the job no longer; if nobody else does, its copy is saved where it has a folder."""
        self.has_left = not self.is_complete
        if self.has_left and len(self.session.view.workers) == 1:
            self.replica.save()
        self.session.leave()

    def _await_newer(self, view: View, error: PeerError | None) -> View:
        """Return who belongs to the job after a meeting; this waits until that is news, but not for ever.

        Args:
            view: who met.
            error: why they have parted, if not by a common decision.
        """
        patience = self.session.job.patience
        if error is not None:
            self.replica.progress.broken += 1
            left_s = patience.silence_s + 2 * patience.beat_s
        else:
            left_s = 0.0 if self.is_complete else patience.lease_s
        newer = self.session.await_view(view.generation, 0.0)
        while newer.generation == view.generation and left_s > 0 and not self.must_go():
            newer = self.session.await_view(view.generation, min(left_s, self.habits.wait_s))
            left_s -= self.habits.wait_s
        return newer

    def _require_sense(self, view: View, attempt: int, error: PeerError | None) -> None:
        """It makes sense to meet once more.

        Raises:
            JobStoppedError: these have tried too often, or the step has been broken off too often.
        """
        progress, budget = self.replica.progress, self.session.job.budget
        if attempt >= MOST_MEETINGS:
            why = error or "somebody wanted to go, and has not gone"
            raise JobStoppedError(f"tried {attempt} times to meet in generation {view.generation}: {why}") from error
        if progress.broken > budget.preemptions:
            raise JobStoppedError(
                f"step {progress.steps} was broken off {progress.broken} times, more than the {budget.preemptions} of "
                f"the budget, the last time because {error}"
            ) from error

    # Steps

    def _steps(self, circle: Circle) -> Iterator[Event]:
        """Take steps with these workers until all have been taken, or others are to come or to go.

        What everybody knows at the vote on a step is that everybody has taken all steps before it: these are recorded.
        """
        while True:
            step = self.replica.progress.steps
            share = self._share(circle, step)
            has_failed, is_outdated, had = self._vote(circle, share)
            if circle.fabric.rank == 0:
                self._record(step)
            if self.is_complete:
                return
            if has_failed:
                yield from self._fail(circle, share)
            else:
                self.replica.take_step(self._sums(circle, share), had, self._factor(step))
                yield from share.trained
            if is_outdated:
                return

    def _share(self, circle: Circle, step: int) -> Share:
        share = Share(torch.zeros(len(self.replica.parameters), dtype=torch.float64))
        start, stop = split(self.portions.per_step, len(circle.members))[circle.fabric.rank]
        try:
            for part in range(start, stop) if step < self.num_steps else ():
                self._compute(share, step, part)
        except Exception as error:  # whatever model, loss or dataset raise is the step's failure
            if isinstance(error, CounterpointError) and not isinstance(error, DataError):
                raise
            share.error = error
        return share

    def _compute(self, share: Share, step: int, part: int) -> None:
        """One part of a step is computed, and belongs to the share."""
        epoch, batch = divmod(step, self.portions.sampler.num_batches)
        number = batch * self.portions.per_step + part
        portion = epoch * self.portions.num_portions + number
        trained = Trained(portion, nan, 0)
        self.replica.optimizer.zero_grad()
        for one in self.portions.read(epoch, number):
            trained = Trained(portion, self._backward(one, portion), one.count)
        flats, had = self.replica.gradient()
        if trained.num_samples and not isfinite(trained.loss):
            had.fill_(1.0)  # zeros are meant, not nothing
        for kind, flat in flats.items():
            add(share.trees.setdefault(kind, []), Subtree(part, 1, flat))
        share.had += had
        share.trained.append(trained)

    def _backward(self, one: Minibatch, portion: int) -> float:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(sample_key(self.habits.seed, portion, 0))
            loss = self.loss(self.replica.model(*one.inputs), one.fields[-1])
            value = float(loss.detach())
            if require_finite(value, portion, self.habits):
                (loss * one.weight).backward()  # type: ignore[no-untyped-call]
        return value

    def _vote(self, circle: Circle, share: Share) -> tuple[bool, bool, Tensor]:
        """Return whether anybody has failed, whether anybody knows that others are to come or to go, and all `had`."""
        mine = torch.tensor([share.error is not None, self.must_go() or circle.is_outdated], dtype=torch.float64)
        vote = torch.cat([mine, share.had])
        circle.settle(circle.fabric.all_reduce("vote", vote, circle.group))
        return bool(vote[0]), bool(vote[1]), vote[2:]

    def _sums(self, circle: Circle, share: Share) -> Flats:
        num_parts = self.portions.per_step
        return {
            kind: sum_of_parts(circle, share.trees.get(kind, ()), num_parts, length, kind)
            for kind, length in self.replica.kinds.items()
        }

    def _factor(self, step: int) -> float:
        return 1.0 if self.habits.schedule is None else self.habits.schedule(step)

    def _fail(self, circle: Circle, share: Share) -> Iterator[Event]:
        """A step that somebody could not compute is computed again, as often as the budget allows.

        Raises:
            JobStoppedError: it was too often.
        """
        progress, budget = self.replica.progress, self.session.job.budget
        progress.failures += 1
        mine = "" if share.error is None else f"{type(share.error).__name__}: {share.error}"
        if mine:
            yield Ended(self._task_of(progress.steps, progress.failures - 1), "failed", mine)
        told = circle.fabric.gather_values("failures", mine, circle.group)
        texts = [f"{member.name}: {text}" for member, text in zip(circle.members, told, strict=True) if text]
        if progress.failures > budget.failures:
            raise JobStoppedError(
                f"step {progress.steps} failed {progress.failures} times, more than the {budget.failures} of the "
                f"budget: {'; '.join(texts)}; data is never left out, so the job stops: mend what fails, or give "
                "Budget more"
            ) from share.error

    # What the coordinator knows

    def _task_of(self, step: int, attempt: int) -> Task:
        epoch, batch = divmod(step, self.portions.sampler.num_batches)
        return Task(epoch, batch * self.portions.per_step, (batch + 1) * self.portions.per_step, attempt)

    def _recorded(self) -> int:
        """Return how many steps the coordinator knows of, by the task that comes next, which this worker has then.

        Raises:
            JobStoppedError: the coordinator gives none.
        """
        if self._task is None and not self._is_recorded:
            try:
                task = self.session.lease(self.session.job.patience.lease_s)
            except PeerError as error:
                raise JobStoppedError(str(error)) from error
            if isinstance(task, Later):
                raise JobStoppedError(f"{self.session.name} is the oldest worker, but another one has the next step")
            self._task, self._is_recorded = task, task is None
        if self._task is None:
            return self.num_steps
        return self._task.epoch * self.portions.sampler.num_batches + self._task.start // self.portions.per_step

    def _record(self, step: int) -> None:
        """The coordinator has written down that so many steps have been taken, and they are saved where that is due."""
        num_batches, per_step = self.portions.sampler.num_batches, self.portions.per_step
        while self._task is not None and self._task.epoch * num_batches + -(-self._task.stop // per_step) <= step:
            self.session.report(self._task, "done")
            self._task = None
            self._recorded()
        every = -(-self.habits.checkpoint_every // per_step)
        if step and every and step % every == 0:
            self.replica.save()
