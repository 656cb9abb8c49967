"""``torch.utils.checkpoint`` in the model's own code runs modules again in a backward, with the weights of the forward."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import counterpoint as cp
from tests.training.trainers import build_seeded, dataset, max_difference, params_of

PLANS = [
    "solo",
    "data(2)",
    "zero(2, level=3)",
    "pipeline(2)",
    "pipeline(2, schedule=gpipe)",
    "pipeline(2, schedule=zero_bubble)",
    "pipeline(2) * data(2)",
]


class Residual(nn.Module):
    def __init__(self, dropout, *, recomputes):
        super().__init__()
        self.inner, self.dropout, self.recomputes = nn.Linear(6, 6), nn.Dropout(dropout), recomputes

    def add(self, x):
        return self.dropout(F.gelu(self.inner(x)))

    def forward(self, x):
        return x + (checkpoint(self.add, x, use_reentrant=False) if self.recomputes else self.add(x))


class Chain(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def make_model(kind, dropout, *, recomputes):
    return build_seeded(lambda: kind([*(Residual(dropout, recomputes=recomputes) for _ in range(3)), nn.Linear(6, 3)]))


def train(model, plan, **options):
    inputs, targets = dataset(16).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy=plan, num_microbatches=2, **options) as step:
        losses = [float(step(inputs, targets)) for _ in range(4)]
    return losses, params_of(model)


@pytest.mark.long(quick=[f"sequential-0.3-{plan}" for plan in PLANS[2:4]])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", [lambda layers: nn.Sequential(*layers), Chain], ids=["sequential", "traced"])
def test_a_model_that_recomputes_trains_as_one_that_does_not(kind, dropout, plan):
    losses, weights = train(make_model(kind, dropout, recomputes=False), "solo")
    found, trained = train(make_model(kind, dropout, recomputes=True), plan)
    assert found == pytest.approx(losses, rel=1e-12)
    assert max_difference(trained, weights) <= 1e-12


def test_an_asynchronous_pipeline_recomputes_with_the_version_of_the_forward():
    plan = "pipedream(2)"
    losses, weights = train(make_model(lambda layers: nn.Sequential(*layers), 0.3, recomputes=False), plan)
    found, trained = train(make_model(lambda layers: nn.Sequential(*layers), 0.3, recomputes=True), plan)
    assert found == pytest.approx(losses, rel=1e-12, nan_ok=True)  # the first step has no loss yet
    assert max_difference(trained, weights) <= 1e-12
