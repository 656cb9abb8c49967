"""Attributes that a forward changes: as in a plain loop where a forward sees each batch once, else refused."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from counterpoint.errors import PlanError
from counterpoint.partitioning.dry_run import ModuleAttributes
from tests.mistakes.documented import documented_messages
from tests.training.trainers import max_difference, params_of


class Counter(nn.Module):
    """Computes with the number of its calls."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(4, 8), nn.Linear(8, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.second(torch.tanh(self.first(x))) * min(1.0, self.calls / 4)


class Stateful(Counter):
    """Adds what it has computed for the batch before."""

    def __init__(self):
        super().__init__()
        self.before = None

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        if self.before is not None:
            hidden = hidden + self.before
        self.before = hidden.detach()
        return self.second(hidden)


@dataclass(slots=True)
class Totals:
    """An object in an object, without a ``__dict__``."""

    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(8))
    counts: np.ndarray = field(default_factory=lambda: np.zeros(1))
    steps: int = 0


class Nested(Counter):
    """Computes with attributes of an attribute, and with a tensor and an array in them that it changes in place."""

    def __init__(self):
        super().__init__()
        self.state = SimpleNamespace(calls=0, by_name={"all": [Totals()]})

    def forward(self, x):
        totals = self.state.by_name["all"][0]
        self.state.calls += 1
        totals.steps += 1
        totals.counts += 1
        totals.sums += 0.1
        factor = (self.state.calls + totals.steps + float(totals.counts[0])) / 12
        return self.second(torch.tanh(self.first(x)) + totals.sums) * factor


class Dropped(Counter):
    """Leaves out a layer by Python's generator."""

    def forward(self, x):
        hidden = self.first(x)
        return self.second(torch.tanh(hidden) if random.random() < 0.5 else hidden)


class Cached(Counter):
    """Keeps what it computes with, without depending on it."""

    def __init__(self):
        super().__init__()
        self.cache = None

    def forward(self, x):
        self.calls += 1
        if self.cache is None:
            self.cache = torch.arange(8).double()
        return self.second(torch.tanh(self.first(x)) * self.cache)


class Centered(Counter):
    """Subtracts a running mean over samples, which it keeps in a tensor that is not a buffer."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(8).double()

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        output = self.second(hidden - self.mean)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return output


class CenteredInPlace(Centered):
    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        output = self.second(hidden - self.mean)
        self.mean.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
        return output


def build_chain(kind):
    return nn.Sequential(nn.Linear(4, 4), kind(), nn.Tanh(), nn.Linear(3, 3))


def build(kind):
    torch.manual_seed(0)
    return kind().double()


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        yield torch.randn(8, 4, generator=generator).double(), torch.randint(3, (8,), generator=generator)


def plain(kind):
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return params_of(model)


def train(kind, plan, num_microbatches=None):
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy=plan, num_microbatches=num_microbatches) as step:
        for batch in batches():
            step(*batch)
    return params_of(model)


@pytest.mark.long(quick=["data(2)-Stateful", "zero1(2)-Stateful", "zero2(2)-Counter", "data(2)-Nested"])
@pytest.mark.parametrize("kind", [Counter, Stateful, Nested])
@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero1(2)", "zero2(2)"])
def test_runs_that_inspect_a_model_leave_its_attributes_as_they_are(kind, plan):
    assert max_difference(train(kind, plan), plain(kind)) < 1e-12


@pytest.mark.long(quick=["data(2)-2-Counter", "pipeline(2)-4-Stateful", "tensor(2)-1-Counter", "solo-4-Nested"])
@pytest.mark.parametrize("kind", [Counter, Stateful, Nested])
@pytest.mark.parametrize(
    ("plan", "num_microbatches"), [("solo", 4), ("data(2)", 2), ("pipeline(2)", 4), ("tensor(2)", 1)]
)
def test_an_attribute_that_a_forward_computes_with_is_refused_where_ranks_run_it_otherwise(
    kind, plan, num_microbatches
):
    with pytest.raises(
        PlanError, match=rf"the forward of {kind.__name__} changes the attribute \w+, and computes with"
    ):
        train(kind, plan, num_microbatches)


@pytest.mark.long(quick=["data(2)-Centered"])
@pytest.mark.parametrize("kind", [Centered, CenteredInPlace])
@pytest.mark.parametrize("plan", ["data(2)", "zero2(2)", "server(2, consistency=bsp)"])
def test_a_mean_over_samples_in_an_attribute_is_refused_where_a_forward_sees_some_of_them(kind, plan):
    """Each rank had the mean of its own samples, without a word."""
    text = rf"^the forward of {kind.__name__} computes the attribute mean from all samples that it sees"
    with pytest.raises(PlanError, match=text) as caught:
        train(kind, plan)
    (documented,) = documented_messages("An attribute that a forward changes")
    assert str(caught.value)[-250:] == documented[-250:]
    assert max_difference(train(kind, "solo"), plain(kind)) < 1e-12


@pytest.mark.parametrize("kind", [Counter, Stateful])
def test_children_that_ranks_of_one_process_share_may_not_keep_what_they_compute_with(kind):
    """A counter of a child of ``nn.Sequential`` counted the forwards of all replicas."""
    chain = partial(build_chain, kind)
    for plan in ("zero3(2)", "pipeline(2) * data(2)"):
        with pytest.raises(PlanError, match="runs its modules 2 times in a step, on ranks of one process that share"):
            train(chain, plan, 1)
    assert max_difference(train(chain, "pipeline(2)", 1), plain(chain)) < 1e-12


@pytest.mark.long(quick=["pipeline(2)-4"])
@pytest.mark.parametrize(("plan", "num_microbatches"), [("solo", 4), ("zero3(2)", 2), ("pipeline(2)", 4)])
def test_an_attribute_that_does_not_change_the_output_may_be_changed(plan, num_microbatches):
    assert max_difference(train(Cached, plan, num_microbatches), plain(Cached)) < 1e-12


def test_python_s_generator_is_refused_in_a_trace_and_named_elsewhere():
    with pytest.raises(
        PlanError, match="Dropped draws from a generator of Python or numpy, or from one of its own, but a model"
    ):
        train(Dropped, "pipeline(2)", 2)
    with pytest.warns(UserWarning, match="come from a generator of Python or numpy, which are not keyed by sample"):
        train(Dropped, "data(2)")


@pytest.mark.parametrize("plan", ["solo", "pipeline(2)", "zero3(2)", "tensor(2)"])
def test_a_nested_counter_counts_the_forwards_of_training_only(plan):
    """Runs that inspect the model before the first step were counted, too; a trace counts nothing."""

    class Counted(Counter):
        state: SimpleNamespace

        def forward(self, x):
            self.state.calls += 1
            return self.second(torch.tanh(self.first(x)))

    model = build(Counted)
    model.state = SimpleNamespace(calls=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy=plan, num_microbatches=1) as step:
        for batch in batches():
            step(*batch)
    assert model.state.calls == (4 if plan == "solo" else 0)


def test_a_differentiable_value_in_an_object_is_refused_where_ranks_run_copies():
    """A loss that reads it would see that of the user's own model, not those of the ranks."""

    class Keeping(Counter):
        state: SimpleNamespace

        def forward(self, x):
            self.state.hidden = torch.tanh(self.first(x))
            return self.second(self.state.hidden)

    model = build(Keeping)
    model.state = SimpleNamespace(hidden=None)

    def loss(output, targets):
        return F.cross_entropy(output, targets) + model.state.hidden.square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for plan in ("data(2)", "pipeline(2)"):
        with pytest.raises(PlanError, match="keeps a differentiable value in its attribute state"):
            cp.parallelize(model, optimizer, loss, strategy=plan)(*next(batches()))


