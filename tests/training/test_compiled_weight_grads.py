"""Gradients of large weights in compiled graphs: written where they are reduced and updated, not returned and copied."""

from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

import counterpoint as cp
from counterpoint.testing.device_survey import TOLERANCE, batches, largest_difference
from tests.training.compile_backend import reset_counter
from tests.training.trainers import state_of

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 512
"""Of a square weight of 2 MiB in float64, from which on its gradient is written in place."""
NUM_STEPS = 3
COMPILED = "segments(backend=writing)"


@pytest.fixture(name="counter", autouse=True)
def count_writes():
    yield reset_counter()
    reset_counter()


def make_wide():
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


class Twice(nn.Module):
    """Two equal calls of one layer, which common subexpression elimination makes one."""

    def __init__(self):
        super().__init__()
        self.first, self.layer, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x):
        hidden = self.first(x).tanh()
        return self.head(self.layer(hidden) + self.layer(hidden))


class Recomputed(Twice):
    """A large layer inside of ``torch.utils.checkpoint``."""

    def forward(self, x):
        return self.head(checkpoint(self.layer, self.first(x).tanh(), use_reentrant=False))


class Tied(Twice):
    """A large weight of a layer that is also used otherwise."""

    def forward(self, x):
        hidden = self.first(x).tanh()
        return self.head(self.layer(hidden) + hidden @ self.layer.weight)


class Narrow(Twice):
    """A large layer inside of an autocast of the model's own."""

    def forward(self, x):
        hidden = self.first(x.float()).tanh()
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.layer(hidden)
        return self.head(hidden.float())


def train(make, plan, dtype=torch.float64, **options):
    """Return losses and trained values of a few steps."""
    torch.manual_seed(0)
    model = make().to(dtype)
    data = [(inputs.to(dtype), targets) for inputs, targets in islice(batches("mlp"), NUM_STEPS)]
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy=plan, timeout_s=20.0, **options) as step:
        losses = [float(step(*batch)) for batch in data]
    return losses, state_of(model)


@pytest.mark.long(quick=["solo-1", "data(2)-2"])
@pytest.mark.parametrize(
    ("plan", "num_written"),
    [
        ("solo", 1),
        ("data(2)", 2),
        ("zero(2, level=1)", 2),
        ("zero(2, level=3)", 2),
        ("pipeline(2)", 2),
        ("pipeline(2, schedule=zero_bubble)", 2),
        ("tree(2)", 2),
        ("server(2)", 2),
    ],
)
def test_a_plan_writes_them_in_place_and_trains_the_same(plan, num_written, counter):
    options = {"num_microbatches": 2} if "pipeline" in plan else {}
    actual = train(make_wide, plan, compile=COMPILED, **options)
    assert counter.num_writes == NUM_STEPS * num_written
    assert largest_difference(actual, train(make_wide, plan)) <= TOLERANCE


@pytest.mark.long(quick=["solo-Twice", "solo-Tied"])
@pytest.mark.parametrize("make", [Twice, Recomputed, Tied])
@pytest.mark.parametrize("plan", ["solo", "data(2)", "pipeline(2)"])
def test_each_use_of_a_weight_is_part_of_its_gradient(make, plan, counter):
    actual = train(make, plan, compile=COMPILED)
    assert counter.num_writes
    assert largest_difference(actual, train(make, plan)) <= TOLERANCE


def test_a_gradient_in_an_autocast_of_the_model_is_returned(counter):
    actual = train(Narrow, "solo", torch.float32, compile=COMPILED)
    assert not counter.num_writes
    assert largest_difference(actual, train(Narrow, "solo", torch.float32)) <= 1e-6


def test_a_hook_of_the_user_sees_the_gradient(counter):
    seen = []

    def make():
        model = make_wide()
        model[2].weight.register_hook(lambda grad: seen.append(grad.shape))
        return model

    train(make, "solo", compile=COMPILED)
    assert not counter.num_writes
    assert seen == [(WIDTH, WIDTH)] * NUM_STEPS


def test_a_gradient_that_is_not_finite_names_its_parameter():
    torch.manual_seed(0)
    model = make_wide().double()
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, compile=COMPILED) as step:
        inputs, targets = next(batches("mlp"))
        with pytest.raises(cp.DataError, match="nan"):
            step(inputs * torch.nan, targets)


class Unregistered(Twice):
    """A large layer whose parameters are not the model's."""

    def __init__(self):
        super().__init__()
        self.hidden = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64)]

    def forward(self, x):
        return self.head(self.hidden[0](self.layer(self.first(x))))


def test_a_weight_that_is_no_parameter_of_the_model_is_an_error():
    with pytest.raises(
        cp.DataError, match=r"of the shape \(512, 512\) is not a parameter of the model, but graphs write"
    ):
        train(Unregistered, "solo", compile=COMPILED)


def test_a_loss_that_differentiates_a_weight_itself_is_an_error():
    torch.manual_seed(0)
    model = make_wide().double()

    def penalized(output, targets):
        (grad,) = torch.autograd.grad(output.sum(), model[0].weight, retain_graph=True)
        return F.cross_entropy(output, targets) + grad.square().sum()

    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with (
        cp.parallelize(model, optimizer, penalized, compile=COMPILED) as step,
        pytest.raises(cp.DataError, match=r"is differentiated outside of a step's backward, but graphs write"),
    ):
        step(*next(batches("mlp")))
