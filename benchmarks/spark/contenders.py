"""What ranks run for each contender; imported by executors and ranks."""

import os
import time
from itertools import pairwise

import torch
from torch import nn, optim

WARM_UP, SEED = 5, 7
MODELS = {"small": (64, 128, 10), "large": (1024, 2048, 1024, 10)}
BATCH = 128


def build(name):
    """Return a model, always bit-identical."""
    torch.manual_seed(SEED)
    widths, layers = MODELS[name], []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def samples(name, count=BATCH):
    """Return inputs and targets, always the same."""
    draws = torch.Generator().manual_seed(SEED)
    width, classes = MODELS[name][0], MODELS[name][-1]
    return torch.randn(count, width, generator=draws), torch.randint(classes, (count,), generator=draws)


def sgd(params):
    """Return the optimizer of all contenders."""
    return optim.SGD(params, lr=0.01, momentum=0.9)


def time_steps(step, steps):
    """Return the mean seconds per step after warm-up steps, and the last loss."""
    loss = 0.0
    for _ in range(WARM_UP):
        loss = step()
    began = time.perf_counter()
    for _ in range(steps):
        loss = step()
    return [(time.perf_counter() - began) / steps, float(loss)]


def run_counterpoint(name, strategy, steps):
    """Run steps of a plan as one of its ranks."""
    import counterpoint as cp

    inputs, targets = samples(name)
    with cp.parallelize(build(name), sgd, nn.functional.cross_entropy, strategy=strategy) as run:
        return time_steps(lambda: run(inputs, targets), steps)


def run_ddp(name, steps):
    """Run steps of DistributedDataParallel as a rank started by torchrun."""
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = nn.parallel.DistributedDataParallel(build(name))
    optimizer = sgd(model.parameters())
    inputs, targets = (field.chunk(ranks)[rank] for field in samples(name))

    def step():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    found = time_steps(step, steps)
    total = torch.tensor(found[1])
    distributed.all_reduce(total)
    distributed.destroy_process_group()
    return [found[0], float(total) / ranks]
