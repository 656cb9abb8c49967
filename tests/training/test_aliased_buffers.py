"""Buffers that are also in plain attributes, and attributes that a forward fills again: exact, or refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from counterpoint.errors import PlanError
from tests.training.trainers import build_seeded, make_generator, max_difference, state_of


class Net(nn.Module):
    """Two layers with more in between, so that stages and blocks of weights have some each."""

    scale: torch.Tensor
    same: torch.Tensor
    part: torch.Tensor
    entries: list[torch.Tensor]

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.between = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.double()
        self.register_buffer("scale", torch.ones(8, dtype=torch.float64))
        self.same, self.entries, self.part = self.scale, [self.scale], self.scale[:4]
        self.cache = torch.zeros(8, 8, dtype=torch.float64)

    def forward(self, x):
        return self.finish(torch.tanh(self.first(x)) * self.same)

    def finish(self, hidden):
        for layer in self.between:
            hidden = torch.sin(layer(hidden))
        return self.last(hidden)


class WritesAlias(Net):
    def forward(self, x):
        self.same.mul_(0.9)
        return self.finish(torch.tanh(self.first(x)) * self.scale)


class ReadsAlias(Net):
    def forward(self, x):
        self.scale.mul_(0.9)
        return self.finish(torch.tanh(self.first(x)) * self.same)


class KnowsAlias(Net):
    """Does not read the buffer by its own name."""

    def forward(self, x):
        self.same.mul_(0.9)
        return self.finish(torch.tanh(self.first(x)) * self.same)


class WritesEntry(Net):
    def forward(self, x):
        with torch.no_grad():
            self.entries[0].mul_(0.9)
        return self.finish(torch.tanh(self.first(x)) * self.scale)


class ReadsView(Net):
    def forward(self, x):
        self.scale.mul_(0.9)
        return self.finish(torch.tanh(self.first(x)) * torch.cat([self.part, self.scale[4:]]))


class WritesView(Net):
    def forward(self, x):
        self.part.mul_(0.9)
        return self.finish(torch.tanh(self.first(x)) * self.scale)


class KnowsView(Net):
    def forward(self, x):
        return self.finish(torch.tanh(self.first(x)) + self.part.sum())


class Replaces(Net):
    def forward(self, x):
        self.scale = self.scale * 0.9
        return self.finish(torch.tanh(self.first(x)) * self.scale + self.same)


class Refills(Net):
    """Reads in its last layer what it has written in the first one."""

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        self.cache[: len(hidden)].copy_(hidden.detach())
        self.cache.mul_(0.5)
        return self.finish(hidden) + self.last(self.cache[: len(hidden)])


class RefillsWithoutGradients(Net):
    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        with torch.no_grad():
            self.cache.zero_()
            self.cache[: len(hidden)].add_(hidden)
        return self.finish(hidden * self.cache[: len(hidden)])


def batches():
    draw = make_generator()
    for _ in range(4):
        yield (torch.randn(8, 4, generator=draw, dtype=torch.float64), torch.randint(3, (8,), generator=draw))


def loop(kind, change=None):
    model = build_seeded(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if change is not None:
            change(model)
    return state_of(model)


def train(kind, plan, num_microbatches=None, change=None):
    model = build_seeded(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy=plan, num_microbatches=num_microbatches) as step:
        for batch in batches():
            step(*batch)
            if change is not None:
                change(model)
    return state_of(model)


WRITERS = [WritesAlias, ReadsAlias, KnowsAlias, WritesEntry]


@pytest.mark.long(quick=["data(2)-WritesAlias", "zero3(2)-ReadsAlias", "zero3(2)-WritesEntry"])
@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero3(2)", "server(2, consistency=bsp)"])
def test_a_buffer_in_another_attribute_is_one_buffer(kind, plan):
    """A trace took it for a constant of its own: the buffer, or what was read, stayed as it was, without a word."""
    assert max_difference(train(kind, plan), loop(kind)) < 1e-12


@pytest.mark.parametrize("kind", WRITERS)
def test_a_buffer_in_another_attribute_is_one_buffer_in_a_pipeline(kind):
    assert max_difference(train(kind, "pipeline(2)", 1), loop(kind)) < 1e-12


def scale_buffer(model):
    model.scale.mul_(0.8)


def scale_alias(model):
    model.same.mul_(0.8)


@pytest.mark.long(quick=["scale_alias-data(2)", "scale_buffer-pipeline(2)"])
@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero3(2)", "pipeline(2)"])
@pytest.mark.parametrize("change", [scale_buffer, scale_alias])
def test_an_alias_is_changed_between_steps_as_the_buffer_is(change, plan):
    """Under ``data(2)`` it was refused after the first export, also unchanged: ranks write buffers."""
    assert max_difference(train(Net, plan, None, change), loop(Net, change)) < 1e-12


def test_a_view_of_a_buffer_is_exact_in_whole_models_and_refused_in_a_trace():
    assert max_difference(train(ReadsView, "data(2)"), loop(ReadsView)) < 1e-12
    for kind in (ReadsView, WritesView):
        with pytest.raises(PlanError, match="changes the buffer scale, and reads it also from a tensor that is a view"):
            train(kind, "pipeline(2)", 1)


class ChangesPart(Net):
    """A buffer that its forward changes is one half of a tensor, whose other half is in an attribute."""

    def __init__(self):
        super().__init__()
        halves = torch.ones(16, dtype=torch.float64)
        self.scale, self.same, self.entries, self.part = halves[:8], torch.zeros(1), [], halves[8:]

    def forward(self, x):
        self.scale.mul_(0.9)
        return self.finish(torch.tanh(self.first(x)) * self.scale + self.part)


class RefillsPart(ChangesPart):
    """The half that it fills again is not a buffer either."""

    def __init__(self):
        super().__init__()
        halves = torch.ones(16, dtype=torch.float64)
        self.cache, self.part = halves[:8], halves[8:]

    def forward(self, x):
        self.cache.zero_().add_(self.part * 2)
        return self.finish(torch.tanh(self.first(x)) * self.cache + self.part)


@pytest.mark.parametrize("kind", [ChangesPart, RefillsPart])
@pytest.mark.parametrize("plan", ["data(2)", "zero3(2)", "pipeline(2)"])
def test_a_tensor_beside_a_changed_one_in_one_storage_is_exact(kind, plan):
    """In a trace it was taken for a view of the changed one."""
    assert max_difference(train(kind, plan, 1), loop(kind)) < 1e-12


@pytest.mark.parametrize("plan", ["data(2)", "zero3(2)", "pipeline(2)"])
def test_a_view_of_a_buffer_that_no_forward_changes_is_exact(plan):
    assert max_difference(train(KnowsView, plan, None, scale_buffer), loop(KnowsView, scale_buffer)) < 1e-12


@pytest.mark.parametrize("plan", ["solo", "data(2)", "pipeline(2)"])
def test_a_replaced_buffer_whose_memory_another_attribute_has_is_refused_and_the_remedy_helps(plan):
    text = r"replaces the buffer scale by another tensor, and \w+ has .* a copy \(self\.scale\.clone\(\)\)"
    with pytest.raises(PlanError, match=text):
        train(Replaces, plan, 1)

    class Copied(Replaces):
        def __init__(self):
            super().__init__()
            self.same, self.entries, self.part = self.scale.clone(), [], self.scale.clone()

    assert max_difference(train(Copied, plan, 1), loop(Copied)) < 1e-12


class KeepsInList(Net):
    """Another tensor follows in the list, which has the same name."""

    def __init__(self):
        super().__init__()
        self.same = self.part = torch.zeros(1)
        self.entries = [self.scale, torch.zeros(1)]

    def forward(self, x):
        self.scale = self.scale * 0.9
        return self.finish(torch.tanh(self.first(x)) * self.scale + self.entries[0])


class KeepsInPrivate(Net):
    def __init__(self):
        super().__init__()
        self.same, self.part, self.entries = torch.zeros(1), torch.zeros(1), []
        self._same = self.scale

    def forward(self, x):
        self.scale = self.scale * 0.9
        return self.finish(torch.tanh(self.first(x)) * self.scale + self._same)


@pytest.mark.parametrize("plan", ["solo", "data(2)", "pipeline(2)"])
@pytest.mark.parametrize(("kind", "name"), [(KeepsInList, "entries"), (KeepsInPrivate, "_same")])
def test_memory_of_a_replaced_buffer_in_a_list_or_a_private_attribute_is_refused(kind, name, plan):
    """Only the last tensor of a list was looked at: the others followed the buffer, where a loop keeps the first."""
    with pytest.raises(PlanError, match=f"replaces the buffer scale by another tensor, and {name} has the memory"):
        train(kind, plan, 1)


class HoldsWeight(Net):
    def __init__(self):
        super().__init__()
        self.entries = [self.first.weight.detach()[:, 0], torch.zeros(1)]


class HoldsPrivateWeight(Net):
    def __init__(self):
        super().__init__()
        self._column = self.first.weight.detach()[:, 0]


@pytest.mark.parametrize(("kind", "name"), [(HoldsWeight, "entries"), (HoldsPrivateWeight, "_column")])
def test_memory_of_a_parameter_in_a_list_or_a_private_attribute_is_refused(kind, name):
    with pytest.raises(PlanError, match=f"{name} is not a parameter, but has the memory of first.weight"):
        train(kind, "data(2)", 1)


class HoldsAlternateRows(Net):
    """Two parameters of one storage, and two buffers of another, without an element in common."""

    even_mean: torch.Tensor
    odd_mean: torch.Tensor

    def __init__(self):
        super().__init__()
        rows = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8)
        means = rows.clone()
        self.even, self.odd = nn.Parameter(rows[::2]), nn.Parameter(rows[1::2])
        self.register_buffer("even_mean", means[::2])
        self.register_buffer("odd_mean", means[1::2])

    def forward(self, x):
        with torch.no_grad():
            self.even_mean.mul_(0.5)
        shift = self.even.sum(0) + self.odd.prod(0) + self.even_mean.sum(0) + self.odd_mean.sum(0)
        return self.finish(torch.tanh(self.first(x)) + shift)


@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero3(2)", "pipeline(2)"])
def test_views_that_interleave_train_as_in_a_loop(plan):
    """Only the first and the last address counted, so that rows between others were refused as the same memory."""
    assert max_difference(train(HoldsAlternateRows, plan, 1), loop(HoldsAlternateRows)) < 1e-12


class HoldsLargeBase(Net):
    """A tensor that contains two parameters, the second of them behind the first."""

    def __init__(self):
        super().__init__()
        base = torch.ones(3, 8, dtype=torch.float64)
        self.base, self.gain, self.shift = base[:, :7], nn.Parameter(base[0, 7:]), nn.Parameter(base[2, :7])

    def forward(self, x):
        return self.finish(torch.tanh(self.first(x)) * self.gain + self.shift.sum())


def test_a_tensor_around_several_others_is_compared_with_all_of_them():
    """Only the next one in memory was compared, with which it has no element in common."""
    with pytest.raises(PlanError, match="base is not a parameter, but has the memory of shift"):
        train(HoldsLargeBase, "data(2)", 1)


PLANS = [("solo", 4), ("data(2)", 1), ("data(2)", 2), ("zero3(4)", 1), ("pipeline(2)", 4), ("pipeline(2) * data(2)", 2)]


@pytest.mark.long(quick=["data(2)-1-Refills", "zero3(4)-1-Refills", "pipeline(2)-4-RefillsWithoutGradients"])
@pytest.mark.parametrize("kind", [Refills, RefillsWithoutGradients])
@pytest.mark.parametrize(("plan", "num_microbatches"), PLANS)
def test_an_attribute_that_each_forward_fills_again_is_that_of_the_microbatch(kind, plan, num_microbatches):
    """Ranks of one process wrote to one tensor, and ``data(2)`` took a restored tensor for a change of the user's."""
    assert max_difference(train(kind, plan, num_microbatches), loop(kind)) < 1e-12