def test_attributes_are_restored_also_where_a_collection_was_changed():
    model = build(Counter)
    model.entries, model.names = [torch.zeros(1)], {"a": 1}
    attributes = ModuleAttributes(model)
    model.entries.append(torch.ones(1))
    model.names["b"], model.new, model.calls = 2, True, 5
    assert sorted(attributes.find_changed()) == ["calls", "entries", "names", "new"]
    attributes.restore()
    assert (len(model.entries), model.names, model.calls, hasattr(model, "new")) == (1, {"a": 1}, 0, False)
    assert attributes.find_changed() == []


class FollowsInForward(nn.Module):
    """Moves a frozen copy of a layer towards it in each forward."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.1)
        return self.student(x) - self.teacher(x)


@pytest.mark.parametrize(("plan", "num_microbatches"), [("solo", 4), ("data(2)", None), ("pipeline(2)", None)])
def test_a_forward_that_changes_a_parameter_is_refused_where_it_runs_on_parts_of_a_batch(plan, num_microbatches):
    """With several microbatches on one rank it moved for each of them; elsewhere the error was about code between steps."""
    model = FollowsInForward()
    sgd = torch.optim.SGD(model.student.parameters(), lr=0.1)
    step = cp.parallelize(model, sgd, F.mse_loss, strategy=plan, num_microbatches=num_microbatches)
    text = r"^the forward of FollowsInForward changes the parameter teacher\.weight whenever it runs, .*writeback=True"
    with pytest.raises(cp.PlanError, match=text):
        step(torch.ones(8, 4), torch.zeros(8, 3))
    step.close()


class Unreadable(Mapping[str, int]):
    """A mapping whose values are computed when they are read, as those of a configuration with missing ones."""

    def __init__(self):
        self.calls = 0

    def __getitem__(self, key):
        raise KeyError(key)

    def __iter__(self):
        return iter(["missing"])

    def __len__(self):
        return 1


def count_in_mapping(value):
    value.calls += 1


KEPT = {
    "float8": (lambda: torch.ones(2).to(torch.float8_e4m3fn), lambda value: None),
    "another mapping": (Unreadable, count_in_mapping),
    "resized": (lambda: torch.zeros(2), lambda value: value.resize_(3).zero_()),
    "array": (lambda: np.zeros(2), lambda value: value.resize(3, refcheck=False)),
    "not a number": (lambda: torch.tensor([torch.nan, 1.0]), lambda value: value.nan_to_num_()),
}


@pytest.mark.parametrize("plan", ["solo", "data(2)"])
@pytest.mark.parametrize("kind", KEPT)
def test_values_of_every_kind_may_be_attributes_and_are_as_before_after_runs_that_inspect_the_model(kind, plan):
    """Some could not be compared or written again, and values of other mappings were read."""
    make, change = KEPT[kind]

    class Keeping(Counter):
        def forward(self, x):
            change(self.kept)
            return self.second(torch.tanh(self.first(x)))

    model = build(Keeping)
    model.kept = value = make()
    attributes = ModuleAttributes(model)
    model(torch.ones(2, 4).double())
    attributes.restore()
    assert not ModuleAttributes(model).find_changed()
    assert attributes.find_changed() == []
    assert model.kept is value
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy=plan, cross_sample="accept") as step:
        assert all(step(*batch) > 0 for batch in batches())
