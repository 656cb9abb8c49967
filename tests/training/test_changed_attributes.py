"""Plain attributes that a loop changes between steps: as in a plain loop, or refused where ranks would not see them."""

import copy
import os
from contextvars import ContextVar, copy_context
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from counterpoint.errors import DataError
from counterpoint.partitioning.stores import MAX_ELEMENTS
from counterpoint.training.between_steps.attribute_changes import AttributeCheck
from tests.training.trainers import max_difference, state_of


class Scaled(nn.Module):
    """Divides by an attribute; its forward counts its calls in another."""

    def __init__(self, width):
        super().__init__()
        self.layer, self.temperature, self.calls = nn.Linear(4, width), 1.0, 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x) / self.temperature


SCALES = {"output": 1.0}


class Configuration:
    scale = 1.0

    def __init__(self):
        self.rate = 1.0
        self.limits = SimpleNamespace(upper=SimpleNamespace(value=1.0))


class Net(nn.Module):
    gain = 1.0

    def __init__(self):
        super().__init__()
        self.options, self.factors, self.config = {"scale": 1.0}, [1.0], Configuration()
        self.weights = torch.ones(3)
        self.first, self.dropout, self.second = Scaled(8), nn.Dropout(0.0), nn.Linear(8, 3)

    def forward(self, x):
        output = self.second(self.dropout(torch.tanh(self.first(x)))) * self.weights * self.gain
        return output * self.options["scale"] * self.factors[0] * self.config.rate * SCALES["output"]


def build():
    torch.manual_seed(0)
    return Net().double()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=generator).double(), torch.randint(3, (8,), generator=generator))] * 3


def train(model, plan, change):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy=plan) as step:
        for number, batch in enumerate(batches()):
            step(*batch)
            if number == 0:
                change(model)
    return state_of(model)


def heat(model):
    model.get_submodule("first").temperature = 2.0


def drop(model):
    model.get_submodule("dropout").p = 0.5


CONTEXT_SCALE = ContextVar("scale", default="1")


class ReadsEnvironment(Net):
    def forward(self, x):
        return super().forward(x) * float(os.environ.get("NET_SCALE", "1"))


class ReadsContext(Net):
    def forward(self, x):
        return super().forward(x) * float(CONTEXT_SCALE.get())


def build_reader(kind):
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.parametrize(
    ("kind", "name"),
    [(ReadsEnvironment, "environment variable NET_SCALE"), (ReadsContext, "global CONTEXT_SCALE of tests")],
)
@pytest.mark.parametrize(("plan", "is_traced"), [("data(2)", False), ("zero3(2)", True), ("pipeline(2)", True)])
def test_environment_and_context_variables_are_those_of_the_step_or_refused(kind, name, plan, is_traced, monkeypatch):
    def change(_):
        monkeypatch.setenv("NET_SCALE", "2")
        CONTEXT_SCALE.set("2")

    monkeypatch.setenv("NET_SCALE", "1")
    if is_traced:
        with pytest.raises(DataError, match=f"^the {name}.* was changed from '1' to '2' between two steps"):
            copy_context().run(train, build_reader(kind), plan, change)
        return
    states = []
    for own_plan in ("solo", plan):
        monkeypatch.setenv("NET_SCALE", "1")
        states.append(copy_context().run(train, build_reader(kind), own_plan, change))
    assert max_difference(*states) < 1e-12


@pytest.mark.long(quick=["drop-dropout.p of-data(2)", "drop-dropout.p of-zero1(2)", "drop-dropout.p of-tensor(2)"])
@pytest.mark.parametrize("plan", ["data(2)", "zero1(2)", "zero3(2)", "pipeline(2)", "tensor(2)"])
@pytest.mark.parametrize(
    ("change", "text"), [(heat, "first.temperature of the model was changed from 1.0 to 2.0"), (drop, "dropout.p of")]
)
def test_a_change_that_ranks_would_not_see_is_refused(plan, change, text):
    with pytest.raises(DataError, match=rf"^{text}.* between two steps, but under .* give the value to forward"):
        train(build(), plan, change)


def change_dict(model):
    model.options["scale"] = 2.0


def change_list(model):
    model.factors[0] = 2.0


def change_object(model):
    model.config.rate = 2.0


def change_object_in_objects(model):
    model.config.limits.upper.value = 2.0


def replace_tensor(model):
    model.weights = model.weights * 2


class Tables(Configuration):
    def __init__(self):
        super().__init__()
        self.table = [np.ones(3)]


