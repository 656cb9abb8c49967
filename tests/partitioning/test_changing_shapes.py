"""Inputs of other shapes than those that a model was split with: one trace serves them, or each has its own."""

import pytest
import torch
from torch import nn

from counterpoint.errors import PlanError
from counterpoint.partitioning.tracing.traced import TracedPartition
from tests.covering import each_value_once
from tests.partitioning.models import ALL
from tests.partitioning.segment_runs import worst_of


class Layers(nn.Module):
    """Two linear layers on ``(batch, length, 6)``; a subclass says what happens between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.other = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))

    def between(self, x):
        return torch.tanh(x)

    def forward(self, x):
        return self.second(self.between(self.first(x)))


class Positions(Layers):
    """Has eight positions, and sizes in arithmetic."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(8, 6, dtype=torch.float64))

    def between(self, x):
        batch, length, _ = x.shape
        scores = (x @ x.mT) / length**0.5 + torch.arange(length)
        return (scores.softmax(-1) @ x + self.positions[:length]).reshape(batch * length, 6).view(batch, length, 6)


class Branch(Layers):
    """Does something else for long inputs, and for those of an odd length."""

    def between(self, x):
        x = torch.relu(x) if x.shape[1] > 5 else torch.tanh(x)
        return x * 2 if x.shape[1] % 2 else x


class Loop(Layers):
    """Adds up over time steps, which a trace unrolls."""

    def between(self, x):
        total = x[:, 0]
        for step in range(1, x.shape[1]):
            total = torch.tanh(total + x[:, step])
        return x + total[:, None]


class Length(Layers):
    """Returns its length, too."""

    def forward(self, x):
        return super().forward(x), x.shape[1]


class OtherWeights(Layers):
    """Uses other weights for long inputs."""

    def between(self, x):
        return self.other(x) if x.shape[1] > 5 else x


def sample(*shape):
    return (torch.randn(*shape, 6, dtype=torch.float64),)


SHAPES = [(3, 4), (3, 5), (3, 7), (2, 3), (3, 8), (1, 6), (4, 1), (3, 4), (5, 2)]


@pytest.mark.long
@pytest.mark.parametrize("kind", [Layers, Positions, Branch, Loop, Length])
def test_inputs_of_other_lengths_and_numbers_give_what_the_model_gives(kind):
    partitioned = TracedPartition(model := kind(), sample(3, 4))
    assert max(worst_of(partitioned, model, sample(*shape)) for shape in SHAPES) <= 1e-12


@pytest.mark.long(quick=["Layers"])
@pytest.mark.parametrize("kind", [Layers, Positions])
def test_after_the_third_shape_nothing_is_traced_again(kind):
    partitioned = TracedPartition(model := kind(), sample(3, 4))
    worst_of(partitioned, model, sample(3, 5))
    worst_of(partitioned, model, sample(2, 6))
    assert partitioned.num_traces == 3
    for shape in [(2, 2), (3, 3), (4, 4), (6, 5), (7, 6), (8, 7)]:
        worst_of(partitioned, model, sample(*shape))
    assert partitioned.num_traces == 3


@pytest.mark.long(quick=["perceptron-blocks"])
@pytest.mark.parametrize(("name", "prefer"), each_value_once([*ALL], ["blocks", "pairs"]))
def test_one_trace_serves_every_number_of_samples(name, prefer):
    model, inputs = ALL[name]()
    partitioned = TracedPartition(model, inputs, prefer=prefer)
    for samples in (3, 4, 5, 7):
        resized = [value[torch.arange(samples) % len(value)] for value in inputs]
        assert worst_of(partitioned, model, tuple(resized)) <= 1e-12
    assert partitioned.num_traces <= 3


def test_lengths_that_a_forward_tells_apart_have_traces_of_their_own():
    partitioned = TracedPartition(model := Branch(), sample(3, 4))
    for length in (5, 3, 2, 9, 7, 11, 8, 10, 12):
        assert worst_of(partitioned, model, sample(3, length)) <= 1e-12
    assert partitioned.num_traces < 7


@pytest.mark.long
def test_many_traces_are_reported_once():
    partitioned = TracedPartition(model := Loop(), sample(2, 2))
    for length in range(3, 11):
        worst_of(partitioned, model, sample(2, length))
    with pytest.warns(UserWarning, match=r"Loop was traced 10 times, .* \(2, 11, 6\): .*pad lengths"):
        worst_of(partitioned, model, sample(2, 11))
    worst_of(partitioned, model, sample(2, 12))


def test_other_weights_for_other_lengths_are_refused():
    partitioned = TracedPartition(model := OtherWeights(), sample(3, 4))
    with pytest.raises(
        PlanError, match=r"shapes \(3, 6, 6\) .* uses other\.bias, other\.weight.*\(3, 4, 6\).*data, zero"
    ):
        worst_of(partitioned, model, sample(3, 6))


def test_an_input_that_the_model_cannot_take_fails_as_in_the_model():
    partitioned = TracedPartition(model := Positions(), sample(3, 4))
    for length in (5, 6):
        worst_of(partitioned, model, sample(3, length))
    with pytest.raises(RuntimeError, match="must match the size"):
        worst_of(partitioned, model, sample(3, 9))
