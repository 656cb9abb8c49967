"""The process's current device is another one: cuda:0 is, until someone chooses, that of a rank which computes on cuda:1."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import TensorDataset

import counterpoint as cp
from counterpoint.testing.device_survey import TOLERANCE, SurveyCase, batches, largest_difference, train
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _another_device_is_the_current_one(monkeypatch):
    monkeypatch.setattr(DEVICE, "default_number", 1)


class Shifted(nn.Module):
    """Makes a tensor on the current device in its forward, as many models do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x):
        return self.layer(x) + torch.arange(4, dtype=x.dtype, device=x.device.type)


@pytest.mark.parametrize(
    "case",
    [SurveyCase("mlp", "solo"), SurveyCase("mlp", "data(2)"), SurveyCase("gpt", "pipeline(2)"), SurveyCase("mlp", "solo", "trainer")],
    ids=str,
)  # fmt: skip
def test_training_has_the_numbers_of_the_cpu(case):
    """Events without a stream were recorded on the current device: the host read what had not arrived."""
    assert largest_difference(train(case, StandInAccelerator()), train(case, "cpu")) <= TOLERANCE
    DEVICE.require_no_races()


@pytest.mark.parametrize("strategy", ["solo", "data(2)"])
def test_a_forward_that_names_only_the_kind_of_the_device_is_on_the_right_one(strategy):
    def fit(device):
        torch.manual_seed(0)
        data = TensorDataset(*(torch.cat(parts) for parts in zip(*itertools.islice(batches("mlp"), 3), strict=True)))
        trainer = cp.Trainer(
            Shifted(), loss=F.cross_entropy, optimizer=lambda params: optim.SGD(params, lr=0.1), strategy=strategy,
            device=device, progress="off",
        )  # fmt: skip
        with trainer:
            trainer.fit(data, batch_size=4, epochs=1)
            return trainer.evaluate(data, batch_size=4)

    assert fit(StandInAccelerator()) == pytest.approx(fit("cpu"), rel=1e-12)
    with pytest.raises(RuntimeError, match="on the current device, stand_in:1, but all others are on stand_in:0"):
        torch.ones(1, device="stand_in")
