"""A layer that runs once without and once with gradients: no tuple of the trace is passed between blocks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp


class Twice(nn.Module):
    """Adds what its first layer gives without gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()

    def forward(self, x):
        with torch.no_grad():
            first = self.layers[0](x)
        return self.layers(x) + first


@pytest.mark.parametrize("strategy", ["zero(2, level=3)", "pipeline(2)"])
def test_a_layer_that_also_runs_without_gradients_is_trained_as_in_a_loop(strategy):
    draw = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(8, width, generator=draw, dtype=torch.float64) for width in (4, 4))
    expected, model = Twice(), Twice()
    F.mse_loss(expected(inputs), targets).backward()
    optim.SGD(expected.parameters(), lr=0.1).step()
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.mse_loss, strategy=strategy) as step:
        step(inputs, targets)
        step.export_weights()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
