"""Workload: a small VGG on digits, and the contenders."""

from dataclasses import dataclass

import torch
from torch import nn, optim

from counterpoint.data.digits import split_digits

HOSTS, BATCH, STEPS, TARGET_ACCURACY = 4, 96, 20, 0.97
STACKS, DENSE, DIGITS = ((32, 32), (64, 64)), 1024, 10


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """One contender.

    Args:
        strategy: as a user writes it; empty for DistributedDataParallel.
        num_microbatches: per batch.
        lr: learning rate; with the momentum, the fastest to the target accuracy of those in README.md.
        momentum: of SGD.
        trains: whether it trains to the target accuracy; otherwise only its steps are timed.
    """

    strategy: str
    num_microbatches: int = 1
    lr: float = 0.005
    momentum: float = 0.9
    trains: bool = True

    def optimizer(self, params):
        return optim.SGD(params, lr=self.lr, momentum=self.momentum)


CONTENDERS = {
    "data(4)": TrainingSetup("data(4)"),
    "DDP on gloo": TrainingSetup("", trains=False),
    "pipeline(4)": TrainingSetup("pipeline(4)", num_microbatches=4),
    "pipedream(4)": TrainingSetup("pipedream(4)", lr=0.02, momentum=0.0),
    "pipedream_2bw(4)": TrainingSetup("pipedream_2bw(4)", num_microbatches=4),
    "pipedream, 3-1": TrainingSetup("pipedream(2, replicas=(3,1), balance=(4,3))", num_microbatches=3, trains=False),
}


def build_vgg(seed=0):
    """Return stacks of convolutions, each followed by a pool, and three linear layers with most of the weights."""
    torch.manual_seed(seed)
    layers, width = [], 1
    for stack in STACKS:
        for wider in stack:
            layers += [nn.Conv2d(width, wider, 3, padding=1), nn.ReLU()]
            width = wider
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(4 * width, DENSE), nn.ReLU(), nn.Linear(DENSE, DENSE), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(DENSE, DIGITS))
    for module in model:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return model


def load_data():
    """Return the training and the held-out images with their labels."""
    return tuple(part.fetch(range(len(part))) for part in split_digits())


def epochs(part, seed=0):
    """Yield epochs of shuffled batches forever, without the incomplete last batch of an epoch."""
    draw = torch.Generator().manual_seed(seed)
    images, digits = part
    while True:
        order = torch.randperm(len(digits), generator=draw)
        yield [(images[at], digits[at]) for at in order.split(BATCH) if len(at) == BATCH]


def accuracy(model, part):
    """Return the accuracy of the model."""
    images, digits = part
    with torch.no_grad():
        return float((model(images).argmax(1) == digits).double().mean())
