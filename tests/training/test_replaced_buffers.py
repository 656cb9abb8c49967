"""Buffers that a forward replaces have the values of a plain loop, and are neither lost nor kept from a trial run."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from counterpoint.errors import DataError, PlanError
from tests.training.trainers import max_difference


class Codebook(nn.Module):
    """Moves the codes that its samples are nearest to."""

    codes: torch.Tensor
    counts: torch.Tensor

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.encode, self.decode = nn.Linear(4, 3), nn.Linear(3, 4)
        self.register_buffer("codes", torch.randn(5, 3))
        self.register_buffer("counts", torch.ones(5))

    def forward(self, x):
        hidden = self.encode(x)
        nearest = torch.cdist(hidden, self.codes).argmin(1)
        codes = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(nearest, 5).to(hidden.dtype)
                counts = self.counts * 0.9 + hot.sum(0) * 0.1
                moved = self.codes * 0.9 + 0.1 * (hot.t() @ hidden) / counts[:, None]
                if self.how == "replaced":
                    self.counts, self.codes = counts, moved
                elif self.how == "in place":
                    self.counts.copy_(counts)
                    self.codes.copy_(moved)
                else:
                    self.codes = torch.cat([self.codes, moved])
        return self.decode(hidden + (codes - hidden).detach())


def build(how):
    torch.manual_seed(0)
    return Codebook(how).double()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, generator=generator).double() for _ in range(4)]


def state(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("how", ["replaced", "in place"])
def test_a_run_ends_with_the_buffers_of_a_plain_loop(how):
    model, plain = build(how), build(how)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x in batches():
        optimizer.zero_grad()
        F.mse_loss(plain(x), x).backward()
        optimizer.step()
    with cp.parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, strategy="solo", num_microbatches=1
    ) as step:
        for x in batches():
            step(x, x)
    assert max_difference(state(model), state(plain)) < 1e-12


class Carried(nn.Module):
    """Carries its state from batch to batch: autograd saves the old value of a buffer that is replaced."""

    hidden: torch.Tensor
    cell: torch.Tensor

    def __init__(self):
        super().__init__()
        self.table, self.lstm, self.head = nn.Embedding(11, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 11)
        self.register_buffer("hidden", torch.zeros(1, 6, 4))
        self.register_buffer("cell", torch.zeros(1, 6, 4))

    def forward(self, text):
        values, (hidden, cell) = self.lstm(self.table(text), (self.hidden, self.cell))
        self.hidden, self.cell = hidden.detach(), cell.detach()
        return self.head(values).transpose(1, 2)


@pytest.mark.parametrize("plan", ["solo", "pipeline(2)"])
def test_a_state_that_a_module_carries_is_that_of_a_plain_loop(plan):
    """The last stage of a pipeline had the new state, and the first one read the old one."""
    torch.manual_seed(0)
    model, text = Carried().double(), torch.randint(11, (6, 21))
    plain = copy.deepcopy(model)
    optimizer, losses = torch.optim.SGD(plain.parameters(), lr=0.5), []
    chunks = [(text[:, first : first + 5], text[:, first + 1 : first + 6]) for first in range(0, 20, 5)]
    for x, targets in chunks:
        optimizer.zero_grad()
        loss = F.cross_entropy(plain(x), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy=plan, num_microbatches=1) as step:
        assert [step(x, targets) for x, targets in chunks] == pytest.approx(losses, rel=1e-12)
    assert max_difference(state(model), state(plain)) < 1e-12


def test_a_buffer_of_another_shape_is_refused():
    model = build("grown")
    with (
        cp.parallelize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, strategy="solo", num_microbatches=1
        ) as step,
        pytest.raises(DataError, match=r"^the buffer codes, torch.float64 \(5, 3\), was replaced by .* \(10, 3\)"),
    ):
        step(batches()[0], batches()[0])


class SharedEntries(nn.Module):
    """Its buffers are views whose elements share memory, or lie in another order."""

    expanded: torch.Tensor
    transposed: torch.Tensor

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("expanded", torch.full((1, 3), 2.0).expand(5, 3))
        self.register_buffer("transposed", torch.arange(12.0).view(3, 4).t())

    def forward(self, x):
        return self.layer(x) * self.expanded[0] + x @ self.transposed


@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero1(2)", "zero3(2)", "pipeline(2)"])
def test_buffers_whose_entries_share_memory_are_left_as_they_are(plan):
    torch.manual_seed(0)
    model = nn.Sequential(SharedEntries(), nn.Linear(3, 3)).double()
    model[0].expanded = torch.full((1, 3), 2.0, dtype=torch.float64).expand(5, 3)
    plain = copy.deepcopy(model)
    x, targets = torch.randn(8, 4).double(), torch.randint(3, (8,))
    with cp.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, strategy=plan) as step:
        loss = step(x, targets)
    expected = F.cross_entropy(plain(x), targets)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-12)
    assert model[0].expanded.stride() == (0, 1)


PLANS = ["data(2)", "zero1(2)", "zero3(2)", "tree(2)", "pipeline(2)"]


@pytest.mark.long(quick=["tree(2)-replaced", "zero1(2)-replaced"])
@pytest.mark.parametrize("how", ["replaced", "in place"])
@pytest.mark.parametrize("plan", [*PLANS, "solo"])
def test_a_buffer_that_moves_with_its_samples_is_refused_where_a_batch_is_divided(plan, how):
    model = build(how)
    before = state(model)
    with (
        cp.parallelize(model, sgd(model), F.mse_loss, strategy=plan, num_microbatches=2) as step,
        pytest.raises(PlanError, match=r"changes the buffer (codes|counts) according to its samples, but "),
    ):
        step(batches()[0], batches()[0])
    assert max_difference(state(model), before) == 0


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_such_a_buffer_may_be_accepted():
    model = build("in place")
    with cp.parallelize(model, sgd(model), F.mse_loss, strategy="data(2)", cross_sample="accept") as step:
        assert step(batches()[0], batches()[0]) > 0


class Counter(nn.Module):
    """Counts its calls, as a forward that changes with time does."""

    calls: torch.Tensor

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.layer(x) / (1 + self.calls)


def train_counter(plan, num_microbatches=None):
    torch.manual_seed(0)
    model = Counter().double()
    with cp.parallelize(model, sgd(model), F.mse_loss, strategy=plan, num_microbatches=num_microbatches) as step:
        for x in batches():
            step(x, x[:, :3])
    return state(model)


def test_a_buffer_that_changes_once_on_every_replica_is_that_of_a_plain_loop():
    alone = train_counter("solo")
    assert int(alone["calls"]) == 4
    assert max_difference(train_counter("data(2)"), alone) < 1e-12
    assert max_difference(train_counter("zero1(2)"), alone) < 1e-12


@pytest.mark.parametrize(("plan", "num_microbatches"), [("solo", 2), ("data(2)", 2)])
def test_a_buffer_that_would_change_several_times_in_a_step_is_refused(plan, num_microbatches):
    with pytest.raises(
        PlanError, match=r"changes the buffer (0\.)?calls whenever it runs, but .* one microbatch for each"
    ):
        train_counter(plan, num_microbatches)
