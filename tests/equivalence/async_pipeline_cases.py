"""A chain of equal blocks trained by a stream, and the same by the sequential loop of its rule."""

import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import lcm
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim

from counterpoint.data.sampler import split_batch
from counterpoint.fabric.local import LocalWorld
from counterpoint.plan.plan import Plan
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.testing.parity import relative_difference
from counterpoint.training.options import TrainingOptions
from counterpoint.training.ranks.local_ranks import LocalRanks
from tests.references import async_pipeline

WIDTH = 4
MOMENTUM, SLOW, ADAMW = "momentum", "slow", "adamw"
OPTIMIZERS: dict[str, Any] = {
    MOMENTUM: partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    SLOW: partial(optim.SGD, lr=0.02, momentum=0.9, nesterov=True),  # comes to rest on gradients several updates late
    ADAMW: partial(optim.AdamW, lr=1e-2, weight_decay=0.1),
}


def network(num_blocks):
    """As many linear layers with a function behind each, the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_blocks)]
    return nn.Sequential(*layers).double()


@dataclass(frozen=True)
class Case:
    """What is trained: a rule over stages, and batches of some sizes, with flushes before some, one of them spoilt."""

    rule: str
    replicas: tuple[int, ...]
    sizes: tuple[int, ...]
    per_body: int = 0
    optimizer: str = MOMENTUM
    flushes: tuple[int, ...] = ()
    spoilt: int | None = None
    clip: float | None = None
    recompute: str = "never"

    @property
    def num_micros(self):
        return self.per_body or (sum(self.replicas) if self.rule == "double_buffer" else lcm(*self.replicas))

    @property
    def strategy(self):
        schedule = "pipedream_2bw" if self.rule == "double_buffer" else "pipedream"
        synced = ", vertical_sync=on" if self.rule == "vertical_sync" else ""
        again = f", recompute={self.recompute}" if self.recompute != "never" else ""
        count = len(self.replicas)
        replicas = f", replicas=({','.join(map(str, self.replicas))})" if max(self.replicas) > 1 else ""
        return f"pipeline({count}, schedule={schedule}{replicas}, balance=({','.join(['2'] * count)}){synced}{again})"

    @property
    def plan(self):
        return Plan.parse(self.strategy, num_microbatches=self.num_micros)

    def build(self):
        return network(2 * len(self.replicas))

    def batches(self):
        """Inputs and targets of each step; the last sample of a spoilt one is not finite."""
        draw = torch.Generator().manual_seed(1)
        actual = [
            [torch.randn(size, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2)] for size in self.sizes
        ]
        if self.spoilt is not None:
            actual[self.spoilt][0][-1] = torch.nan
        return [tuple(batch) for batch in actual]

    @property
    def segments(self):
        """From and to the batches between two flushes."""
        return list(pairwise([0, *self.flushes, len(self.sizes)]))

    def read(self):
        return (
            async_pipeline.double_buffer(self.num_micros)
            if self.rule == "double_buffer"
            else getattr(async_pipeline, self.rule)(self.replicas)
        )

    def interval(self, stage):
        return self.num_micros if self.rule == "double_buffer" else self.replicas[stage]


def train(case, world=None, **options):
    """Return the parameters and the loss of every batch, as computed by the ranks of one process."""
    model, losses = case.build(), []
    own = LocalWorld(case.plan.num_ranks) if world is None else None
    options |= {"clip_norm": case.clip, "clip_by": "stage"} if case.clip is not None else {}
    optimizer_spec = OptimizerSpec(OPTIMIZERS[case.optimizer], dict(model.named_parameters()))
    local_ranks = LocalRanks(own or world, case.plan, model, F.mse_loss, optimizer_spec, TrainingOptions(**options))
    feeds = [SlicedBatch(batch, tuple(split_batch(len(batch[0]), case.num_micros))) for batch in case.batches()]
    local_ranks.build(feeds[0].inputs(0), feeds[0].sizes[0])
    flight = local_ranks.in_flight
    for start, stop in case.segments:
        flight.batches = {at: feeds[at] for at in range(start, stop)}
        actual = [
            local_ranks.step(number, flight.batch_source(number)) for number in range(start - flight.lookahead, stop)
        ]
        losses += [result.loss for result in actual[flight.lookahead :]]
    flight.batches.clear()
    local_ranks.export_weights()
    if own is not None:
        own.close()
    return {name: param.detach().clone() for name, param in model.named_parameters()}, losses


def train_reference(case):
    """Return the same from the sequential loop: every two layers are a stage."""
    model, losses = case.build(), []
    named = dict(model.named_parameters())
    stages = [
        {name: param for name, param in named.items() if int(name.split(".")[0]) // 2 == stage}
        for stage in range(len(case.replicas))
    ]
    updates = [(params, OPTIMIZERS[case.optimizer](params.values())) for params in stages]
    micros = [
        [(inputs[start:stop], targets[start:stop]) for start, stop in split_batch(len(inputs), case.num_micros)]
        for inputs, targets in case.batches()
    ]
    for start, stop in case.segments:
        parts = [part for batch in micros[start:stop] for part in batch]
        actual = async_pipeline.async_pipeline(model, updates=updates, batches=parts, loss=F.mse_loss, read=case.read(),
                               interval=case.interval, clip=case.clip or math.inf)[1]  # fmt: skip
        for at in range(stop - start):
            own = slice(at * case.num_micros, (at + 1) * case.num_micros)
            sizes = [len(inputs) for inputs, _ in parts[own]]
            losses.append(sum(loss * size for loss, size in zip(actual[own], sizes, strict=True)) / sum(sizes))
    return {name: param.detach() for name, param in named.items()}, losses


def max_error(case, actual=None):
    """Return the largest relative difference of any parameter or loss."""
    params, losses = train(case) if actual is None else actual
    theirs, their_losses = train_reference(case)
    return max(
        *(relative_difference(params[name], value) for name, value in theirs.items()),
        *(abs(mine / other - 1) for mine, other in zip(losses, their_losses, strict=True)),
    )
