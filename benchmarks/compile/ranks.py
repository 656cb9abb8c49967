"""One rank: alternating steps of every side, eager and compiled; each rank prints its results as JSON.

Arguments: the model, the number of rounds, and that of steps of a side in a round.
"""

import json
import os
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.jobs.job import sequence_loss
from counterpoint.jobs.models import GPT, GPTShape, mlp

BATCH, LENGTH, TOKENS, WARM_UP = {"mlp": 64, "gpt": 8}, 128, 4096, 3
PLANS = {1: ("solo",), 2: ("data(2)", "zero(2, level=3)", "pipeline(2)")}


@dataclass(frozen=True)
class Task:
    """A model, its loss, its optimizer and one batch."""

    model: nn.Module
    loss: Any
    optimizer: Any
    batch: tuple[torch.Tensor, torch.Tensor]


def make_task(name):
    """Return the task of a name, always with the same weights and batch."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    if name == "mlp":
        batch = torch.randn(BATCH[name], 1024, generator=draw), torch.randint(0, 10, (BATCH[name],), generator=draw)
        return Task(mlp(1024, 4096, 4096, 1024, 10), F.cross_entropy, partial(optim.SGD, lr=0.01, momentum=0.9), batch)
    shape = GPTShape(num_layers=6, width=256, head_dim=64, context=LENGTH, num_tokens=TOKENS, dropout=0.1)
    tokens = torch.randint(0, TOKENS, (BATCH[name], LENGTH + 1), generator=draw)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Task(GPT(shape), sequence_loss, partial(optim.AdamW, lr=3e-4), batch)


def make_plain_step(task, *, is_compiled):
    """Return a step of a loop by hand."""
    model = torch.compile(task.model) if is_compiled else task.model
    optimizer = task.optimizer(task.model.parameters())

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def make_sides(name, num_ranks, stack):
    """Return the step of every side, by plan and whether it is compiled."""
    sides = {}
    for is_compiled in (False, True):
        if num_ranks == 1:
            sides["by hand", is_compiled] = make_plain_step(make_task(name), is_compiled=is_compiled)
        for plan in PLANS[num_ranks]:
            task, options = make_task(name), {"compile": "segments"} if is_compiled else {}
            step = cp.parallelize(task.model, task.optimizer, task.loss, strategy=plan, timeout_s=600, **options)
            sides[plan, is_compiled] = stack.enter_context(step)
    return sides


def time_steps(step, batch, num_steps):
    """Return the median seconds of some steps."""
    seconds = []
    for _ in range(num_steps):
        began = time.perf_counter()
        step(*batch)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main(name, rounds, num_steps):
    torch.set_num_threads(1)
    batch, num_ranks = make_task(name).batch, int(os.environ.get("WORLD_SIZE", "1"))
    with ExitStack() as stack:
        sides = make_sides(name, num_ranks, stack)
        first, seconds = {}, {key: [] for key in sides}
        for key, step in sides.items():
            began = time.perf_counter()
            step(*batch)
            first[key] = time.perf_counter() - began
            time_steps(step, batch, WARM_UP)
        for _ in range(rounds):
            for key, step in sides.items():
                seconds[key].append(time_steps(step, batch, num_steps))
    found = [
        {"plan": plan, "is_compiled": is_compiled, "first": first[plan, is_compiled], "seconds": values}
        for (plan, is_compiled), values in seconds.items()
    ]
    sys.stdout.write(f"{json.dumps({'rank': int(os.environ.get('RANK', '0')), 'sides': found})}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
