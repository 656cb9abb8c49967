"""What a main job is: a model, its data, how it is trained, and the figure by which it is judged."""

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
    """The bar that a trained model has to reach on held-out data.

    Args:
        metric: a key of what the job measures.
        bar: the worst value that is good enough.
        better: which side of the bar is good.
    """

    metric: str
    threshold: float
    better: Literal["higher", "lower"]

    def is_reached(self, value: float) -> bool:
        """Return whether a value is good enough; what is not a number never is."""
        return value >= self.threshold if self.better == "higher" else value <= self.threshold


@dataclass(frozen=True, slots=True)
class LargeBatchConfig:
    """How a job is trained with batches larger than its own: a fifth of the run warms up, the rest decays to 0.

    Args:
        optimizer: a torch optimizer that only lacks the parameters, its rate found with the job's own batch.
        rule: how the rate grows with the batch.
        power: of the polynomial decay.
    """

    optimizer: BuildOptimizer
    rule: ScalingRule
    power: float

    def schedule(self, *, batch_size: int, own_batch_size: int, num_samples: int, epochs: int) -> BuildSchedule:
        """Return the schedule of a run, which only lacks the optimizer."""
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
    """A main job, run by ``counterpoint train NAME``.

    Args:
        name: key in the table.
        summary: one line for people.
        build_model: the untrained model of a seed; the same seed gives the same bits.
        build_data: the training part and the held-out part.
        loss: mean loss of ``(outputs, targets)``.
        optimizer: a torch optimizer that only lacks the parameters.
        batch_size: samples of one global batch.
        epochs: passes over the training part, at most.
        max_steps: optimizer steps, at most; whichever of the two comes first.
        measure: metrics of ``(outputs, targets)`` as tallies, to be added over batches.
        target: what the trained model must reach.
        large: for larger batches, by the name of the optimizer.
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
        """Return how the job is trained with larger batches and this optimizer.

        Raises:
            PlanError: nobody has found out.
        """
        if optimizer not in self.large_batch:
            known = f"for {' and '.join(self.large_batch)}" if self.large_batch else "for none"
            raise PlanError(
                f"{self.name} has no learning rate for {optimizer}, only {known} beside its own optimizer; leave the "
                "optimizer out, or train the model in a script of your own"
            )
        return self.large_batch[optimizer]


def with_seed(build: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """Return a builder that takes a seed and leaves torch's own random numbers as they were."""

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
    """Yield the indices of all samples in order, at most ``batch_size`` at once."""
    for start in range(0, num_samples, batch_size):
        yield range(start, min(start + batch_size, num_samples))
