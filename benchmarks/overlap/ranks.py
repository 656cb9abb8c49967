"""One rank of the measurement: steps of every contender in turns; rank 0 prints what it has seen as JSON."""

import json
import statistics
import sys
import time
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.jobs.job import sequence_loss
from counterpoint.jobs.models import GPT, GPTShape, mlp
from counterpoint.launchers.environment import detect

STEPS, WARM_UP, TRIALS = 3, 3, 52


def gpt():
    return GPT(GPTShape(num_layers=6, width=256, head_dim=64, context=128, num_tokens=4096, dropout=0.0))


def tokens(draw, count):
    drawn = torch.randint(0, 4096, (count, 129), generator=draw)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def vectors(draw, count):
    return torch.randn(count, 1024, generator=draw), torch.randint(0, 10, (count,), generator=draw)


WORKLOADS = {
    "GPT": (gpt, tokens, 8, sequence_loss),
    "MLP": (partial(mlp, 1024, 4096, 1024, 10), vectors, 512, F.cross_entropy),
}


class Ours:
    """A step of the library under a plan, on connections of its own."""

    def __init__(self, place, build, loss, **options):
        environment = detect()
        environment = replace(
            environment, master_port=environment.master_port + place, job=f"{environment.job}-{place}"
        )
        torch.manual_seed(0)
        self.model = build()
        optimizer = optim.SGD(self.model.parameters(), lr=0.01)
        self.step = cp.parallelize(self.model, optimizer, loss, environment=environment, **options)

    def __call__(self, inputs, targets):
        return self.step(inputs, targets)


class DDP:
    """torch's DistributedDataParallel on gloo, as its users run it."""

    def __init__(self, build, loss):
        torch.manual_seed(0)
        self.model, self.loss = nn.parallel.DistributedDataParallel(build()), loss
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.01)

    def __call__(self, inputs, targets):
        rank, count = dist.get_rank(), len(inputs) // dist.get_world_size()
        own = slice(rank * count, (rank + 1) * count)
        self.optimizer.zero_grad()
        loss = self.loss(self.model(inputs[own]), targets[own])
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def contenders(build, loss):
    """Return what is compared."""
    return {
        "without": Ours(1, build, loss, strategy="data(2)", passes=()),
        "overlap": Ours(2, build, loss, strategy="data(2, tune=off)"),
        "tuned": Ours(3, build, loss, strategy="data(2)"),
        "ddp": DDP(build, loss),
    }


def timed(step, batch):
    """Return the seconds of a step that all ranks begin together."""
    dist.barrier()
    began = time.perf_counter()
    step(*batch)
    return time.perf_counter() - began


def main(name, rounds):
    """Be one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    build, draws, count, loss = WORKLOADS[name]
    batch = draws(torch.Generator().manual_seed(1), count)
    sides = contenders(build, loss)
    for side, step in sides.items():
        for _ in range(TRIALS if side == "tuned" else WARM_UP):
            step(*batch)
    found = {side: [] for side in sides}
    for _ in range(rounds):
        for side, step in sides.items():
            found[side].append(statistics.median(timed(step, batch) for _ in range(STEPS)))
    torch.manual_seed(0)
    alone = build()
    own = [part[: count // 2] for part in batch]
    found["alone"] = []
    for _ in range(WARM_UP + STEPS):
        began = time.perf_counter()
        loss(alone(own[0]), own[1]).backward()
        found["alone"].append(time.perf_counter() - began)
    sites = [
        site
        for rank in sides["tuned"].step.team.ranks.values()
        for group in rank.interpreter.exchange.early.sites.values()
        for site in group
    ]
    found["buckets"] = [len(site.agreement.cut) for site in sites]
    print(json.dumps(found), flush=True)
    for side in ("without", "overlap", "tuned"):
        sides[side].step.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