class Held(Net):
    config: Tables

    """Multiplies by arrays that are held by lists, objects and default arguments."""

    def __init__(self):
        super().__init__()
        self.held = {"tensors": [torch.ones(3)]}
        self.config = Tables()

    def forward(self, x, factors=[1.0]):  # noqa: B006 - which a user may change
        output = super().forward(x) * self.held["tensors"][0] * torch.from_numpy(self.config.table[0])
        return output * factors[0]


def change_held_tensor(model):
    model.held["tensors"][0].mul_(2)


def change_held_array(model):
    model.config.table[0][:] *= 2


def change_default(model):
    type(model).forward.__defaults__[0][0] *= 2


@pytest.mark.parametrize(
    ("plan", "change", "text"),
    [
        ("data(2)", change_held_tensor, r"held.tensors\[0\] of the model was changed in place"),
        ("data(2)", change_held_array, r"config.table\[0\] of the model was changed from array"),
        ("zero3(2)", change_held_array, r"config.table\[0\] of the model was changed from array"),
        ("zero3(2)", change_default, r"a default argument of Held.forward was changed from \[.*\] to \[.*\]"),
    ],
)
def test_a_change_in_what_attributes_hold_is_refused_where_ranks_would_not_see_it(plan, change, text):
    torch.manual_seed(0)
    with pytest.raises(DataError, match=f"^{text}"):
        train(Held().double(), plan, change)


class MadeInInference(Net):
    def __init__(self):
        super().__init__()
        with torch.inference_mode():
            self.mask = torch.arange(3.0)

    def forward(self, x):
        return super().forward(x) + self.mask


def double_in_inference(model):
    with torch.inference_mode():
        model.mask.mul_(2)


def leave(model):
    pass


def train_seeded(kind, plan, change):
    torch.manual_seed(0)
    return train(kind().double(), plan, change)


@pytest.mark.parametrize("plan", ["data(2)", "zero3(2)", "pipeline(2)"])
def test_a_tensor_of_inference_mode_trains_and_its_change_is_refused_where_ranks_would_not_see_it(plan):
    """Torch counts no versions of it, and reading the counter was an error."""
    expected = train_seeded(MadeInInference, "solo", leave)
    assert max_difference(train_seeded(MadeInInference, plan, leave), expected) < 1e-12
    if plan == "data(2)":
        with pytest.raises(DataError, match="mask of the model was changed in place"):
            train_seeded(MadeInInference, plan, double_in_inference)


class HasUnused(Net):
    """Holds a tensor without values, and a large one."""

    def __init__(self):
        super().__init__()
        self.shapes = torch.ones(3, device="meta")
        self.large = torch.zeros(MAX_ELEMENTS + 1, dtype=torch.uint8)


def change_meta(model):
    model.shapes.mul_(2)


def change_large(model):
    model.large[0] = 1


@pytest.mark.parametrize(("change", "name"), [(change_meta, "shapes"), (change_large, "large")])
def test_a_tensor_that_is_not_copied_is_compared_by_its_version(change, name):
    """The copy took memory, and comparing a meta tensor was torch's error."""
    model = HasUnused()
    check = AttributeCheck()
    check.watch(model, is_traced=False)
    assert all(tensor.values is None for tensor in check.tensors if tensor.watched.key in {"shapes", "large"})
    check.require_unchanged("data(2)", lambda: None)
    change(model)
    with pytest.raises(DataError, match=f"{name} of the model was changed in place between two steps"):
        check.require_unchanged("data(2)", lambda: None)


def add_hook(model):
    model.get_submodule("first").register_forward_hook(lambda module, inputs, output: output * 2)


@pytest.mark.long(quick=["replace_tensor-...", "add_hook-..."])
@pytest.mark.parametrize("plan", ["data(2)", "zero3(2)", "pipeline(2)"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (change_dict, r"options of the model was changed from \{'scale': 1.0\} to \{'scale': 2.0\}"),
        (change_list, r"factors of the model was changed from \[1.0\] to \[2.0\]"),
        (change_object, r"config.rate of the model was changed from 1.0 to 2.0"),
        (change_object_in_objects, r"config.limits.upper.value of the model was changed from 1.0 to 2.0"),
        (replace_tensor, "weights of the model was changed to another value"),
        (add_hook, "first._forward_hooks of the model was changed from"),
    ],
)
def test_changes_of_collections_objects_tensors_and_hooks_are_refused(plan, change, text):
    with pytest.raises(DataError, match=rf"^{text}.* between two steps"):
        train(build(), plan, change)


def double_in_place(model):
    model.weights.mul_(2)


