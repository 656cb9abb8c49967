"""Modules, parameters and buffers that are added, removed or replaced between steps: refused by name under every plan."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.utils import parametrizations, prune

import counterpoint as cp
from counterpoint.errors import DataError
from counterpoint.training.between_steps.model_changes import NUM_RECORDS, ParameterGuards

PLANS = ["solo", "data(2)", "zero3(2)", "pipeline(2)", "tensor(2)"]
X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(1, -1, 16).view(8, 2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        return self.head(self.second(self.first(x).relu()).relu()) * self.scale


def new_head(model):
    model.head = nn.Linear(8, 2)


def new_weight(model):
    model.second.weight = nn.Parameter(torch.zeros(8, 8))


def tied(model):
    model.second.bias = model.first.bias


def parametrized(model):
    parametrizations.weight_norm(model.second)


def pruned(model):
    prune.random_unstructured(model.second, "weight", 0.5)


def wrapped(model):
    model.second = nn.Sequential(model.second, nn.ReLU())


def module_added(model):
    model.extra = nn.Linear(2, 2)


def parameter_added(model):
    model.head.register_parameter("extra", nn.Parameter(torch.ones(2)))


def buffer_added(model):
    model.head.register_buffer("extra", torch.ones(2))


def module_removed(model):
    del model.second


def buffer_removed(model):
    del model.scale


def assigned(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


CHANGES = {
    new_head: "head of the model was replaced",
    new_weight: "second.weight of the model was replaced by another parameter",
    tied: "second.bias of the model was replaced by another parameter",
    parametrized: "second.weight of the model (was removed|is made another parameter)",
    pruned: "second.weight of the model was removed",
    wrapped: "second of the model was replaced",
    module_added: "extra of the model was added",
    parameter_added: "head.extra of the model was added",
    buffer_added: "head.extra of the model was added",
    module_removed: "second of the model was removed",
    buffer_removed: "scale of the model was removed",
    assigned: "first.weight of the model was replaced by another parameter",
}


@pytest.mark.long(
    quick=[
        "buffer_added-data(2)",
        "module_removed-solo",
        "new_weight-pipeline(2)",
        "buffer_removed-solo",
        "parameter_added-solo",
    ]
)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_and_the_trained_weights_are_exported(change, plan):
    """A replaced head was left untrained under solo, and ignored where ranks train copies."""
    model = Net()
    weight, before = model.first.weight, model.first.weight.detach().clone()

    def train():
        with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.mse_loss, strategy=plan) as step:
            step(X, Y)
            change(model)
            step(X, Y)

    with pytest.raises(DataError, match=rf"^{CHANGES[change]} between two steps, .*call\s+parallelize"):
        train()
    assert not torch.equal(weight.detach(), before)
    assert type(weight) is nn.Parameter


@pytest.mark.parametrize("plan", ["solo", "tensor(2)"])
def test_the_remedy_trains_the_new_head(plan):
    model = Net()
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.mse_loss, strategy=plan) as step:
        step(X, Y)
    new_head(model)
    before = model.head.weight.detach().clone()
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.mse_loss, strategy=plan) as step:
        step(X, Y)
    assert not torch.equal(model.head.weight.detach(), before)


def test_a_change_of_the_loss_is_refused():
    class Loss(nn.Module):
        def forward(self, output, targets):
            return F.mse_loss(output, targets)

    model, loss = Net(), Loss()
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), loss, strategy="solo") as step:
        step(X, Y)
        loss.extra = nn.Parameter(torch.ones(()))
        with pytest.raises(DataError, match="extra of the model was added"):
            step(X, Y)


def build_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.long(quick=["data(2)", "zero3(2)", "solo"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_model_that_is_converted_between_steps_is_refused_and_keeps_its_weights(plan):
    """Under zero3 the process crashed when it exported weights that were in memory of another dtype."""
    model = build_layers()

    def train():
        with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.mse_loss, strategy=plan) as step:
            step(X, Y)
            model.double()
            step(X, Y)

    with pytest.raises(
        DataError, match=r"^0.weight of the model was converted from float32 to float64 between two steps"
    ):
        train()
    trained = build_layers()
    with cp.parallelize(trained, optim.SGD(trained.parameters(), lr=0.1), F.mse_loss, strategy="solo") as step:
        step(X, Y)
    for one, other in zip(model.parameters(), trained.parameters(), strict=True):
        assert torch.allclose(one.float(), other, atol=1e-6)


def transpose_memory(param):
    param.data = param.data.t().contiguous().t()


PROPERTIES = {
    "frozen": lambda param: param.requires_grad_(requires_grad=False),
    "dtype": lambda param: setattr(param, "data", param.data.double()),
    "shape": lambda param: setattr(param, "data", param.data[:1]),
    "strides": transpose_memory,
}


@pytest.mark.parametrize("change", PROPERTIES.values(), ids=PROPERTIES.keys())
def test_guards_hold_until_a_property_changes_and_then_from_the_next_record_on(change):
    params = [*build_layers().parameters()]
    guards = ParameterGuards(params)
    assert not guards.hold()
    guards.record()
    assert guards.hold()
    change(params[2])
    assert not guards.hold()
    guards.record()
    assert guards.hold()


def test_guards_do_not_hold_where_torch_cannot_tell_or_after_too_many_records():
    rows = nn.Parameter(torch.eye(2).to_sparse())
    guards = ParameterGuards([rows])
    guards.record()
    assert not guards.hold()
    dense = nn.Parameter(torch.eye(2))
    guards = ParameterGuards([dense, dense])
    found = []
    for size in range(NUM_RECORDS + 1):
        dense.data = torch.eye(size + 3)
        before = guards.hold()
        guards.record()
        found.append((before, guards.hold()))
    assert found == [(False, True)] * NUM_RECORDS + [(False, False)]


def test_a_parameter_that_was_frozen_is_seen_in_every_step():
    model = build_layers()
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.mse_loss, strategy="solo") as step:
        for number in range(6):
            model[0].weight.requires_grad_(number % 2 == 0)
            before = model[0].weight.detach().clone()
            step(X, Y)
            assert torch.equal(model[0].weight, before) is bool(number % 2)
