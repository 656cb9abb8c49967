"""Stages in bfloat16 and under autocast: bit for bit, or as close as rounding, what solo does."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from tests.training.trainers import build_seeded, dataset, equal_bits, max_difference, params_of

SGD = partial(optim.SGD, lr=0.1, momentum=0.9)
PLANS = ["pipeline(2)", "interleaved(2)", "zero_bubble(2)", "pipeline(2) * data(2)", "pipeline(2) * zero(2, level=2)"]


class Branches(nn.Module):
    """Traced: it is not a chain."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), *(nn.Linear(8, 8) for _ in range(3))])
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        first = x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return self.head(x + first)


def chain():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))


def trained(build, strategy, *, dtype=torch.float32, casts=False, num_steps=4):
    """Return the parameters and the losses after a few steps of four microbatches."""
    model = build_seeded(build).to(dtype)
    plan = cp.Plan.parse(strategy)
    plan = cp.Plan(plan.strategies, 4 // plan.global_num_microbatches)
    x, targets = dataset(12).tensors
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=casts),
        cp.parallelize(model, SGD, F.cross_entropy, strategy=plan) as step,
    ):
        losses = [step(x.to(dtype), targets) for _ in range(num_steps)]
    return params_of(model), losses


@pytest.mark.long(quick=["pipeline(2)-chain"])
@pytest.mark.parametrize("build", [chain, Branches])
@pytest.mark.parametrize("strategy", PLANS[:3])
def test_a_pipeline_under_autocast_trains_as_solo_does_bit_for_bit(strategy, build):
    mine, theirs = (trained(build, one, casts=True) for one in (strategy, "solo"))
    assert equal_bits(mine[0], theirs[0])
    assert mine[1] == theirs[1]
    assert max_difference(theirs[0], trained(build, "solo")[0]) > 1e-4


@pytest.mark.long(quick=["pipeline(2) * zero(2, level=2)"])
@pytest.mark.parametrize("strategy", PLANS[3:])
def test_replicas_of_a_pipeline_under_autocast_differ_by_rounding_in_float32(strategy):
    mine, theirs = (trained(Branches, one, casts=True) for one in (strategy, "solo"))
    assert max_difference(mine[0], theirs[0]) <= 1e-6


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "pipeline(2)"])
def test_an_autocast_around_many_steps_computes_with_the_newest_weights(strategy):
    """Torch keeps a weight that was cast until the autocast ends: solo computed each step with the first weights."""
    model, expected = build_seeded(chain).float(), []
    optimizer, (x, targets) = SGD(model.parameters()), dataset(12).tensors
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x.float()), targets)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    result = trained(chain, strategy, casts=True)[1]
    assert result == pytest.approx(expected, rel=1e-2)
    assert expected[0] - expected[3] > 0.05


@pytest.mark.long(quick=["interleaved(2)-Branches"])
@pytest.mark.parametrize("build", [chain, Branches])
@pytest.mark.parametrize("strategy", ["pipeline(2)", "interleaved(2)"])
def test_a_pipeline_of_a_model_in_bfloat16_trains_as_solo_does_bit_for_bit(strategy, build):
    mine, theirs = (trained(build, one, dtype=torch.bfloat16) for one in (strategy, "solo"))
    assert equal_bits(mine[0], theirs[0])
    assert mine[1] == theirs[1]
