"""Evaluate a dataset with the plan's own ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from counterpoint.data.sampler import Cursor
from counterpoint.errors import DataError, PlanError
from counterpoint.optim.validation import shorten
from counterpoint.runtime.loss.loss_reduction import LossFunction, compute_mean_loss
from counterpoint.training.batches.batch_source import BatchSource
from counterpoint.training.batches.global_batch import collect_lengths
from counterpoint.training.metrics import MeanMetric, Metrics, merge_metrics
from counterpoint.training.ranks.local_ranks import LocalRanks

MetricsFn: TypeAlias = Callable[[Any, Any], Metrics]


def evaluate(local_ranks: LocalRanks, batches: BatchSource, metrics: MetricsFn | None) -> dict[str, float]:
    """Return the mean of every metric over one epoch, the same on all ranks; the model is in evaluation mode.

    Replicas with different weights all evaluate the mean of their weights.

    Args:
        local_ranks: the ranks.
        batches: the held-out data.
        metrics: the metrics function; None for the loss.
    """
    cursor = Cursor()
    if batches.count_left(cursor, 1):
        local_ranks.prepare_evaluation(batches.batch_at(cursor, local_ranks.global_num_microbatches))
    local_ranks.sync_state()
    per_batch: list[Metrics] = []

    def measure(outputs: Any, targets: Any) -> None:  # noqa: ANN401 - whatever the model gives
        assert metrics is not None, "the loss is measured otherwise"
        per_batch.append(require_metrics(metrics(outputs, targets)))

    with local_ranks.use_averaged_weights():
        while batches.count_left(cursor, 1):
            batch = batches.batch_at(cursor, local_ranks.global_num_microbatches)
            losses = local_ranks.evaluate(batch, None if metrics is None else measure, cursor.batch)
            per_batch += [{name: MeanMetric(*total) for name, total in totals.items()} for totals in losses.values()]
            cursor = replace(cursor, batch=cursor.batch + 1)
    return all_reduce_means(local_ranks, per_batch)


def require_metrics_function(metrics: object) -> None:
    """Check that what is to measure can be called.

    Raises:
        PlanError: it cannot.
    """
    if metrics is not None and not callable(metrics):
        raise PlanError(f"metrics={shorten(repr(metrics))} is not a function; {METRICS_RULE}")


def require_metrics(measured: object) -> Metrics:
    """Return what a metrics function has returned.

    Raises:
        DataError: it is not a dict of ``MeanMetric``.
    """
    if isinstance(measured, Mapping) and all(isinstance(one, MeanMetric) for one in measured.values()):
        return measured
    raise DataError(f"the metrics function returned {shorten(repr(measured))}; {METRICS_RULE}")


METRICS_RULE = (
    'give one of outputs and targets that returns a dict of sums and their counts, {"accuracy": cp.MeanMetric(correct, '
    "len(targets))}, which are added up over microbatches and ranks"
)
"""What a metrics function is."""


def all_reduce_means(local_ranks: LocalRanks, per_batch: list[Metrics]) -> dict[str, float]:
    """Return the means over the metrics of all processes."""
    local = {name: [tally.total, float(tally.count)] for name, tally in merge_metrics(per_batch).items()}
    fabric = local_ranks.world.fabrics[0]
    by_rank: list[Any] = [local]
    if len(local_ranks.world.fabrics) < fabric.num_ranks:
        by_rank = list(fabric.gather_values("metrics", dict(local), tuple(range(fabric.num_ranks))))
    parsed = [
        {name: MeanMetric(total, count) for name, (total, count) in rank_metrics.items()}
        for rank_metrics in by_rank
        if rank_metrics
    ]
    return {name: tally.mean for name, tally in merge_metrics(parsed).items()}


def make_loss_metric(loss: LossFunction) -> MetricsFn:
    """Return a metrics function of the loss, and of its parts, weighted by the number of samples or its own weights.

    Args:
        loss: from the model's output and the targets.
    """

    def measure(outputs: Any, targets: Any) -> Metrics:  # noqa: ANN401 - whatever the model gives
        mean, loss_weight, parts = compute_mean_loss(loss, outputs, targets, "the batch", is_whole=True)
        num_samples = min(collect_lengths(targets) or collect_lengths(outputs), default=1)
        metrics = {}
        for name, (part, part_weight) in {**parts, "loss": (mean, loss_weight)}.items():
            count = num_samples if part_weight is None else float(part_weight)
            metrics[name] = MeanMetric(float(part) * count, count)
        return metrics

    return measure
