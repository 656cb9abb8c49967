"""Ranks of a small model in one process, and what they store while they run."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim

from counterpoint.data.sampler import split_batch
from counterpoint.fabric.local import LocalWorld
from counterpoint.plan.plan import Plan
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.training.options import TrainingOptions
from counterpoint.training.ranks.local_ranks import LocalRanks

WIDTH = 6
ADAMW = partial(optim.AdamW, lr=1e-2)


def chain(num_layers):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_layers))).double()


def make_batch(num_micros, num_samples=None):
    draw = torch.Generator().manual_seed(1)
    count = 2 * num_micros if num_samples is None else num_samples
    batch = [torch.randn(count, WIDTH, generator=draw).double() for _ in range(2)]
    return SlicedBatch((batch[0], batch[1]), tuple(split_batch(count, num_micros)))


@contextmanager
def build_local_ranks(
    plan, *, num_microbatches=1, model=None, optimizer=ADAMW, passes=(), batches=make_batch, **options
):
    """Yield the ranks of a plan, before their first step."""
    model = chain(4) if model is None else model
    parsed = replace(Plan.parse(plan, num_microbatches=num_microbatches), passes=passes)
    with LocalWorld(parsed.num_ranks, 10.0) as world:
        optimizer_spec = OptimizerSpec(optimizer, dict(model.named_parameters()))
        local_ranks = LocalRanks(world, parsed, model, F.mse_loss, optimizer_spec, TrainingOptions(**options))
        local_ranks.build(batches(parsed.global_num_microbatches).inputs(0), 2)
        yield local_ranks


def observe_calls(local_ranks, observe):
    """Run a step; return for each rank what ``observe(rank)`` returned before and after every call of its program."""
    observed: dict[int, list[Any]] = {number: [] for number in local_ranks.ranks}

    def clock(number, rank):
        observed[number].append(observe(rank))
        return float(len(observed[number]))

    for number, rank in local_ranks.ranks.items():
        rank.interpreter.use_clock(partial(clock, number, rank))
    local_ranks.step(0, make_batch(local_ranks.global_num_microbatches))
    return observed


def flat_params_of(rank):
    return [
        flat_params for unit_params in rank.interpreter.store.units.values() for flat_params in unit_params.flat_params
    ]


def storage_bytes(tensor):
    """Return the bytes of a tensor's storage."""
    return 0 if tensor is None else tensor.untyped_storage().size()
