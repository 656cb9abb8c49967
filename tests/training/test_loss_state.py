"""Losses that keep a state from one call to the next: refused where a batch is divided, or several ranks share one."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.errors import DataError


class MovingCentre(nn.Module):
    centre: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, output, targets):
        self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return F.mse_loss(output - self.centre, targets)


class Warmup:
    """Counts its calls; the count matters only later."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, output, targets):
        self.num_calls += 1
        return F.mse_loss(output, targets) * (1.0 if self.num_calls < 1000 else 0.5)


def closure():
    state = {"centre": torch.zeros(2)}

    def loss(output, targets):
        state["centre"] = 0.9 * state["centre"] + 0.1 * output.detach().mean(0)
        return F.mse_loss(output - state["centre"], targets)

    return loss


def counting_closure():
    num_calls = 0

    def loss(output, targets):
        nonlocal num_calls
        num_calls += 1
        return F.mse_loss(output, targets) * num_calls

    return loss


def object_in_closure():
    state = SimpleNamespace(total=0.0)

    def loss(output, targets):
        value = F.mse_loss(output, targets)
        state.total += float(value.detach())
        return value

    return loss


def queue_in_closure():
    """Compares with what the call before has appended, as with the queue of a contrastive loss."""
    queue = list[torch.Tensor]()

    def loss(output, targets):
        earlier = queue[-1] if queue else torch.zeros(2)
        queue.append(output.detach().mean(0))
        return F.mse_loss(output - earlier, targets)

    return loss


class ReadsTheOneBefore:
    """Overwrites in each call what the next one reads."""

    def __init__(self):
        self.before = torch.zeros(2)

    def __call__(self, output, targets):
        value = F.mse_loss(output - self.before, targets)
        self.before = output.detach().mean(0)
        return value


class KeepsTheLast(nn.Module):
    """Keeps what is overwritten in each call, and a list, which are not state."""

    def __init__(self):
        super().__init__()
        self.last, self.history = torch.zeros(()), list[float]()

    def forward(self, output, targets):
        value = F.mse_loss(output, targets)
        self.last = value.detach()
        self.history.append(float(self.last))
        return value


def noisy(output, targets):
    return F.mse_loss(output + torch.randn_like(output), targets)


def noisy_by_numpy(output, targets):
    return F.mse_loss(output * np.random.rand(), targets)


def noisy_by_python(output, targets):
    return F.mse_loss(output * random.random(), targets)


def noisy_by_its_own_generator():
    generator = torch.Generator().manual_seed(0)
    return lambda output, targets: F.mse_loss(output + torch.randn(output.shape, generator=generator), targets)


STATES = {
    MovingCentre: "centre of the loss",
    Warmup: "num_calls of the loss",
    closure: "centre of the variable state of the loss",
    counting_closure: "the variable num_calls of the loss",
    object_in_closure: "total of the variable state of the loss",
    queue_in_closure: "something that it keeps",
    ReadsTheOneBefore: "before of the loss",
}


def train(loss, strategy, num_microbatches, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(
        model, optimizer, loss, strategy=strategy, num_microbatches=num_microbatches, **options
    ) as step:
        return [step(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(3)]


@pytest.mark.parametrize("make", STATES)
@pytest.mark.parametrize(
    ("strategy", "num_microbatches"), [("solo", 2), ("solo", 4), ("data(2)", 1), ("pipeline(2)", 2)]
)
def test_a_state_is_refused_where_a_batch_is_divided(make, strategy, num_microbatches):
    message = rf"each call of the loss changes {STATES[make]}.* called for each of its parts.*loss_reduction='batch'"
    with pytest.raises(DataError, match=message):
        train(make(), strategy, num_microbatches)


@pytest.mark.parametrize("options", [{}, {"loss_reduction": "batch"}])
def test_a_state_is_refused_where_ranks_of_one_process_share_the_loss(options):
    with pytest.raises(DataError, match=r"several times, as the ranks of a process share a loss.*counterpoint run -n"):
        train(MovingCentre(), "tensor(2)", 1, **options)


@pytest.mark.long(
    quick=[
        "pipeline(2)-1-options0-object_in_closure",
        "solo-2-options1-Warmup",
        "solo-2-options1-closure",
        "solo-2-options1-counting_closure",
        "solo-2-options1-MovingCentre",
    ]
)
@pytest.mark.parametrize("make", STATES)
@pytest.mark.parametrize(
    ("strategy", "num_microbatches", "options"), [("pipeline(2)", 1, {}), ("solo", 2, {"loss_reduction": "batch"})]
)
def test_a_state_is_that_of_a_plain_loop_where_the_loss_is_called_once(make, strategy, num_microbatches, options):
    expected = train(make(), "solo", 1)
    assert train(make(), strategy, num_microbatches, **options) == pytest.approx(expected, rel=1e-6)


def test_a_state_may_be_that_of_each_microbatch_if_that_is_intended():
    assert len(train(MovingCentre(), "solo", 2, cross_sample="accept")) == 3


@pytest.mark.parametrize(("strategy", "num_microbatches"), [("solo", 2), ("data(2)", 1), ("tensor(2)", 1)])
@pytest.mark.parametrize("is_module", [False, True])
def test_a_list_of_losses_has_one_entry_for_each_call_of_training(is_module, strategy, num_microbatches):
    """Checks of the loss had appended the losses of halves, repeated samples and others."""
    history = list[float]()

    def loss(output, targets):
        history.append(float(F.mse_loss(output.detach(), targets)))
        return F.mse_loss(output, targets)

    module = KeepsTheLast()
    train(module if is_module else loss, strategy, num_microbatches)
    assert len(module.history if is_module else history) == 6


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "tensor(2)"])
def test_random_numbers_are_no_state(strategy):
    assert len(train(noisy, strategy, 2)) == 3


@pytest.mark.parametrize(
    "make", [lambda: noisy, lambda: noisy_by_numpy, lambda: noisy_by_python, noisy_by_its_own_generator]
)
def test_random_numbers_of_any_source_are_no_state_where_each_microbatch_is_a_batch(make):
    assert len(train(make(), "solo", 2, cross_sample="accept")) == 3


def test_what_each_call_overwrites_is_no_state_and_stays_that_of_the_last_microbatch():
    loss = KeepsTheLast()
    train(loss, "solo", 2)
    assert loss.history[-1] == float(loss.last)  # of the halves, and twice to find a state, are others
