"""Gradients that torch leaves negated or conjugated lazily: updates are those of a plain loop."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp

PLANS = ["solo", "data(2)", "zero1(2)", "zero2(2)", "zero3(2)", "tree(2)", "server(2)"]
OPTIMIZERS = {
    "sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: optim.Adam(params, lr=0.1),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.1),
}


class Phase(nn.Module):
    """Adds a number that it computes from its only weight with complex ones."""

    def __init__(self):
        super().__init__()
        self.angle = nn.Parameter(torch.full((1,), 2.0, dtype=torch.float64))
        self.linear = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, x):
        rotation = torch.complex(torch.zeros_like(self.angle), self.angle).conj()
        return self.linear(x) + (rotation * torch.complex(torch.ones_like(self.angle), self.angle.detach())).imag


def batches():
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(8, 4, generator=generator, dtype=torch.float64).split([3, 1], dim=1) for _ in range(4)]


def train_by_hand(model, optimizer):
    flags = []
    for x, y in batches():
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        flags.append(model.angle.grad.is_neg() and model.angle.grad.is_contiguous())
        optimizer.step()
    return flags


@pytest.mark.long(quick=["solo-sgd", "data...", "server(2)-adam"])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_gradient_that_is_negated_lazily_is_applied_with_its_sign(plan, make_optimizer):
    """Its memory was read, and the weight went the other way, without a word."""
    torch.manual_seed(1)
    model = Phase()
    expected = copy.deepcopy(model)
    assert all(train_by_hand(expected, make_optimizer(expected.parameters())))  # else nothing is shown
    with cp.parallelize(model, make_optimizer, F.mse_loss, strategy=plan) as step:
        for x, y in batches():
            step(x, y)
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
