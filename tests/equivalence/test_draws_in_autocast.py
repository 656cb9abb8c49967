"""Dropout inside an autocast or a no_grad of the model's own forward, which a trace shows as one operation."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from tests.training.trainers import dataset, max_difference, params_of

PLANS = ["data(2)", "zero(2, level=3)", "pipeline(2)"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.dropouts = nn.ModuleList(nn.Dropout(0.3) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def pairs(self):
        return zip(self.layers, self.dropouts, strict=True)


class OneAutocast(Net):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            for layer, dropout in self.pairs():
                x = x + dropout(layer(x))
        return self.head(x.float())


class Autocasts(Net):
    def forward(self, x):
        for layer, dropout in self.pairs():
            with torch.autocast("cpu", torch.bfloat16):
                change = dropout(layer(x))
            x = x + change
        return self.head(x.float())


class NoGrad(Net):
    def forward(self, x):
        with torch.no_grad():
            target = F.dropout(self.dropouts[0](x), 0.3)
        for layer, dropout in self.pairs():
            x = x + dropout(layer(x))
        return self.head(x + target)


def train(kind, plan):
    torch.manual_seed(0)
    model = kind()
    inputs, targets = dataset(16).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy=plan, num_microbatches=1) as step:
        for _ in range(3):
            step(inputs.float(), targets)
    return params_of(model)


@pytest.mark.long(quick=["NoGrad-data(2)", "NoGrad-zero(2, level=3)", "NoGrad-pipeline(2)"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", [Autocasts, NoGrad])
def test_draws_are_those_of_one_device(kind, plan):
    assert max_difference(train(kind, plan), train(kind, "solo")) <= (1e-2 if kind is Autocasts else 1e-5)


def test_draws_of_several_modules_in_one_autocast_are_refused_where_the_model_is_split():
    text = r"dropouts.0 and dropouts.1 of OneAutocast draw random numbers in one torch.autocast or torch.no_grad of its"
    with pytest.raises(cp.PlanError, match=text):
        train(OneAutocast, "pipeline(2)")


def test_the_remedy_trains_with_the_same_draws():
    assert max_difference(train(OneAutocast, "data(2)"), train(OneAutocast, "solo")) <= 1e-2
