"""Loops with several models or steps, each of which is a plain one or that of a plan."""

from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn, optim

from counterpoint.training.parallelize import TrainStep
from tests.training.trainers import build_seeded, make_generator

ADAM, MOMENTUM = partial(optim.Adam, lr=1e-2), partial(optim.SGD, lr=0.1, momentum=0.9)
BATCHES = torch.randn(3, 8, 3, generator=make_generator(), dtype=torch.float64)
NOISE = torch.randn(3, 2, 8, 2, generator=make_generator(3), dtype=torch.float64)
REAL, FAKE = torch.ones(8, 1, dtype=torch.float64), torch.zeros(8, 1, dtype=torch.float64)


def network(inputs, outputs):
    return build_seeded(lambda: nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(),
                                              nn.Linear(8, outputs)))  # fmt: skip


class PlainStep:
    """A step of a plain loop, in place of that of `parallelize`."""

    def __init__(self, model, optimizer, loss, strategy=""):
        self.model, self.loss = model, loss
        self.optimizer = optimizer if isinstance(optimizer, optim.Optimizer) else optimizer(model.parameters())

    def __call__(self, inputs, targets):
        self.optimizer.zero_grad()
        loss = self.loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def full_weights(self):
        return nullcontext(self.model)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def finish(*steps):
    """Close the steps; return the weights of their models."""
    models = [step.model if isinstance(step, PlainStep) else step.local_ranks.model for step in steps]
    for step in steps:
        if isinstance(step, TrainStep):
            step.close()
    return [model.state_dict() for model in models]


def train_adversaries(make_first, make_second, *, gathers=False):
    """A loss that goes through another model; with ranks in other processes its weights have to be gathered."""
    generator, discriminator = network(2, 3), network(3, 1)
    judge = make_first(discriminator, MOMENTUM, F.binary_cross_entropy_with_logits)
    forge = make_second(
        generator, ADAM, lambda images, real: F.binary_cross_entropy_with_logits(discriminator(images), real)
    )
    losses = []
    for batch, (first, second) in zip(BATCHES, NOISE, strict=True):
        with torch.no_grad(), forge.full_weights() if gathers else nullcontext():
            generated = generator(first)
        losses.append(judge(torch.cat([batch, generated]), torch.cat([REAL, FAKE])))
        with judge.full_weights() if gathers else nullcontext():
            losses.append(forge(second, REAL))
    return losses, *finish(judge, forge)


def train_in_turns(make_first, make_second):
    """Two optimizers that train one model in turns, with losses of their own."""
    model, losses = network(3, 4), []
    first = make_first(model, ADAM, F.mse_loss)
    second = make_second(model, MOMENTUM, lambda output, targets: F.l1_loss(output.sum(1), targets.sum(1)))
    for batch in BATCHES:
        targets = torch.zeros(8, 4, dtype=torch.float64)
        losses += [first(batch, targets), second(batch, targets), second(-batch, targets)]
    return losses, *finish(second, first)
