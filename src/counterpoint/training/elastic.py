"""Elastic training: the same few lines in every worker, however many there are, whenever they come and go."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn, optim

from counterpoint.data.fetch import MapDataset, fetch
from counterpoint.data.sampler import Sampler
from counterpoint.errors import PlanError
from counterpoint.optim.options import require_counts
from counterpoint.server.choices import Start
from counterpoint.server.job import Asp, Bsp, Budget, Consistency, Job, Patience, Ssp
from counterpoint.server.session import Session
from counterpoint.server.working.lockstep import Lockstep
from counterpoint.server.working.lookups import Table
from counterpoint.server.working.loop import Event, Habits, Loss, Trained, Worker
from counterpoint.server.working.optimizers import Factory
from counterpoint.server.working.portions import Portions, sampler_of
from counterpoint.server.working.replica import Replica
from counterpoint.server.working.rhythm import Rhythm
from counterpoint.server.working.served import Served
from counterpoint.training.evaluation import Measure, measuring
from counterpoint.training.events import Evaluated
from counterpoint.training.keeping import Keeping
from counterpoint.training.tally import add_tallies

FORMS = "bsp(4), four portions to a step; ssp(2), two pushes ahead of the slowest; or asp"


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """What all workers of an elastic job have in common.

    Every process builds the same one: whoever starts the servers takes its ``job``, and whoever works calls ``train``.

    Args:
        dataset: map-style, samples ``(inputs..., target)``; the same for all workers.
        batch_size: samples of a *global* batch under bsp, however many workers there are; of a minibatch otherwise.
        epochs: passes over the dataset.
        consistency: ``bsp(4)`` cuts a batch into four portions, which any workers compute; ``ssp(2)`` and ``asp`` make
            every portion an update of its own.
        servers: that keep the weights; 0 for none: every worker has all of them, and gradients are added up among
            workers (allreduce), under bsp.
        task_portions: portions that a worker is given at once; without servers, that are recorded at once.
        rhythm: how often workers push and fetch.
        habits: how they work.
        evaluate_every: a worker measures held-out data after so many portions of its own, too; 0 for the end only.
        name: of the job.
        budget: how often a task may go wrong before the job stops; nothing is ever left out.
        patience: how long anybody waits for anybody.
        keep_freed: whether memory that a minibatch frees stays with the worker's process for the next one; glibc only.

    Raises:
        PlanError: there is no such consistency, or the numbers do not go together.

    Example:
        >>> import torch
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 2), torch.randn(100, 1))
        >>> elastic = Elastic(dataset=data, batch_size=20, epochs=2, consistency="bsp(4)")
        >>> elastic.job.work
        Work(num_portions=20, num_epochs=2, task_portions=1, step_portions=4)
    """

    dataset: MapDataset
    batch_size: int
    epochs: int = 1
    consistency: str = "bsp(4)"
    servers: int = 1
    task_portions: int = 1
    rhythm: Rhythm = field(default_factory=Rhythm)
    habits: Habits = field(default_factory=Habits)
    evaluate_every: int = 0
    name: str = "elastic"
    budget: Budget = field(default_factory=Budget)
    patience: Patience = field(default_factory=Patience)
    keep_freed: bool = True

    def __post_init__(self) -> None:
        require_counts(batch_size=self.batch_size, epochs=self.epochs, task_portions=self.task_portions)
        self.rhythm.require_fit(consistency_of(self.consistency))
        if not self.servers and not isinstance(consistency_of(self.consistency), Bsp):
            raise PlanError(
                f"consistency={self.consistency!r} with servers=0: workers without servers take every step together; "
                "give bsp(4), or servers=1"
            )

    @property
    def portions(self) -> Portions:
        """The data, by portions."""
        mode, pieces = consistency_of(self.consistency), self.rhythm.push_every
        sampler = sampler_of(len(self.dataset), self.batch_size, mode, minibatches=pieces, seed=self.habits.seed)
        return Portions(self.dataset, sampler, mode, pieces)

    @property
    def job(self) -> Job:
        """What the servers and all workers have to agree on."""
        portions = self.portions
        least = 1 if self.servers else portions.per_step
        work = portions.work(self.epochs, task_portions=max(least, self.task_portions))
        return Job(self.name, consistency_of(self.consistency), self.servers, work, self.budget, self.patience)

    def train(  # noqa: PLR0913 - what a worker may choose, all by keyword
        self,
        session: Session,
        model: nn.Module,
        *,
        loss: Loss,
        optimizer: optim.Optimizer | Factory,
        tables: Mapping[str, Table | Start] | None = None,
        evaluation: MapDataset | None = None,
        measure: Measure | None = None,
        must_go: Callable[[], bool] | None = None,
        **options: Any,  # noqa: ANN401 - checked by Served
    ) -> Report:
        """Work for the job until all its data is counted, or until this worker has to go.

        It has to go when it is sent SIGTERM (where this is the main thread), or when ``must_go`` says so: it gives its
        task back between two minibatches, so that others do the rest of it, and leaves.

        Args:
            session: this worker's belonging to the job.
            model: any module; afterwards it has the newest weights, but for tables.
            loss: from the model's output and the targets to the mean loss of the samples.
            optimizer: of torch, or a factory; servers do what it would. Without servers, any that needs no closure.
            tables: weights of embeddings of which only rows that are looked up lie on a worker, and how rows begin.
            evaluation: held-out data, measured by this worker when all data is counted.
            measure: from outputs and targets to tallies; by default the loss.
            must_go: asked between two minibatches.
            **options: of ``counterpoint.server.working.served.Served``, such as ``code="int8"``; without servers,
                those of ``counterpoint.server.working.replica.Replica``.

        Returns:
            What this worker did.

        Raises:
            PlanError: the job, the model and the optimizer do not fit together.
            PeerError: the job has stopped, or goes on without this worker.
        """
        if session.job != self.job:
            raise PlanError(f"the session is of {session.job}, but this is {self.job}; build both from one Elastic")
        copy = self._copy(session, model, optimizer, tables, options)
        report, keeping = Report([], [], is_complete=False), Keeping(wanted=self.keep_freed)

        def measure_now() -> None:
            if evaluation is not None:
                found = evaluate(copy, evaluation, measure or measuring(loss), self.batch_size)
                report.evaluations.append(Evaluated(len(report.losses), found))

        try:
            with until_terminated() as is_terminated:
                going = must_go or (lambda: False)
                worker = self._worker(copy, session, loss, lambda: is_terminated() or going())
                self._follow(worker, report, measure_now, keeping)
            if report.is_complete:
                measure_now()
                copy.give_back()
        finally:
            keeping.end()
            copy.close()
        return report

    def _copy(
        self,
        session: Session,
        model: nn.Module,
        optimizer: optim.Optimizer | Factory,
        tables: Mapping[str, Table | Start] | None,
        options: Mapping[str, Any],
    ) -> Served | Replica:
        """Return the worker's copy of the model.

        Raises:
            PlanError: an option is about what lies on servers, and there are none.
        """
        if self.servers:
            return Served(model, session, optimizer, tables=tables, rhythm=self.rhythm, **options)
        about_servers = [*(["tables"] if tables else []), *sorted(options.keys() - {"buffers", "folder"})]
        if about_servers:
            raise PlanError(
                f"{about_servers[0]}= is about what lies on servers, and with servers=0 nothing does; leave it out, or "
                "give servers=1"
            )
        return Replica(model, optimizer, **options)

    def _worker(
        self, copy: Served | Replica, session: Session, loss: Loss, must_go: Callable[[], bool]
    ) -> Worker | Lockstep:
        if isinstance(copy, Served):
            return Worker(copy, self.portions, loss, habits=self.habits, must_go=must_go)
        return Lockstep(copy, session, self.portions, loss, habits=self.habits, must_go=must_go)

    def _follow(
        self, worker: Worker | Lockstep, report: Report, measure_now: Callable[[], None], keeping: Keeping
    ) -> None:
        """All that the worker did is in the report, and it was measured whenever that was due."""
        count = 0
        for event in worker.events():
            report.events.append(event)
            count += isinstance(event, Trained)
            if count:
                keeping.begin()
            if isinstance(event, Trained) and self.evaluate_every and count % self.evaluate_every == 0:
                measure_now()
        report.is_complete = not worker.has_left


@dataclass(slots=True)
class Report:
    """What one worker did.

    Attributes:
        events: portions that it computed, tasks that ended, times without work, in order.
        evaluations: what it measured, after so many portions of its own.
        is_complete: whether all data of all epochs was counted when it ended.
    """

    events: list[Event]
    evaluations: list[Evaluated]
    is_complete: bool

    @property
    def losses(self) -> list[float]:
        """The loss of each portion that this worker computed."""
        return [event.loss for event in self.events if isinstance(event, Trained)]


def consistency_of(text: str) -> Consistency:
    """Return the consistency that a text names.

    Raises:
        PlanError: there is none of that name.

    Example:
        >>> consistency_of("bsp(4)"), consistency_of("asp")
        (Bsp(portions=4), Asp())
    """
    found = re.fullmatch(r"(bsp|ssp)\((\d{1,9})\)|asp", str(text).strip())
    if found is None:
        raise PlanError(f"there is no consistency {text!r}; give {FORMS}")
    if found[1] is None:
        return Asp()
    return Bsp(int(found[2])) if found[1] == "bsp" else Ssp(int(found[2]))


def evaluate(copy: Served | Replica, dataset: MapDataset, measure: Measure, batch_size: int) -> dict[str, float]:
    """Return the mean of every metric over a dataset, by the newest weights; the model is in evaluation mode.

    Args:
        copy: the worker's, of the model.
        dataset: map-style, samples ``(inputs..., target)``.
        measure: from outputs and targets to tallies.
        batch_size: samples at once.
    """
    sampler = Sampler(len(dataset), min(batch_size, len(dataset)), shuffle="sequential")
    before = [(module, module.training) for module in copy.model.modules()]
    found = []
    with copy.reading() as model:
        model.eval()
        for index in range(sampler.num_batches):
            *inputs, targets = fetch(dataset, sampler.batch(0, index))
            found.append(measure(model(*inputs), targets))
    for module, flag in before:
        module.training = flag
    return {name: tally.mean for name, tally in add_tallies(found).items()}


@contextmanager
def until_terminated() -> Iterator[Callable[[], bool]]:
    """Tell, when asked, whether SIGTERM has come meanwhile; never outside the main thread, which does not hear it."""
    told: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        yield lambda: bool(told)
    finally:
        signal.signal(signal.SIGTERM, before)