def set_class_attribute(model):
    Net.gain = 2.0


def set_global(model):
    SCALES["output"] = 2.0


@pytest.fixture
def restored_values():
    yield
    Net.gain, SCALES["output"] = 1.0, 1.0


@pytest.mark.long(quick=["set_global-..."])
@pytest.mark.usefixtures("restored_values")
@pytest.mark.parametrize(
    ("change", "seen", "unseen", "text"),
    [
        (double_in_place, ["pipeline(2)"], ["data(2)"], "weights of the model was changed in place"),
        (set_class_attribute, ["data(2)"], ["zero3(2)", "pipeline(2)"], "Net.gain was changed from 1.0 to 2.0"),
        (set_global, ["data(2)"], ["pipeline(2)"], r"the global SCALES of \S+ was changed from \{'output': 1.0\}"),
    ],
)
def test_a_change_that_some_ranks_see_is_refused_where_they_do_not(change, seen, unseen, text):
    expected = train(build(), "solo", change)
    for plan in seen:
        Net.gain, SCALES["output"] = 1.0, 1.0
        assert max_difference(train(build(), plan, change), expected) < 1e-12
    for plan in unseen:
        Net.gain, SCALES["output"] = 1.0, 1.0
        with pytest.raises(DataError, match=rf"^{text}.* between two steps"):
            train(build(), plan, change)


def scale_by(factors):
    return lambda x: x * factors[0]


def multiply(x):
    return x * SCALES["output"]


class WithFunctions(Net):
    """Calls a function of a closure, one with a global, and one that is an attribute."""

    def __init__(self):
        super().__init__()
        self.variables = [1.0]  # which scale() reads as a variable of its closure, not as an attribute
        self.scale, self.activation = scale_by(self.variables), F.relu

    def forward(self, x):
        return self.activation(multiply(self.scale(super().forward(x))))


def change_variable(model):
    model.scale.__closure__[0].cell_contents = [2.0]


def set_function(model):
    model.activation = F.gelu


def set_forward(model):
    model.first.forward = lambda x: 2 * Scaled.forward(model.first, x)


def set_class_method(model):
    setattr(WithFunctions, "forward", Net.forward)  # noqa: B010 - a method, which mypy lets nobody assign


@pytest.fixture
def restored_forward():
    forward = WithFunctions.forward
    yield
    setattr(WithFunctions, "forward", forward)  # noqa: B010 - likewise
    SCALES["output"] = 1.0


@pytest.mark.usefixtures("restored_forward")
@pytest.mark.parametrize(
    ("change", "plan", "text"),
    [
        (
            change_variable,
            "pipeline(2)",
            r"the variable factors of scale_by.<locals>.<lambda> was changed from \[1.0\]",
        ),
        (set_global, "pipeline(2)", r"the global SCALES of \S+ was changed from \{'output': 1.0\}"),
        (set_function, "data(2)", "activation of the model was changed from <"),
        (set_forward, "data(2)", "first.forward of the model was changed to another function"),
        (set_forward, "pipeline(2)", "first.forward of the model was changed to another function"),
        (set_class_method, "pipeline(2)", "WithFunctions.forward was changed from <function"),
    ],
)
def test_changed_functions_and_what_they_read_are_refused(change, plan, text):
    """Ranks went on with what the functions of the first step had read, or with its copies."""
    torch.manual_seed(0)
    with pytest.raises(DataError, match=rf"^{text}.* between two steps"):
        train(WithFunctions().double(), plan, change)


def test_a_change_is_that_of_a_plain_loop_alone():
    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number, (x, targets) in enumerate(batches()):
        optimizer.zero_grad()
        F.cross_entropy(plain(x), targets).backward()
        optimizer.step()
        if number == 0:
            heat(plain)
    assert max_difference(train(build(), "solo", heat), state_of(plain)) < 1e-12


def test_children_of_a_sequential_model_run_as_they_are():
    model = nn.Sequential(Scaled(4), nn.Tanh(), Scaled(4), nn.Linear(4, 3)).double()
    other = copy.deepcopy(model)

    def change(model):
        model[2].temperature = 2.0

    assert max_difference(train(model, "pipeline(2)", change), train(other, "solo", change)) < 1e-12


@pytest.mark.parametrize("plan", ["data(2)", "zero3(2)"])
def test_what_a_forward_itself_changes_is_not_compared(plan):
    model, alone = build(), build()
    trained = train(model, plan, lambda model: model(batches()[0][0]))
    assert max_difference(trained, train(alone, "solo", lambda _: None)) < 1e-12
