"""Elastic data-parallel training: every worker runs the same few lines; workers may join and leave at any time."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor, nn, optim
from torch.utils._pytree import tree_leaves

from counterpoint.data.fetch import MapDataset, fetch
from counterpoint.data.sampler import Sampler
from counterpoint.elastic.allreduce_worker import AllReduceWorker
from counterpoint.elastic.data_slices import DataSlices, slice_sampler
from counterpoint.elastic.optimizer_rules import OptimizerFactory
from counterpoint.elastic.ps_worker import PsWorker, SliceTrained, WorkerConfig, WorkerEvent
from counterpoint.elastic.remote_embedding import EmbeddingConfig
from counterpoint.elastic.remote_module import RemoteModule
from counterpoint.elastic.replica import ModelReplica
from counterpoint.elastic.sync_policy import SyncPolicy
from counterpoint.errors import PlanError
from counterpoint.launchers.signals import collect_signals
from counterpoint.optim.validation import renamed_parameters, require_counts
from counterpoint.ps.consistency import Bsp, Consistency, ConsistencyName, parse_consistency
from counterpoint.ps.job_config import JobConfig, RetryPolicy, Timeouts
from counterpoint.ps.session import Session
from counterpoint.ps.update_rules import Initializer
from counterpoint.runtime.loss.loss_check import SUMS_REMEDY, LossCheck
from counterpoint.runtime.loss.loss_parameters import require_no_loss_params
from counterpoint.runtime.loss.loss_reduction import LossFunction, compute_sample_mean
from counterpoint.training.callbacks.callback import EvaluationEnd
from counterpoint.training.evaluation import MetricsFn, make_loss_metric, require_metrics
from counterpoint.training.metrics import merge_metrics
from counterpoint.training.ranks.process_memory import RetainedMemory

DEFAULT_SLICES_PER_STEP = 4


@renamed_parameters({"budget": "retry_policy", "patience": "timeouts"})
@dataclass(frozen=True, kw_only=True)
class ElasticTrainer:
    """The configuration that all workers of an elastic job share.

    Every process builds the same one: the process that starts the servers uses its ``job``, and workers call ``train``.

    Args:
        dataset: map-style, samples ``(inputs..., target)``; the same for all workers.
        batch_size: samples of a *global* batch under bsp, however many workers there are; of a minibatch otherwise.
        epochs: passes over the dataset.
        consistency: ``bsp`` splits a batch into data slices, which any workers compute; ``ssp`` and ``asp`` make every
            data slice an update of its own. The same names as of the strategy ``server(n, consistency=...)``.
        staleness: with ssp, by how many pushes a worker may be ahead of the slowest; with 0 all wait for the slowest.
        slices_per_step: with bsp, data slices of a batch; 4 by default.
        servers: parameter servers, which store the weights; 0 for none: every worker has all weights, and gradients are
            all-reduced among workers, under bsp.
        slices_per_task: data slices that a worker is assigned at once; without servers, that are recorded at once.
        sync_policy: how often workers push and pull.
        worker_config: how workers run.
        evaluate_every: number of its own data slices after which a worker also evaluates; 0 for the end only.
        name: of the job.
        retry_policy: how often a task may fail before the job stops; no data slice is ever skipped.
        timeouts: of heartbeats and replies.
        retain_freed_memory: whether memory that a minibatch frees stays with the process for the next one; glibc only.

    Raises:
        PlanError: there is no such consistency, or the numbers do not fit together.

    Example:
        >>> import torch
        >>> data = torch.utils.data.TensorDataset(torch.randn(100, 2), torch.randn(100, 1))
        >>> elastic = ElasticTrainer(dataset=data, batch_size=20, epochs=2, consistency="bsp")
        >>> elastic.job.data
        DataConfig(num_slices=20, num_epochs=2, slices_per_task=1, slices_per_step=4)
    """

    dataset: MapDataset
    batch_size: int
    epochs: int = 1
    consistency: ConsistencyName = "bsp"
    staleness: int = 0
    slices_per_step: int | None = None
    servers: int = 1
    slices_per_task: int = 1
    sync_policy: SyncPolicy = field(default_factory=SyncPolicy)
    worker_config: WorkerConfig = field(default_factory=WorkerConfig)
    evaluate_every: int = 0
    name: str = "elastic"
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    timeouts: Timeouts = field(default_factory=Timeouts)
    retain_freed_memory: bool = True

    def __post_init__(self) -> None:
        require_counts(batch_size=self.batch_size, epochs=self.epochs, slices_per_task=self.slices_per_task)
        consistency = self._consistency
        self.sync_policy.check_consistency(consistency)
        if self.slices_per_step is not None and not isinstance(consistency, Bsp):
            raise PlanError(
                f"slices_per_step={self.slices_per_step} with consistency={self.consistency}, whose updates are single "
                "data slices; omit it, or give consistency=bsp"
            )
        if not self.servers and not isinstance(consistency, Bsp):
            raise PlanError(
                f"consistency={self.consistency} with servers=0: workers without servers are synchronous; "
                "give consistency=bsp, or servers=1"
            )

    @property
    def _consistency(self) -> Consistency:
        slices_per_step = DEFAULT_SLICES_PER_STEP if self.slices_per_step is None else self.slices_per_step
        return parse_consistency(self.consistency, staleness=self.staleness, slices_per_step=slices_per_step)

    @property
    def data_slices(self) -> DataSlices:
        """The dataset, split into data slices."""
        mode, minibatches = self._consistency, self.sync_policy.push_every
        sampler = slice_sampler(
            len(self.dataset), self.batch_size, mode, minibatches_per_slice=minibatches, seed=self.worker_config.seed
        )
        return DataSlices(self.dataset, sampler, mode, minibatches)

    @property
    def job(self) -> JobConfig:
        """The job configuration that the servers and all workers must agree on."""
        data_slices = self.data_slices
        min_slices = 1 if self.servers else data_slices.slices_per_step
        work = data_slices.data_config(self.epochs, slices_per_task=max(min_slices, self.slices_per_task))
        return JobConfig(self.name, self._consistency, self.servers, work, self.retry_policy, self.timeouts)

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
        """Work for the job until all its data is processed, or until this worker has to stop.

        It stops on SIGTERM (in the main thread), or when ``should_stop`` returns True: it returns its task between two
        minibatches, so that others do the rest of it, and leaves.

        Args:
            session: this worker's membership in the job.
            model: any module; afterwards it has the newest weights, except tables.
            loss: from the model's output and the targets to the mean loss of the samples.
            optimizer: of torch, or a factory; servers apply its update rule. Without servers, any that needs no
                closure.
            tables: embedding weights of which a worker only has the rows that it looks up, and how rows are
                initialized.
            eval_dataset: held-out data, evaluated by this worker when all data is processed.
            metrics: from outputs and targets to a dict of ``MeanMetric``; by default the loss.
            should_stop: called between two minibatches.
            **options: of the worker's replica with servers, such as ``compress="int8"``, or of the replica without
                servers.

        Returns:
            What this worker did.

        Raises:
            PlanError: the job, the model and the optimizer do not fit together.
            PeerError: the job has stopped, or continues without this worker.
        """
        if session.job != self.job:
            raise PlanError(
                f"the session is of {session.job}, but this is {self.job}; build both from one ElasticTrainer"
            )
        require_no_loss_params(model, loss, "cp.ElasticTrainer")
        replica = self._make_replica(session, model, optimizer, tables, options)
        report = WorkerReport([], [], is_complete=False)
        retained_memory = RetainedMemory(enabled=self.retain_freed_memory)

        def measure_now() -> None:
            if eval_dataset is not None:
                metric_means = evaluate_replica(
                    replica, eval_dataset, metrics or make_loss_metric(loss), self.batch_size
                )
                report.evaluations.append(EvaluationEnd(len(report.losses), metric_means))

        try:
            with collect_signals((signal.SIGTERM,)) as received:
                stop_requested = should_stop or (lambda: False)
                worker = self._make_worker(
                    replica, session, self._require_sample_mean(loss), lambda: bool(received) or stop_requested()
                )
                self._run_worker(worker, report, measure_now, retained_memory)
            if report.is_complete:
                measure_now()
                replica.export_weights()
        finally:
            retained_memory.stop()
            replica.close()
        return report

    def _make_replica(
        self,
        session: Session,
        model: nn.Module,
        optimizer: optim.Optimizer | OptimizerFactory,
        tables: Mapping[str, EmbeddingConfig | Initializer] | None,
        options: Mapping[str, Any],
    ) -> RemoteModule | ModelReplica:
        """Build the worker's replica of the model.

        Raises:
            PlanError: an option needs servers, and there are none.
        """
        if self.servers:
            return RemoteModule(model, session, optimizer, tables=tables, sync_policy=self.sync_policy, **options)
        server_options = [*(["tables"] if tables else []), *sorted(options.keys() - {"buffers", "folder"})]
        if server_options:
            raise PlanError(
                f"{server_options[0]}= is an option for weights on servers, but servers=0; omit it, or give servers=1"
            )
        return ModelReplica(model, optimizer, **options)

    def _require_sample_mean(self, loss: LossFunction) -> Callable[[Any, Any], Tensor]:
        """Return a loss that is checked to be a mean over samples, where parts of a batch are added up."""
        slices = self.data_slices
        is_whole = not isinstance(self._consistency, Bsp) or slices.slices_per_step * slices.minibatches_per_slice == 1

        loss_check, steps = LossCheck(loss, is_sum=False, remedy=SUMS_REMEDY), count()

        def compute(output: Any, targets: Any) -> Tensor:  # noqa: ANN401 - whatever the model gives
            mean = compute_sample_mean(loss, output, targets, "a minibatch", is_whole=is_whole)
            num_samples = next(
                (len(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dim()), 0
            )
            if not is_whole and num_samples:
                step = next(steps)
                if loss_check.is_due(step, targets, num_samples, None):
                    loss_check.check(loss, step, output, targets, float(mean.detach()), num_samples, "a minibatch")
            return mean

        return compute

    def _make_worker(
        self,
        replica: RemoteModule | ModelReplica,
        session: Session,
        loss: Callable[[Any, Any], Tensor],
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
        """Run the worker, record its events, and evaluate when it is due."""
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
        events: data slices that it computed, tasks that ended, times without work, in order.
        evaluations: its evaluations, each with the number of its own data slices before it.
        is_complete: whether all data of all epochs was processed when it ended.
    """

    events: list[WorkerEvent]
    evaluations: list[EvaluationEnd]
    is_complete: bool

    @property
    def losses(self) -> list[float]:
        """The loss of each data slice that this worker computed."""
        return [event.loss for event in self.events if isinstance(event, SliceTrained)]


def evaluate_replica(
    replica: RemoteModule | ModelReplica, dataset: MapDataset, metrics: MetricsFn, batch_size: int
) -> dict[str, float]:
    """Return the mean of every metric over a dataset, by the newest weights; the model is in evaluation mode.

    Args:
        replica: the worker's replica of the model.
        dataset: map-style, samples ``(inputs..., target)``.
        metrics: the metrics function.
        batch_size: samples of a batch.
    """
    sampler = Sampler(len(dataset), min(batch_size, len(dataset)), shuffle="sequential")
    flags = [(module, module.training) for module in replica.model.modules()]
    per_batch = []
    with replica.latest_weights() as model:
        model.eval()
        for index in range(sampler.num_batches):
            *inputs, targets = fetch(dataset, sampler.batch(0, index))
            per_batch.append(require_metrics(metrics(model(*inputs), targets)))
    for module, flag in flags:
        module.training = flag
    return {name: tally.mean for name, tally in merge_metrics(per_batch).items()}
