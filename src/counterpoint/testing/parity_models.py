"""Models, batches and plans for parity checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from counterpoint.jobs.job import sequence_loss, with_seed
from counterpoint.jobs.models import GPT, GPTShape, SmallCNN, mlp
from counterpoint.plan.plan import Plan
from counterpoint.runtime.rank_builder import BatchNormRule

BATCH_LENS = (24, 24, 7, 24, 3)
"""Samples of the five global batches: the third is uneven; with four microbatches, one of the last batch is empty."""

STRATEGIES = (
    "data(2)",
    "data(4)",
    "zero(2, level=1)",
    "zero(2, level=2)",
    "zero(2, level=3)",
    "zero(4, level=1)",
    "zero(4, level=2)",
    "zero(4, level=3)",
    "pipeline(2, schedule=gpipe)",
    "pipeline(4, schedule=gpipe)",
    "pipeline(2)",
    "pipeline(4)",
    "pipeline(2, replicas=(2,1))",
    "pipeline(2, schedule=interleaved, chunks_per_stage=2)",
    "pipeline(2, schedule=zero_bubble)",
    "pipeline(2, schedule=zero_bubble, chunks_per_stage=2)",
    "server(2)",
    "server(2, servers=2)",
    "tensor(2)",
    "pipeline(2) * data(2)",
    "pipeline(2) * zero(2, level=1)",
    "pipeline(2) * zero(2, level=2)",
    "tensor(2) * data(2)",
    "zero(2, level=3) * data(2)",
    "tensor(2) * pipeline(2)",
    "data(2) * server(2)",
    "pipeline(2) * server(2)",
    "data(2, update=sharded) * data(2)",
    "tree(4)",
    "tree(2, shape=star) * data(2) + overlap",
    "pipeline(2) * tree(2, send=during_backward)",
    "data(2) + overlap",
    "zero(2, level=1) + overlap",
    "pipeline(2) * data(2) + overlap",
)
"""Strategies of the parity table in addition to solo; ``+`` adds a pass."""

THREE_RANKS = (
    "data(3)",
    "zero(3, level=1)",
    "zero(3, level=2)",
    "zero(3, level=3)",
    "pipeline(3, schedule=gpipe)",
    "pipeline(3)",
    "pipeline(2, replicas=(2,1))",
    "pipeline(2, replicas=(1,2))",
    "server(2)",
    "tensor(3)",
    "tree(3)",
    "data(3) + overlap",
)
"""Strategies for three processes; two processes run every strategy of the table with two ranks."""

ADAMW = partial(optim.AdamW, lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True, slots=True)
class ParityModel:
    """A model with its batches.

    Args:
        name: of the model.
        build: returns the untrained model in float64, always bit-identical.
        batches: inputs and targets of each step.
        loss: mean over the samples.
    """

    name: str
    build: Callable[[], nn.Module]
    batches: tuple[tuple[Tensor, Tensor], ...]
    loss: Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Training options.

    Args:
        optimizer: factory.
        num_microbatches: of every global batch, the same under every plan.
        clip_norm: maximum global gradient norm; None for no clipping.
        one_copy: whether replicas on a host share their parameters, if possible.
        batch_norm: when running statistics change.
    """

    optimizer: Callable[[Iterable[nn.Parameter]], optim.Optimizer] = ADAMW
    num_microbatches: int = 4
    clip_norm: float | None = None
    one_copy: bool = True
    batch_norm: BatchNormRule = "microbatch"


def make_parity_model(name: str) -> ParityModel:
    """Return one of ``mlp``, ``cnn`` (with BatchNorm) and ``gpt`` (tied embeddings, dropout)."""
    draw = torch.Generator().manual_seed(5)
    if name == "mlp":
        return _classification_model(
            name, lambda: mlp(8, 24, 24, 24, 4), lambda n: torch.randn(n, 8, generator=draw), 4
        )
    if name == "cnn":
        return _classification_model(
            name, lambda: SmallCNN(width=4), lambda n: torch.randn(n, 1, 8, 8, generator=draw), 10
        )
    shape = GPTShape(num_layers=3, width=16, head_dim=4, context=8, num_tokens=11, dropout=0.1)
    batches = []
    for length in BATCH_LENS:
        tokens = torch.randint(0, 11, (length, 9), generator=draw)
        batches.append((tokens[:, :-1], tokens[:, 1:]))
    return ParityModel(name, _in_float64(lambda: GPT(shape)), tuple(batches), sequence_loss)


def _classification_model(
    name: str, build: Callable[[], nn.Module], draw_inputs: Callable[[int], Tensor], num_classes: int
) -> ParityModel:
    inputs = [draw_inputs(length).double() for length in BATCH_LENS]
    labels = torch.Generator().manual_seed(6)
    targets = [torch.randint(0, num_classes, (length,), generator=labels) for length in BATCH_LENS]
    return ParityModel(name, _in_float64(build), tuple(zip(inputs, targets, strict=True)), F.cross_entropy)


def _in_float64(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    build_model = with_seed(build)
    return lambda: build_model(3).double()


def plan_for(strategy: str, num_microbatches: int) -> Plan:
    """Return the plan of a row, with a number of microbatches of the whole batch.

    Example:
        >>> plan = plan_for("data(2) + overlap", 4)
        >>> str(plan), plan.num_microbatches, plan.passes
        ('data(2)', 2, ('overlap',))
    """
    text, *passes = strategy.split(" + ")
    plan = Plan.parse(text)
    return replace(plan, num_microbatches=num_microbatches // plan.global_num_microbatches, passes=tuple(passes))
