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
from counterpoint.elastic.allreduce_worker import AllReduceWorker
from counterpoint.elastic.data_slices import DataSlices, slice_sampler
from counterpoint.elastic.optimizer_rules import OptimizerFactory
from counterpoint.elastic.ps_worker import LossFunction, PsWorker, SliceTrained, WorkerConfig, WorkerEvent
from counterpoint.elastic.remote_embedding import EmbeddingConfig
from counterpoint.elastic.remote_module import RemoteModule
from counterpoint.elastic.replica import ModelReplica
from counterpoint.elastic.sync_policy import SyncPolicy
from counterpoint.errors import PlanError
from counterpoint.optim.validation import require_counts
from counterpoint.ps.job_config import Asp, Bsp, Consistency, JobConfig, RetryPolicy, Ssp, Timeouts
from counterpoint.ps.session import Session
from counterpoint.ps.update_rules import Initializer
from counterpoint.training.callbacks.callback import EvaluationEnd
from counterpoint.training.evaluation import MetricsFn, make_loss_metric
from counterpoint.training.metrics import merge_metrics
from counterpoint.training.process_memory import RetainedMemory

CONSISTENCY_HELP = "bsp(4), four portions to a step; ssp(2), two pushes ahead of the slowest; or asp"


@dataclass(frozen=True, kw_only=True)
class ElasticTrainer:
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
        >>> elastic = ElasticTrainer(dataset=data, batch_size=20, epochs=2, consistency="bsp(4)")
        >>> elastic.job.data
        DataConfig(num_slices=20, num_epochs=2, slices_per_task=1, slices_per_step=4)
    """

    dataset: MapDataset
    batch_size: int
    epochs: int = 1
    consistency: str = "bsp(4)"
    servers: int = 1
    slices_per_task: int = 1
    sync_policy: SyncPolicy = field(default_factory=SyncPolicy)
    worker_config: WorkerConfig = field(default_factory=WorkerConfig)
    evaluate_every: int = 0
    name: str = "elastic"
    budget: RetryPolicy = field(default_factory=RetryPolicy)
    patience: Timeouts = field(default_factory=Timeouts)
    retain_freed_memory: bool = True

    def __post_init__(self) -> None:
        require_counts(batch_size=self.batch_size, epochs=self.epochs, task_portions=self.slices_per_task)
        self.sync_policy.check_consistency(parse_consistency(self.consistency))
        if not self.servers and not isinstance(parse_consistency(self.consistency), Bsp):
            raise PlanError(
                f"consistency={self.consistency!r} with servers=0: workers without servers take every step together; "
                "give bsp(4), or servers=1"
            )

    @property
    def data_slices(self) -> DataSlices:
        """The data, by portions."""
        mode, pieces = parse_consistency(self.consistency), self.sync_policy.push_every
        sampler = slice_sampler(
            len(self.dataset), self.batch_size, mode, minibatches_per_slice=pieces, seed=self.worker_config.seed
        )
        return DataSlices(self.dataset, sampler, mode, pieces)

    @property
    def job(self) -> JobConfig:
        """What the servers and all workers have to agree on."""
        portions = self.data_slices
        least = 1 if self.servers else portions.slices_per_step
        work = portions.data_config(self.epochs, slices_per_task=max(least, self.slices_per_task))
        return JobConfig(self.name, parse_consistency(self.consistency), self.servers, work, self.budget, self.patience)

    def train(  # noqa: PLR0913 - what a worker may choose, all by keyword
        self,
        session: Session,
        model: nn.Module,
        *,
        loss: LossFunction,
        optimizer: optim.Optimizer | OptimizerFactory,
        tables: Mapping[str, EmbeddingConfig | Initializer] | None = None,
        eval_dataset: MapDataset | None = None,
        metrics: MetricsFn | None = None,
        should_stop: Callable[[], bool] | None = None,
        **options: Any,  # noqa: ANN401 - checked by Served
    ) -> WorkerReport:
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
            **options: of ``counterpoint.elastic.remote_module.Served``, such as ``code="int8"``; without servers,
                those of ``counterpoint.elastic.replica.Replica``.

        Returns:
            What this worker did.

        Raises:
            PlanError: the job, the model and the optimizer do not fit together.
            PeerError: the job has stopped, or goes on without this worker.
        """
        if session.job != self.job:
            raise PlanError(f"the session is of {session.job}, but this is {self.job}; build both from one Elastic")
        copy = self._make_replica(session, model, optimizer, tables, options)
        report, keeping = WorkerReport([], [], is_complete=False), RetainedMemory(enabled=self.retain_freed_memory)

        def measure_now() -> None:
            if eval_dataset is not None:
                found = evaluate_replica(copy, eval_dataset, metrics or make_loss_metric(loss), self.batch_size)
                report.evaluations.append(EvaluationEnd(len(report.losses), found))

        try:
            with watch_sigterm() as is_terminated:
                going = should_stop or (lambda: False)
                worker = self._make_worker(copy, session, loss, lambda: is_terminated() or going())
                self._run_worker(worker, report, measure_now, keeping)
            if report.is_complete:
                measure_now()
                copy.export_weights()
        finally:
            keeping.stop()
            copy.close()
        return report

    def _make_replica(
        self,
        session: Session,
        model: nn.Module,
        optimizer: optim.Optimizer | OptimizerFactory,
        tables: Mapping[str, EmbeddingConfig | Initializer] | None,
        options: Mapping[str, Any],
    ) -> RemoteModule | ModelReplica:
        """Return the worker's copy of the model.

        Raises:
            PlanError: an option is about what lies on servers, and there are none.
        """
        if self.servers:
            return RemoteModule(model, session, optimizer, tables=tables, sync=self.sync_policy, **options)
        about_servers = [*(["tables"] if tables else []), *sorted(options.keys() - {"buffers", "folder"})]
        if about_servers:
            raise PlanError(
                f"{about_servers[0]}= is about what lies on servers, and with servers=0 nothing does; leave it out, or "
                "give servers=1"
            )
        return ModelReplica(model, optimizer, **options)

    def _make_worker(
        self,
        replica: RemoteModule | ModelReplica,
        session: Session,
        loss: LossFunction,
        should_stop: Callable[[], bool],
    ) -> PsWorker | AllReduceWorker:
        if isinstance(replica, RemoteModule):
            return PsWorker(replica, self.data_slices, loss, config=self.worker_config, should_stop=should_stop)
        return AllReduceWorker(
            replica, session, self.data_slices, loss, config=self.worker_config, should_stop=should_stop
        )

    def _run_worker(
        self,
        worker: PsWorker | AllReduceWorker,
        report: WorkerReport,
        evaluate_now: Callable[[], None],
        retained_memory: RetainedMemory,
    ) -> None:
        """All that the worker did is in the report, and it was measured whenever that was due."""
        count = 0
        for event in worker.events():
            report.events.append(event)
            count += isinstance(event, SliceTrained)
            if count:
                retained_memory.start()
            if isinstance(event, SliceTrained) and self.evaluate_every and count % self.evaluate_every == 0:
                evaluate_now()
        report.is_complete = not worker.has_left


