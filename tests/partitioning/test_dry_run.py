"""Runs of a model that are not steps leave it as it was."""

import pytest
import torch
from torch import nn

from counterpoint.partitioning.dry_run import replace_tensors


class Holder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def test_replaced_tensors_are_put_back_where_modules_occur_several_times():
    """torch.func.functional_call leaves other tensors in this model."""
    layer = nn.Linear(2, 2)
    model = nn.Sequential(Holder(layer), twice := Holder(layer), twice)
    weight, other = layer.weight, torch.zeros(2, 2)
    with replace_tensors(model, {id(weight): other}):
        assert layer.weight is other
        assert torch.equal(model(torch.ones(1, 2)), layer.bias[None])
    assert layer.weight is weight


def test_replaced_tensors_are_put_back_after_an_error():
    layer = nn.Linear(2, 2)
    weight, other = layer.weight, torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), replace_tensors(layer, {id(weight): other}):
        layer(torch.ones(1, 3))
    assert layer.weight is weight