@pytest.mark.parametrize("plan", ["solo", "data(2)", "pipeline(2)"])
@pytest.mark.parametrize("is_copied", [False, True])
def test_a_buffer_that_is_replaced_between_steps_changes_nothing_that_has_its_memory(plan, is_copied):
    """The attribute got the new values, without a word; with the copy that the error names it keeps the old ones."""
    model = build_seeded(Net)
    model.same, model.entries, model.part = (model.scale.clone(),) * 3 if is_copied else (model.scale,) * 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy=plan) as step:
        step(torch.ones(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))
        model.scale = model.scale * 2
        if is_copied:
            step(torch.ones(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))
        else:
            with pytest.raises(cp.DataError, match=r"the buffer scale was replaced .* has the memory of the one"):
                step(torch.ones(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))
    assert torch.equal(model.same, torch.ones(8, dtype=torch.float64))


def test_a_replaced_buffer_may_not_have_the_memory_of_a_parameter():
    """The parameter got the new values."""
    model = build_seeded(lambda: nn.Linear(4, 8))
    model.register_buffer("first", model.bias.detach())
    batch = torch.ones(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy="solo") as step:
        step(*batch)
        model.first = torch.zeros(8, dtype=torch.float64)
        with pytest.raises(cp.DataError, match=r"the buffer first was replaced .* and bias has the memory of the one"):
            step(*batch)