@dataclass(slots=True)
class WorkerReport:
    """What one worker did.

    Attributes:
        events: portions that it computed, tasks that ended, times without work, in order.
        evaluations: what it measured, after so many portions of its own.
        is_complete: whether all data of all epochs was counted when it ended.
    """

    events: list[WorkerEvent]
    evaluations: list[EvaluationEnd]
    is_complete: bool

    @property
    def losses(self) -> list[float]:
        """The loss of each portion that this worker computed."""
        return [event.loss for event in self.events if isinstance(event, SliceTrained)]


def parse_consistency(text: str) -> Consistency:
    """Return the consistency that a text names.

    Raises:
        PlanError: there is none of that name.

    Example:
        >>> parse_consistency("bsp(4)"), parse_consistency("asp")
        (Bsp(slices_per_step=4), Asp())
    """
    found = re.fullmatch(r"(bsp|ssp)\((\d{1,9})\)|asp", str(text).strip())
    if found is None:
        raise PlanError(f"there is no consistency {text!r}; give {CONSISTENCY_HELP}")
    if found[1] is None:
        return Asp()
    return Bsp(int(found[2])) if found[1] == "bsp" else Ssp(int(found[2]))


def evaluate_replica(
    replica: RemoteModule | ModelReplica, dataset: MapDataset, metrics: MetricsFn, batch_size: int
) -> dict[str, float]:
    """Return the mean of every metric over a dataset, by the newest weights; the model is in evaluation mode.

    Args:
        copy: the worker's, of the model.
        dataset: map-style, samples ``(inputs..., target)``.
        measure: from outputs and targets to tallies.
        batch_size: samples at once.
    """
    sampler = Sampler(len(dataset), min(batch_size, len(dataset)), shuffle="sequential")
    before = [(module, module.training) for module in replica.model.modules()]
    found = []
    with replica.latest_weights() as model:
        model.eval()
        for index in range(sampler.num_batches):
            *inputs, targets = fetch(dataset, sampler.batch(0, index))
            found.append(metrics(model(*inputs), targets))
    for module, flag in before:
        module.training = flag
    return {name: tally.mean for name, tally in merge_metrics(found).items()}


@contextmanager
def watch_sigterm() -> Iterator[Callable[[], bool]]:
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
