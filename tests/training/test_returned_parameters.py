"""Parameters, and views of them, that one part of a model gives to a later one, or to the loss."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from tests.training.trainers import max_difference, params_of

PLANS = ["zero3(2)", "pipeline(2)", "pipeline(2) * zero3(2)", "data(2)"]


class SlicedPositions(nn.Module):
    """Slices a table first, and reads the slice in the last layer."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.positions = nn.Parameter(torch.randn(2, 8))

    def forward(self, x):
        positions = self.positions[:1]
        hidden = torch.tanh(self.middle(torch.tanh(self.first(x) + positions)))
        return self.last(hidden + positions)


class RowOfAWeight(SlicedPositions):
    def forward(self, x):
        row = self.first.weight[:, 0]
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))) + row + self.positions[0])


class ReturnedTable(SlicedPositions):
    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))), self.positions


class GivesARow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.table = nn.Linear(6, 8), nn.Parameter(torch.randn(2, 8))

    def forward(self, x):
        return torch.tanh(self.layer(x)), self.table[0]


class Passes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, values):
        return torch.tanh(self.layer(values[0])), values[1]


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, values):
        return self.layer(values[0] + values[1])


def in_sequence():
    return nn.Sequential(GivesARow(), Passes(), Passes(), Adds())


def loss(output, targets):
    if isinstance(output, tuple):
        return F.mse_loss(output[0], targets) + 0.1 * output[1].square().mean()
    return F.mse_loss(output, targets)


def build(kind):
    torch.manual_seed(0)
    return kind().double()


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield tuple(torch.randn(8, size, generator=generator, dtype=torch.float64) for size in (6, 3))


def train_plain(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    return params_of(model)


CASES = [(plan, kind) for plan in PLANS for kind in (SlicedPositions, RowOfAWeight, ReturnedTable, in_sequence)]


@pytest.mark.long(quick=["zero3(2)...", "pipeline(2)-ReturnedTable", "tensor(2)-ReturnedTable"])
@pytest.mark.parametrize(("plan", "kind"), [*CASES, ("tensor(2)", ReturnedTable)])
def test_a_view_of_a_parameter_outlives_the_part_that_made_it(plan, kind):
    """Under ZeRO-3 the weights of the part were freed then, and the process ended with a segmentation fault."""
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, loss, strategy=plan) as step:
        for batch in batches():
            step(*batch)
    assert max_difference(params_of(model), train_plain(build(kind))) < 1e-12
