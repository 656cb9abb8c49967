"""Models that cannot be split: their errors are documented verbatim."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.autograd import Function

import counterpoint as cp
from tests.mistakes.documented import documented_messages
from tests.training.trainers import build_seeded, dataset, equal_bits, params_of


class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(x - x.mean(0))


class Reversed(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Turned(nn.Module):
    """Has the layers before it learn the opposite, as in domain adaptation."""

    def forward(self, x):
        return Reversed.apply(x)


class Adversary(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.turn, self.last = nn.Linear(6, 8), Turned(), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.turn(torch.tanh(self.first(x))))


class FixedShape(Centered):
    def forward(self, x):
        return self.last(torch.tanh(self.first(x)).view(12, 8))


def hooked():
    model = Adversary()
    model.turn.register_full_backward_hook(lambda module, above, below: None)
    return model


@pytest.mark.parametrize(
    ("build", "title", "place"),
    [
        (FixedShape, "A model or a loss that needs the whole batch", 0),
        (Centered, "A model that mixes samples", 0),
        (Adversary, "A custom backward", 0),
        (hooked, "A custom backward", 1),
    ],
)
def test_what_cannot_be_split_is_refused_as_the_page_says(build, title, place):
    model = build_seeded(build)
    before, make = params_of(model), optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises((cp.PlanError, cp.DataError)) as caught,
        cp.parallelize(model, make, F.cross_entropy, strategy="pipeline(2)", num_microbatches=4) as step,
    ):
        step(*dataset(12).tensors)
    assert f"{caught.type.__name__}: {caught.value}" == documented_messages(title)[place]
    assert equal_bits(params_of(model), before)
