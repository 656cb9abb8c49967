"""Modules as JSON and tensors: a decoded module computes the same results, and unsupported modules are named."""

import sys
from functools import partial

import pytest
import torch
from torch import nn, optim

from counterpoint import PlanError
from counterpoint.errors import CheckpointError, CounterpointError, ProtocolError
from counterpoint.spark.module_codec import decode_model_table, decode_module, encode_module
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
    return decode_module(encode_module(value, "model"), trust=True)


def stored(tree, buffers=()):
    """The bytes of a tree that anybody may have written."""
    values = ValueEncoder(unsupported_value)
    values._buffers += buffers
    return b"".join(values.parts(tree))


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
        decode_module(stored(tree), trust=True)


LINEAR = {"training": True, "_parameters": {}, "_buffers": {}, "_modules": {}}
RELU = "torch.nn.modules.activation:ReLU"
RUN = ["partial", ["name", "cProfile:run"], ["list", "open('ran', 'w').close()"], {}]


@pytest.mark.parametrize("key", ["train", "eval", "forward", "activation", "_compiled_call_impl", "__call__"])
def test_a_saved_model_cannot_run_code(tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match="the data names 'cProfile:run', which is not one of torch's layers and functi"):
        decode_module(stored(["module", RELU, LINEAR | {key: RUN}])).eval()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "path",
    ["os:system", "torch:load", "torch.serialization:load", "torch.hub:load", "torch.nn.functional:importlib.import_module",
     "torch.nn.functional:boolean_dispatch", "torch.nn.modules.module:Module.load_state_dict", "numpy:load",
     "torch.nn.modules.linear:Linear.__class__", "torch.nn.modules.linear:torch.load", "torch.nn.modules.module", ":", "",
     "torch.utils.data.dataloader:DataLoader", "tests.spark.models:Net", "builtins:eval", "x" * 100_000],
)  # fmt: skip
def test_names_outside_torchs_layers_are_not_imported_for_a_stranger(path):
    before = set(sys.modules)
    with pytest.raises(PlanError, match="is not one of torch's layers and functions") as caught:
        decode_module(stored(["name", path]))
    assert set(sys.modules) == before
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"forward": ["name", "torch.nn.functional:relu"]}, "'forward' of .*ReLU would replace what torch calls"),
        ({"eval": ["module", RELU, LINEAR]}, "'eval' of .* would replace"),
        ({"__dict__": {}}, "'__dict__' of .* would replace"),
        ({"__setstate__": 1}, "'__setstate__' of .* would replace"),
        ({"_compiled_call_impl": ["name", "torch.nn.functional:relu"]}, "_compiled_call_impl' of .* would replace"),
        ({"_forward_hooks": ["ordered", [0, ["name", "torch.nn.functional:relu"]]]}, "_forward_hooks of .* has hooks"),
        (
            {"_modules": {"0": ["name", "torch.nn.functional:relu"]}},
            "_modules of .* is not a mapping from names to a Mod",
        ),
        ({"_parameters": {"w": 1}}, "_parameters of .* is not a mapping from names to a Parameter"),
        ({"_buffers": ["list"]}, "_buffers of .* is not a mapping"),
        ({"_modules": {"0": ["shared", 0]}}, "ReLU contains itself"),
        ({"_modules": {"0": ["shared", -1]}}, "nothing before it has the number -1"),
        ({"_modules": {"0": ["shared", "x"]}}, "a part of the kind shared is wrong"),
        ({"training": "yes"}, "training of .* is of another type"),
        ({"a": ["device", "no such"]}, "a part of the kind device is wrong"),
        ({"a": ["size", "x"]}, "a part of the kind size is wrong"),
        ({"a": ["partial", 1, 2]}, "a part of the kind partial is wrong"),
        ({"a": ["module", RELU]}, "a part of the kind module is wrong"),
        ({"a": ["module", RELU, {}]}, "has no _buffers, _modules, _parameters, training"),
        ({"a": ["tensor_of_module", ["list", 1], True, True]}, "a part of the kind tensor_of_module is wrong"),
    ],
)
def test_a_state_of_a_stranger_has_only_data(state, message):
    with pytest.raises(ProtocolError, match=message):
        decode_module(stored(["module", RELU, LINEAR | state]))


def test_a_list_as_the_state_of_a_module_is_refused():
    with pytest.raises(ProtocolError, match=r"the state of .*ReLU is a list"):
        decode_module(stored(["module", RELU, ["list"]]))


@pytest.mark.parametrize(("build", "width"), KINDS.values(), ids=KINDS)
def test_models_of_torchs_layers_are_read_without_trust_and_others_with_the_trust_of_their_module(build, width):
    model = build()
    trust = () if type(model).__module__.startswith("torch.") else ["tests.spark"]
    result = decode_module(encode_module(model, "model"), trust=trust)
    assert type(result) is type(model)
    assert all(torch.equal(result.state_dict()[name], value) for name, value in model.state_dict().items())


def test_a_trusted_module_does_not_trust_what_it_imports():
    data = stored(["name", "tests.spark.models:os.kill"])
    with pytest.raises(PlanError, match=r"tests.spark.models:os.kill is defined in posix, which is not trusted"):
        decode_module(data, trust=["tests"])
    with pytest.raises(PlanError, match="is not one of torch's layers"):
        decode_module(stored(["name", "tests_of_a_stranger:f"]), trust=["tests"])


TABLE = {"model": encode_module(nn.Linear(2, 1), "model"), "plan": "data(2)", "losses": [0.5]}
WRONG_TABLES = {
    "no row": ([], "its table has 0 rows with no columns"),
    "two rows": ([TABLE, TABLE], "its table has 2 rows with model, plan, losses"),
    "no model": ([{"plan": "data(2)", "losses": []}], "1 rows with plan, losses, but a saved TorchModel has one"),
    "a text as the model": ([TABLE | {"model": "x"}], "but a saved TorchModel has one"),
    "no plan": ([TABLE | {"plan": None}], "but a saved TorchModel has one"),
    "losses that are texts": ([TABLE | {"losses": ["x"]}], "but a saved TorchModel has one"),
    "a list in place of the model": ([TABLE | {"model": encode_module([1], "a list")}], "a list in place of a model"),
}


@pytest.mark.parametrize(("rows", "message"), WRONG_TABLES.values(), ids=WRONG_TABLES)
def test_a_table_that_is_not_of_a_saved_model_is_refused(rows, message):
    with pytest.raises(CheckpointError, match=message):
        decode_model_table(rows, trust=False)
    assert decode_model_table([TABLE], trust=False)[1:] == ("data(2)", [0.5])
