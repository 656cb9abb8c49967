"""Ranks of a small model, built and asked what they hold while they run."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim

from counterpoint.data.sampler import split
from counterpoint.fabric.local import LocalWorld
from counterpoint.plan import Plan
from counterpoint.runtime.feed import BatchFeed
from counterpoint.runtime.optimizers import Face
from counterpoint.training.options import Options
from counterpoint.training.team import Team

WIDTH = 6
ADAMW = partial(optim.AdamW, lr=1e-2)


def chain(num_layers):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_layers))).double()


def feed(num_micros, num_samples=None):
    draw = torch.Generator().manual_seed(1)
    count = 2 * num_micros if num_samples is None else num_samples
    batch = [torch.randn(count, WIDTH, generator=draw).double() for _ in range(2)]
    return BatchFeed((batch[0], batch[1]), tuple(split(count, num_micros)))


@contextmanager
def team(plan, *, num_microbatches=1, model=None, optimizer=ADAMW, passes=(), **options):
    """Yield the ranks of a plan, built but not yet run."""
    model = chain(4) if model is None else model
    found = replace(Plan.parse(plan, num_microbatches=num_microbatches), passes=passes)
    with LocalWorld(found.num_ranks, 10.0) as world:
        face = Face(optimizer, dict(model.named_parameters()))
        one = Team(world, found, model, F.mse_loss, face, Options(**options))
        one.build(feed(found.num_micros).inputs(0), 2)
        yield one


def watched(one, look):
    """Run a step; return for each rank what ``look(rank)`` saw before and after every call of its row."""
    seen: dict[int, list[Any]] = {at: [] for at in one.ranks}

    def clock(at, rank):
        seen[at].append(look(rank))
        return float(len(seen[at]))

    for at, rank in one.ranks.items():
        rank.interpreter.clock = partial(clock, at, rank)
    one.step(0, feed(one.num_micros))
    return seen


def arenas(rank):
    return [arena for store in rank.interpreter.store.units.values() for arena in store.arenas]


def stored(tensor):
    """Bytes of memory behind a tensor."""
    return 0 if tensor is None else tensor.untyped_storage().size()
