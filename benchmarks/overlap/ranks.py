"""One rank: alternating steps of every contender; each rank prints its results as JSON."""

import json
import sys
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn, optim

import counterpoint as cp
from counterpoint.jobs.job import sequence_loss
from counterpoint.jobs.models import GPT, GPTShape
from counterpoint.launchers.environment import detect

BATCH, TOKENS, LENGTH = 8, 4096, 128
OURS = {
    "without": {"strategy": "data(2)", "passes": ()},
    "overlap": {"strategy": "data(2, tune=off)"},
    "tuned": {"strategy": "data(2)"},
}


def gpt():
    torch.manual_seed(0)
    return GPT(GPTShape(num_layers=6, width=256, head_dim=64, context=LENGTH, num_tokens=TOKENS, dropout=0.0))


def adamw(params):
    return optim.AdamW(params, lr=3e-4)


class DDP:
    """torch's DistributedDataParallel on gloo, as its documentation recommends."""

    def __init__(self):
        self.model = nn.parallel.DistributedDataParallel(gpt())
        self.optimizer = adamw(self.model.parameters())

    def __call__(self, inputs, targets):
        rank, count = dist.get_rank(), len(inputs) // dist.get_world_size()
        own = slice(rank * count, (rank + 1) * count)
        self.optimizer.zero_grad()
        loss = sequence_loss(self.model(inputs[own]), targets[own])
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def time_step(step, batch):
    """Return the seconds of a step that all ranks start at the same time."""
    dist.barrier()
    began = time.perf_counter()
    step(*batch)
    return time.perf_counter() - began


def time_single_rank(batch):
    """Return the seconds of one forward and one backward of a rank's part of the batch."""
    model, (inputs, targets) = gpt(), (part[: BATCH // 2] for part in batch)
    began = time.perf_counter()
    loss = sequence_loss(model(inputs), targets)
    middle = time.perf_counter()
    loss.backward()
    return middle - began, time.perf_counter() - middle


def main(rounds, warm_up, trials):
    """Run one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    environment = detect()
    environment = replace(environment, master_port=environment.master_port + 1)
    drawn = torch.randint(0, TOKENS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    batch = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    ours = {
        name: cp.parallelize(gpt(), adamw, sequence_loss, environment=environment, **options)
        for name, options in OURS.items()
    }
    sides = {**ours, "ddp": DDP()}
    for name, step in sides.items():
        for _ in range(trials if name == "tuned" else warm_up):
            step(*batch)
    seconds = {name: [] for name in sides}
    for _ in range(rounds):
        for name, step in sides.items():
            seconds[name].append(time_step(step, batch))
    buckets = {name: list(bucket_counts(step)) for name, step in ours.items()}
    print(
        json.dumps({"seconds": seconds, "buckets": buckets, "alone": [time_single_rank(batch) for _ in range(4)]}),
        flush=True,
    )
    for step in ours.values():
        step.close()
    dist.destroy_process_group()


def bucket_counts(step):
    """Yield the number of buckets of each reducer."""
    for rank in step.local_ranks.ranks.values():
        for reducers in rank.interpreter.communication.overlap.reducers.values():
            yield from (len(reducer.bucket_plan.assignment) for reducer in reducers)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
