"""Parts of a forward in ``torch.no_grad()``, which a trace has as the body of one operation."""

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


class Counts(nn.Module):
    """Changes a buffer without gradients, and reads it in its first and its last layer."""

    count: torch.Tensor

    def __init__(self, *, counts_first=True):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)]).double()
        self.register_buffer("count", torch.zeros(4, dtype=torch.float64))
        self.counts_first = counts_first

    def forward(self, x):
        if self.counts_first:
            self.add()
        for layer in self.layers:
            x = torch.sin(layer(x + self.count))
        if not self.counts_first:
            self.add()
        return x * self.count

    def add(self):
        with torch.no_grad():
            self.count.add_(0.1)


@pytest.mark.parametrize("counts_first", [True, False])
def test_a_buffer_that_is_changed_without_gradients_is_changed_once(counts_first):
    """It was taken for a constant that may be computed wherever it is used: ``zero3`` added to it in each block."""
    draw = torch.Generator().manual_seed(1)
    batches = [[torch.randn(8, 4, generator=draw, dtype=torch.float64) for _ in range(2)] for _ in range(3)]
    expected, model = Counts(counts_first=counts_first), Counts(counts_first=counts_first)
    sgd = optim.SGD(expected.parameters(), lr=0.1)
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.mse_loss, strategy="zero3(2)") as step:
        for inputs, targets in batches:
            sgd.zero_grad()
            F.mse_loss(expected(inputs), targets).backward()
            sgd.step()
            step(inputs, targets)
    for one, other in zip(model.state_dict().values(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_stages_that_read_a_buffer_which_is_changed_without_gradients_are_refused():
    """The second stage read the value that its own copy had; read in one layer only, the buffer is exact."""
    model = Counts(counts_first=False)
    sgd = optim.SGD(model.parameters(), lr=0.1)
    step = cp.parallelize(model, sgd, F.mse_loss, strategy="pipeline(2)", num_microbatches=1)
    text = r"has 2 stages, but the model has only 1 blocks; .* read such a buffer in one layer only\)"
    with pytest.raises(cp.PlanError, match=text):
        step(torch.ones(8, 4).double(), torch.ones(8, 4).double())


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
