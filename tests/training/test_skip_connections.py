"""A model with skips and two inputs is fitted, evaluated and read by the stages that need it."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.training.trainers import fit, make_generator, make_trainer, max_difference


class Ladder(nn.Module):
    """What the second layer makes is also read at the end in training, but not in evaluation."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x, late):
        first = torch.tanh(self.layers[0](x))
        second = torch.relu(self.layers[1](first))
        third = torch.tanh(self.layers[2](second))
        x = self.layers[3](third) + first
        return self.head(x + (late + second if self.training else late))


def ladder():
    torch.manual_seed(1)
    return Ladder().double()


def data():
    random = make_generator()
    inputs = [torch.randn(46, 6, generator=random, dtype=torch.float64) for _ in range(2)]
    return TensorDataset(*inputs, torch.randint(0, 3, (46,), generator=random))


@pytest.mark.long(quick=["pipeline(5)"])
@pytest.mark.parametrize("strategy", ["pipeline(3)", "pipeline(5)", "pipeline(2, schedule=pipedream)"])
def test_a_value_with_fewer_readers_in_evaluation_comes_to_them(strategy):
    with make_trainer(strategy, ladder()) as one:
        result = one.evaluate(data(), batch_size=12)
    with make_trainer("solo", ladder()) as one:
        assert result == pytest.approx(one.evaluate(data(), batch_size=12), rel=1e-12)


@pytest.mark.long
def test_a_fit_with_workers_reads_late_inputs_where_they_are_needed():
    alone, _ = fit("solo", ladder(), data())
    result, _ = fit("pipeline(5)", ladder(), data(), fit_options={"num_workers": 1})
    assert max_difference(result, alone) <= 1e-12
