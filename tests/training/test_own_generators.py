"""Losses and models that draw random numbers, from generators of their own too: as a plain loop, or refused."""

import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.errors import DataError, PlanError
from counterpoint.partitioning.own_generators import find_generators, preserve_generators, read_states
from tests.training.trainers import params_of

DTYPE = torch.float64
X, Y = torch.linspace(-1, 1, 32, dtype=DTYPE).view(8, 4), torch.linspace(1, -1, 16, dtype=DTYPE).view(8, 2)
DIVIDED = [("solo", 4), ("data(2)", 2), ("zero3(2)", 2), ("pipeline(2)", 2)]


class OwnDraws:
    """Losses that add noise, each from another source."""

    def __init__(self, kind):
        self.kind = kind
        self.torch, self.numpy, self.python = (
            torch.Generator().manual_seed(3), np.random.default_rng(3), random.Random(3)
        )  # fmt: skip

    def __call__(self, output, targets):
        return F.mse_loss(output + self.noise(output), targets)

    def noise(self, output):
        if self.kind == "torch":
            return torch.randn(output.shape, generator=self.torch, dtype=DTYPE)
        if self.kind == "numpy":
            return torch.from_numpy(self.numpy.standard_normal(output.shape))
        if self.kind == "python":
            return self.python.gauss(0.0, 1.0)
        if self.kind == "new in each call":
            return torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=DTYPE)
        if self.kind == "several entries of a sample":
            return torch.randn(output.numel(), dtype=DTYPE).view_as(output)
        return torch.randn(output.shape, dtype=DTYPE)[torch.randperm(len(output))]


REFUSED = {
    "torch": "come from torch's randn, which are not keyed",
    "numpy": "come from a generator of Python or numpy, which are not keyed",
    "python": "come from a generator of Python or numpy, which are not keyed",
    "permutation": "come from torch's randperm, which are not keyed",
    "several entries of a sample": r"draws random numbers of the shape \(\d,\) for \d samples",
    "new in each call": "do not add up|which are not keyed",
}


def train(build, loss, plan, num_microbatches, **options):
    """Return the losses and weights of two steps."""
    torch.manual_seed(0)
    model = build().double()
    with cp.parallelize(
        model, optim.SGD(model.parameters(), lr=0.1), loss, strategy=plan, num_microbatches=num_microbatches, **options
    ) as step:
        losses = [step(X, Y) for _ in range(2)]
    return losses, params_of(model)


def are_equal(one, other):
    """Tell whether losses and parameters are the same to 1e-12."""
    return one[0] == pytest.approx(other[0], rel=1e-12) and all(
        torch.allclose(one[1][name], value, rtol=1e-12, atol=1e-12) for name, value in other[1].items()
    )


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize(("plan", "num_microbatches"), DIVIDED)
def test_a_loss_whose_draws_have_no_samples_is_refused_where_the_batch_is_divided(kind, plan, num_microbatches):
    """It drew other numbers than for the whole batch, and nothing was said."""
    with pytest.raises(DataError, match=REFUSED[kind]):
        train(mlp, OwnDraws(kind), plan, num_microbatches)


def test_a_loss_that_ranks_of_a_process_share_is_refused_if_it_draws_from_its_own_generator():
    with pytest.raises(DataError, match=r"several times, as the ranks .*start one process for each rank"):
        train(mlp, OwnDraws("torch"), "data(2)", 1, loss_reduction="batch")


