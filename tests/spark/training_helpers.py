"""What is trained on Spark in tests, and what it is compared with."""

from functools import partial

import torch
from torch import nn

from counterpoint import Trainer
from counterpoint.spark.training import train_local
from tests.spark.models import Net

TOLERANCE = 1e-12
Adam = partial(torch.optim.Adam, lr=0.01)
mse = nn.functional.mse_loss


def make_net(kind=Net, *args):
    torch.manual_seed(1)
    return kind(*args).double()


def make_samples(count, seed=2):
    torch.manual_seed(seed)
    inputs, targets = torch.randn(count, 3, dtype=torch.float64), torch.randn(count, 1, dtype=torch.float64)
    return list(zip(inputs, targets, strict=True))


def split_partitions(data, *sizes):
    """Partitions of these sizes, the rest in the last."""
    parts, start = [], 0
    for size in sizes:
        parts.append(data[start : start + size])
        start += size
    return [*parts, data[start:]]


def train_single_process(data, options, optimizer=Adam, **more):
    """What a run on one rank makes of the same samples in the same order; the model, and the losses."""
    model = make_net()
    trainer = Trainer(model, loss=mse, optimizer=optimizer, strategy="solo", progress="off", seed=options.seed, **more)
    history = trainer.fit(data, batch_size=options.batch_size, epochs=options.epochs, max_steps=options.max_steps)
    return model, history.losses


def train_partitions(partitions, options, optimizer=Adam, model=None, **more):
    """The same with partitions in this process."""
    model = model or make_net()
    done = train_local(partitions, model, loss=mse, optimizer=optimizer, options=options, **more)
    return model, done.losses


def max_relative_difference(first, second):
    """The largest relative difference of two models' parameters."""
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max(float(((one - other).abs().max() / other.abs().max()).detach()) for one, other in pairs)
