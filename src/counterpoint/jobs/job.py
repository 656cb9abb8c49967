"""Definition of a training job: model, data, training options and target metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from counterpoint.data.fetch import MapDataset
from counterpoint.errors import PlanError
from counterpoint.optim.lr_schedules import ScalingRule, large_batch_schedule
from counterpoint.training.metrics import MeanMetric

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
MetricsFn: TypeAlias = Callable[[Tensor, Tensor], dict[str, MeanMetric]]
BuildOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
BuildSchedule: TypeAlias = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass(frozen=True, slots=True)
class MetricTarget:
    """Value of a metric that a trained model must reach on held-out data.

    Args:
        metric: name, a key of the job's metrics.
        threshold: worst acceptable value.
        better: which side of the threshold is acceptable.
    """

    metric: str
    threshold: float
    better: Literal["higher", "lower"]

    def is_reached(self, value: float) -> bool:
        """Return whether a value is acceptable; nan never is."""
        return value >= self.threshold if self.better == "higher" else value <= self.threshold


@dataclass(frozen=True, slots=True)
class LargeBatchConfig:
    """Training with larger batches than the job's default: warm-up for a fifth of the run, then decay to 0.

    Args:
        optimizer: factory from parameters; its learning rate is tuned for the job's default batch size.
        rule: scaling of the learning rate with the batch size.
        power: of the polynomial decay.
    """

    optimizer: BuildOptimizer
    rule: ScalingRule
    power: float

    def schedule(self, *, batch_size: int, own_batch_size: int, num_samples: int, epochs: int) -> BuildSchedule:
        """Return a factory of the learning rate schedule, from an optimizer."""
        return partial(
            large_batch_schedule,
            batch_size=batch_size,
            reference_batch_size=own_batch_size,
            rule=self.rule,
            epochs=epochs,
            steps_per_epoch=math.ceil(num_samples / batch_size),
            warmup_epochs=epochs / 5,
            decay="polynomial",
            power=self.power,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """A training job, run by ``counterpoint train NAME``.

    Args:
        name: key in the registry.
        summary: one line for users.
        build_model: returns the untrained model of a seed; the same seed gives bit-identical parameters.
        build_data: returns training data and held-out data.
        loss: mean loss of ``(outputs, targets)``.
        optimizer: factory from parameters.
        batch_size: samples of one global batch.
        epochs: maximum passes over the training data.
        max_steps: maximum optimizer steps; the run ends at the first of the two limits.
        metrics: of ``(outputs, targets)``, to be merged over batches.
        target: that the trained model must reach.
        large_batch: configurations for larger batches, by optimizer name.
    """

    name: str
    summary: str
    build_model: Callable[[int], nn.Module]
    build_data: Callable[[], tuple[MapDataset, MapDataset]]
    loss: Loss
    optimizer: BuildOptimizer
    batch_size: int
    epochs: int
    max_steps: int | None = None
    metrics: MetricsFn
    target: MetricTarget
    large_batch: Mapping[str, LargeBatchConfig] = field(default_factory=dict)

    def for_large_batches(self, optimizer: str) -> LargeBatchConfig:
        """Return the configuration for larger batches with this optimizer.

        Raises:
            PlanError: there is none.
        """
        if optimizer not in self.large_batch:
            known = f"for {' and '.join(self.large_batch)}" if self.large_batch else "for none"
            raise PlanError(
                f"{self.name} has no learning rate for {optimizer}, only {known} and its default optimizer; omit the "
                "optimizer, or train the model in your own script"
            )
        return self.large_batch[optimizer]


def with_seed(build: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """Return a builder that takes a seed and does not change torch's global random state."""

    def build_model(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build()

    return build_model


def measure_accuracy(outputs: Tensor, targets: Tensor) -> dict[str, MeanMetric]:
    """Return the accuracy of logits ``(sample, class)`` against int64 labels ``(sample,)``."""
    num_right = int((outputs.argmax(dim=-1) == targets).sum())
    return {"accuracy": MeanMetric(float(num_right), targets.numel())}


def measure_bits(outputs: Tensor, targets: Tensor) -> dict[str, MeanMetric]:
    """Return the bits per byte of logits ``(batch, seq, 256)`` against int64 bytes ``(batch, seq)``."""
    nats = F.cross_entropy(outputs.detach().flatten(0, -2), targets.flatten(), reduction="sum")
    return {"bits_per_byte": MeanMetric(float(nats) / math.log(2), targets.numel())}


def sequence_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of logits ``(batch, seq, token)`` against int64 ``(batch, seq)``."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def batch_ranges(num_samples: int, batch_size: int) -> Iterator[range]:
    """Yield index ranges over all samples in order, of at most ``batch_size``."""
    for start in range(0, num_samples, batch_size):
        yield range(start, min(start + batch_size, num_samples))
