"""Workloads: five models with the batches of both ranks, the same in every process."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim

from counterpoint.jobs.job import sequence_loss
from counterpoint.jobs.models import GPT, GPTShape, mlp

RANKS = 2
NUM_ROWS, WIDTH, NUM_FEATURES = 1_000_000, 32, 26


@dataclass(frozen=True)
class Workload:
    """One model and its training options.

    Args:
        build: returns the untrained model, always bit-identical.
        batch: draws inputs and targets of one global batch.
        size: samples of a global batch.
        loss: mean over the samples.
        optimizer: factory from parameters.
        steps: timed in one run.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], tuple[Any, Any]]
    size: int
    loss: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[Any], optim.Optimizer]
    steps: int


class EmbeddingModel(nn.Module):
    """One embedding table for 26 features, summed, followed by a small MLP."""

    def __init__(self, *, sparse):
        super().__init__()
        self.table = nn.EmbeddingBag(NUM_ROWS, WIDTH, mode="sum", sparse=sparse)
        self.top = mlp(WIDTH, 128, 64, 2)

    def forward(self, features):
        return self.top(self.table(features))


def draw_vectors(width, classes, draw, count):
    return torch.randn(count, width, generator=draw), torch.randint(0, classes, (count,), generator=draw)


def draw_tokens(draw, count):
    drawn = torch.randint(0, 4096, (count, 129), generator=draw)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def draw_features(draw, count):
    return torch.randint(0, NUM_ROWS, (count, NUM_FEATURES), generator=draw), torch.randint(
        0, 2, (count,), generator=draw
    )


def small_layers():
    return nn.Sequential(*[layer for _ in range(100) for layer in (nn.Linear(64, 64), nn.LayerNorm(64))])


WORKLOADS = {
    "A": Workload(
        partial(mlp, 1024, 4096, 4096, 1024, 10),
        partial(draw_vectors, 1024, 10),
        32 * RANKS,
        F.cross_entropy,
        partial(optim.SGD, lr=0.01, momentum=0.9),
        steps=12,
    ),
    "B": Workload(
        lambda: GPT(GPTShape(num_layers=6, width=256, head_dim=64, context=128, num_tokens=4096, dropout=0.0)),
        draw_tokens,
        8 * RANKS,
        sequence_loss,
        partial(optim.AdamW, lr=3e-4),
        steps=6,
    ),
    "C": Workload(
        small_layers, partial(draw_vectors, 64, 64), 64 * RANKS, F.cross_entropy, partial(optim.SGD, lr=0.01), steps=60
    ),
    "D": Workload(
        partial(EmbeddingModel, sparse=True),
        draw_features,
        256 * RANKS,
        F.cross_entropy,
        partial(optim.SGD, lr=0.01),
        steps=60,
    ),
    "E": Workload(
        partial(EmbeddingModel, sparse=False),
        draw_features,
        256 * RANKS,
        F.cross_entropy,
        partial(optim.SGD, lr=0.01),
        steps=10,
    ),
}


def batches(workload, count):
    """Return this number of global batches, the same in every process."""
    draw = torch.Generator().manual_seed(1)
    return [workload.batch(draw, workload.size) for _ in range(count)]


def build_model(workload):
    torch.manual_seed(0)
    return workload.build()
