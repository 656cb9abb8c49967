"""Models that ZeRO of level 3 cannot divide into units: a warning says why, and what it costs."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp


class Branches(nn.Module):
    """Its forward depends on values, so that it cannot be traced."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden if hidden.isfinite().all() else -hidden)


def step_of(model, strategy):
    with cp.parallelize(
        model, optim.SGD(model.parameters(), lr=0.1), F.mse_loss, strategy=strategy, cross_sample="accept"
    ) as step:
        return step(torch.ones(4, 8), torch.ones(4, 4))


def test_a_model_that_is_one_unit_is_named_with_the_reason_and_the_bytes():
    with pytest.warns(UserWarning, match=r"^zero\(2, level=3\) gathers weights block by block, but Branches cannot be "
                      r"divided into blocks: tracing the model stopped in Branches at .*; so every rank holds all of "
                      r"its weights, 432 B, in each forward .*give level=2"):  # fmt: skip
        loss = step_of(Branches(), "zero(2, level=3)")
    assert isinstance(loss, float)


@pytest.mark.parametrize("strategy", ["zero(2, level=2)", "tree(2, send=during_backward)"])
def test_plans_that_gather_no_weights_cause_no_warning(strategy):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step_of(Branches(), strategy) > 0
        assert step_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), "zero(2, level=3)") > 0
