"""Models whose values skip blocks, and training of them under a plan or alone."""

import torch
import torch.nn.functional as F
from torch import nn

from counterpoint.testing.parity_models import ParityModel
from tests.equivalence.single_process import SingleProcessBaseline

WIDTH, DEPTH = 6, 4


class Rung(nn.Module):
    """Two layers that may be sliced as a pair."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Ladder(nn.Module):
    """As a U-Net: what goes down is added on the way up; two inputs are read at both ends; one value has many readers.

    It draws random numbers, and its first and last layer share a weight.
    """

    def __init__(self):
        super().__init__()
        rungs = [Rung() for _ in range(2 * DEPTH)]
        rungs[-1].up.weight = rungs[0].up.weight
        self.layers = nn.ModuleList(rungs)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, gate):
        rungs = []
        mask = gate > 0
        for layer in self.layers[:DEPTH]:
            x = torch.tanh(self.drop(layer(x)))
            rungs.append(x)
        middle = x
        for layer, rung in zip(self.layers[DEPTH:], reversed(rungs), strict=True):
            x = torch.tanh(layer(x * mask)) + rung + 0.1 * middle
        return {"logits": x + gate, "first": rungs[0]}


def build():
    torch.manual_seed(3)
    return Ladder().double()


def loss(output, target):
    return F.cross_entropy(output["logits"], target) + 0.1 * (output["first"] ** 2).mean()


def subject(lengths=(12, 12, 7, 3)):
    draw = torch.Generator().manual_seed(5)

    def batch(length):
        inputs = tuple(torch.randn(length, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2))
        return inputs, torch.randint(0, WIDTH, (length,), generator=draw)

    return ParityModel("ladder", build, tuple(map(batch, lengths)), loss)


LADDER = SingleProcessBaseline(subject())
alone, difference, trained = LADDER.baseline, LADDER.difference, LADDER.train
