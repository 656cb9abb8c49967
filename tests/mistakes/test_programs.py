"""Losses, inputs and changes between steps that ranks cannot follow: their errors are documented verbatim."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from tests.mistakes.documented import documented_messages
from tests.training.trainers import build_seeded, dataset, mlp


class Moving(nn.Module):
    """A loss with a moving average."""

    centre: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))

    def forward(self, output, targets):
        self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return F.cross_entropy(output - self.centre, targets)


class Doubling(nn.Module):
    """A model that changes its input."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        x *= 2
        return self.last(torch.tanh(self.first(x)))


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, weights):
        return self.last(torch.tanh(self.first(x))) * weights[0]


def step_of(model, strategy="pipeline(2)", loss=F.cross_entropy, num_microbatches=2):
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    return cp.parallelize(model, optimizer, loss, strategy=strategy, num_microbatches=num_microbatches)


def a_loss_with_a_state():
    with step_of(mlp(), loss=Moving()) as step:
        step(*dataset(12).tensors)


def a_loss_with_a_generator():
    generator = torch.Generator().manual_seed(0)

    def loss(output, targets):
        noise = torch.randn(output.shape, generator=generator, dtype=output.dtype)
        return F.cross_entropy(output + noise, targets)

    with step_of(mlp(), loss=loss) as step:
        step(*dataset(12).tensors)


def a_new_head():
    model = mlp()
    with step_of(model) as step:
        step(*dataset(12).tensors)
        model[4] = build_seeded(lambda: nn.Linear(8, 3))
        step(*dataset(12).tensors)


def a_new_weight():
    model = mlp()
    with step_of(model) as step:
        step(*dataset(12).tensors)
        model[4].weight = nn.Parameter(torch.zeros(3, 8, dtype=torch.float64))
        step(*dataset(12).tensors)


def a_step_by_habit():
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy="data(2)") as step:
        step(*dataset(12).tensors)
        optimizer.step()


def a_list_of_numbers():
    with step_of(build_seeded(Weighted), "data(2)") as step:
        step((dataset(12).tensors[0], [1.0] * 12), dataset(12).tensors[1])


def an_input_that_was_read_before():
    inputs, targets = dataset(12).tensors
    with step_of(build_seeded(Doubling)) as step:
        for _ in range(2):
            step(inputs, targets)


@pytest.mark.parametrize(
    ("program", "title", "place"),
    [
        (a_loss_with_a_state, "A loss that keeps a state", 0),
        (a_loss_with_a_generator, "A loss that draws random numbers", 0),
        (a_new_head, "Modules and parameters changed in a loop", 0),
        (a_new_weight, "Modules and parameters changed in a loop", 1),
        (a_step_by_habit, "A call of optimizer.step() by habit", 0),
        (a_list_of_numbers, "Lists of numbers", 0),
        (an_input_that_was_read_before, "Inputs changed in place", 0),
    ],
)
def test_a_program_that_ranks_cannot_follow_is_refused_as_the_page_says(program, title, place):
    with pytest.raises((cp.PlanError, cp.DataError)) as caught:
        program()
    assert f"{caught.type.__name__}: {caught.value}" == documented_messages(title)[place]
