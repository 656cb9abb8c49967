"""Modules as JSON and tensors: a decoded module computes the same results, and unsupported modules are named."""

from functools import partial

import pytest
import torch
from torch import nn, optim

from counterpoint import PlanError
from counterpoint.errors import CounterpointError
from counterpoint.spark.module_codec import decode_module, encode_module
from counterpoint.value_codec import ValueEncoder, unsupported_value
from tests.spark.models import Layers, Net

KINDS = {
    "net": (Net, 3),
    "layers": (lambda: Layers(5), 64),
    "norms": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Dropout(0.5)), 4),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, activation=nn.functional.gelu, batch_first=True), 8),
    "lstm": (lambda: nn.LSTM(3, 4, 2), 3),
}


def round_trip(value):
    """What another process reads."""
    return decode_module(encode_module(value, "model"))


@pytest.mark.parametrize(("build", "width"), KINDS.values(), ids=KINDS)
def test_what_is_read_computes_the_same(build, width):
    torch.manual_seed(0)
    model, inputs = (
        build().eval(),
        torch.randn(2, 5, width) if build is not KINDS["norms"][0] else torch.randn(5, width),
    )
    result = round_trip(model)
    outputs, others = (one(inputs) for one in (model, result))
    assert torch.equal(*(one[0] if isinstance(one, tuple) else one for one in (outputs, others)))
    assert list(result.state_dict()) == list(model.state_dict())
    assert not result.training


def test_tied_weights_stay_tied_and_frozen_ones_frozen():
    result = round_trip(Net())
    assert result.tied.weight is result.again.weight
    assert isinstance(result.tied.weight, nn.Parameter)
    assert not result.frozen.requires_grad
    shared = nn.Linear(2, 2)
    first, second = round_trip(nn.ModuleList([shared, shared]))
    assert first is second


def test_what_is_read_shares_no_memory_with_what_was_written():
    model = nn.Linear(2, 2)
    result = round_trip(model)
    nn.init.zeros_(result.weight)
    assert model.weight.abs().sum() > 0


def test_a_factory_of_optimizers_and_a_loss_travel_by_name():
    factory, loss = round_trip((partial(optim.AdamW, lr=0.1, betas=(0.5, 0.9)), nn.functional.cross_entropy))
    assert factory.func is optim.AdamW
    assert factory.keywords == {"lr": 0.1, "betas": (0.5, 0.9)}
    assert loss is nn.functional.cross_entropy


class WithLambda(nn.Module):
    """Holds an attribute that cannot be encoded."""

    def __init__(self):
        super().__init__()
        self.scale = lambda x: x


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            lambda: nn.Sequential(nn.ReLU(), WithLambda()),
            r"model\['1'\].scale has WithLambda.__init__.<locals>.<lambda>",
        ),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "model has ParametrizedLinear"),
        (lambda: [object()], r"model\[0\] has a object"),
    ],
)
def test_what_only_pickle_could_carry_is_named(value, message):
    with pytest.raises(PlanError, match=message):
        encode_module(value(), "model")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (["name", "no_such_package:thing"], "no_such_package:thing cannot be imported here"),
        (["name", "math:pi"], "math:pi is neither a function nor a class"),
        (["module", "builtins:dict", {}], "builtins:dict is not an nn.Module class"),
        (["pickle", "gASV"], r"nothing is encoded as \['pickle'"),
    ],
)
def test_a_tree_that_names_anything_else_is_refused(tree, message):
    with pytest.raises(CounterpointError, match=message):
        decode_module(b"".join(ValueEncoder(unsupported_value).parts(tree)))