@pytest.mark.parametrize("kind", ["torch", "numpy", "permutation"])
def test_a_loss_of_the_whole_batch_draws_as_in_a_plain_loop(kind):
    torch.manual_seed(0)
    model, loss, losses = mlp().double(), OwnDraws(kind), []
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        value = loss(model(X), Y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    result = train(mlp, OwnDraws(kind), "solo", 1)
    if kind != "permutation":  # the draws of the global generator are keyed
        assert are_equal(result, (losses, params_of(model)))


def shifted(make, output, targets):
    return F.mse_loss(output + make(output), targets)


KEYED = {
    "by sample": lambda output: torch.randn(output.shape, dtype=DTYPE),
    "one number": lambda output: torch.randn((), dtype=DTYPE),
    "a matrix": lambda output: torch.randn(3, 4, dtype=DTYPE).mean(),
    "dropout": lambda output: F.dropout(output, 0.5),
}


@pytest.mark.long(quick=["pipeline(2)-2-one number", "solo-4-a matrix", "zero3(2)-2-by sample", "data(2)-2-dropout"])
@pytest.mark.parametrize("kind", KEYED)
@pytest.mark.parametrize(("plan", "num_microbatches"), DIVIDED)
def test_keyed_draws_of_a_loss_are_those_of_the_whole_batch(kind, plan, num_microbatches):
    """Numbers for the whole batch were drawn again for each microbatch."""
    loss = partial(shifted, KEYED[kind])
    assert are_equal(train(mlp, loss, plan, num_microbatches), train(mlp, loss, "solo", 1))


def test_a_shape_that_only_happens_to_be_the_number_of_samples_is_refused():
    loss = partial(shifted, lambda output: torch.randn(2, dtype=DTYPE))
    with pytest.raises(DataError, match=r"draws random numbers of the shape \(2,\) for 2 samples"):
        train(mlp, loss, "solo", 4)


class OwnNoise(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)
        generator = torch.Generator().manual_seed(3)
        is_torch = kind == "torch"
        self.draw = (
            partial(torch.rand, generator=generator, dtype=DTYPE) if is_torch else np.random.default_rng(3).random
        )

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.second(x * torch.as_tensor(self.draw(tuple(x.shape))))


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_model_with_a_generator_of_its_own_draws_as_in_a_plain_loop(kind):
    """Runs before the first step moved its generator on."""
    torch.manual_seed(0)
    model = OwnNoise(kind).double()
    optimizer, losses = optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        value = F.mse_loss(model(X), Y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert are_equal(train(partial(OwnNoise, kind), F.mse_loss, "solo", 1), (losses, params_of(model)))


@pytest.mark.parametrize("kind", ["torch", "numpy"])
@pytest.mark.parametrize("plan", ["pipeline(2)", "tensor(2)"])
def test_a_model_that_is_traced_is_refused_with_a_generator_of_its_own(kind, plan):
    """Torch's stopped the tracer with an error of its own; the numbers of numpy's were repeated in every step."""
    with pytest.raises(PlanError, match=r"^the forward of OwnNoise draws from a generator .*draw with torch.rand"):
        train(partial(OwnNoise, kind), F.mse_loss, plan, None)


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_divided_batch_warns_of_a_generator_of_the_model(kind):
    with pytest.warns(UserWarning, match=r"of OwnNoise come from .*, which are not keyed by sample"):
        train(partial(OwnNoise, kind), F.mse_loss, "solo", 2)


class Holder:
    """A loss that reaches one generator by an attribute, and another by a closure."""

    def __init__(self, inside, draw):
        self.parts, self.draw = {"a": [inside]}, draw


class Drawing(nn.Linear):
    def __init__(self, numbers, helper):
        super().__init__(1, 1)
        self.numbers, self.helper = numbers, helper


def test_generators_are_found_and_restored():
    inside, closed, numbers = torch.Generator(), random.Random(0), np.random.default_rng(0)
    module = nn.Sequential(Drawing(numbers, Holder(inside, lambda: closed.random())))
    found = find_generators(nn.ModuleList([module]))
    assert {id(one) for one in found} == {id(one) for one in (inside, closed, numbers)}
    before = read_states(found)
    with preserve_generators(found):
        torch.rand(1, generator=inside), closed.random(), numbers.random()
        assert all(now != then for now, then in zip(read_states(found), before, strict=True))
    assert read_states(found) == before
