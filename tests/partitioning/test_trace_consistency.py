"""Every trace of a model is split alike, whatever its number of samples, and passes each value once."""

from functools import partial
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.errors import PlanError
from counterpoint.partitioning.input_shapes import list_input_shapes
from counterpoint.partitioning.tracing.export_trace import export_graph
from counterpoint.partitioning.tracing.split_trace import choose_split_points
from counterpoint.partitioning.tracing.traced import TracedPartition
from counterpoint.testing.parity import relative_difference, train
from counterpoint.testing.parity_models import ParityModel, TrainConfig, plan_for
from tests.covering import each_value_once
from tests.partitioning.models import ALL, Residual, fixed_heads, residual
from tests.partitioning.segment_runs import clone_tensors, forward, seed, with_samples, worst_of


@pytest.mark.long(quick=["long_skip-pairs"])
@pytest.mark.parametrize(("name", "prefer"), each_value_once([*ALL], ["blocks", "pairs"]))
def test_the_same_values_cross_every_split_for_another_number_of_samples(name, prefer):
    model, inputs = ALL[name]()
    partitioned = TracedPartition(model, inputs, prefer=prefer)
    two_samples = with_samples(list_input_shapes(inputs), 2)
    layouts = (partitioned.split_trace(training=True, input_shapes=shapes) for shapes in ((), two_samples))
    first, other = (
        [(one.node.name, one.producer, one.consumers) for one in layout.boundary_values] for layout in layouts
    )
    assert first == other


@pytest.mark.long(quick=["9"])
@pytest.mark.parametrize("samples", [1, 3, 9])
def test_a_pair_that_a_block_ends_in_runs_for_another_number_of_samples(samples):
    model, inputs = residual()
    assert worst_of(TracedPartition(model, inputs), model, (torch.randn(samples, 8),)) <= 1e-12


@pytest.mark.long(quick=["residual-blocks"])
@pytest.mark.parametrize("prefer", ["blocks", "pairs"])
@pytest.mark.parametrize("make", [residual, fixed_heads])
def test_no_value_is_twice_between_two_blocks(make, prefer):
    model, inputs = make()
    partitioned = TracedPartition(model, inputs, prefer=prefer)
    bounds = [block.first_layer for block in partitioned.spec.blocks] + [len(partitioned.spec.layers)]
    for _, _, gave in forward(partitioned, bounds, inputs, *clone_tensors(model), training=True):
        assert not [pair for pair in combinations(gave, 2) if torch.equal(*pair)]


def test_bytes_between_blocks_count_a_value_once():
    assert TracedPartition(*residual()).spec.blocks[0].output_bytes == 16 * 8


def test_choosing_where_to_split_leaves_the_trace_unchanged():
    model, inputs = residual()
    traced = export_graph(model, inputs, training=True)
    before = str(traced.graph)
    choose_split_points(traced, model, {}, "blocks")
    assert str(traced.graph) == before


@pytest.mark.long(quick=["data(2) + overlap"])
@pytest.mark.parametrize("strategy", ["zero3(2)", "pipeline(2)", "data(2) + overlap"])
def test_a_step_takes_batches_of_two_sizes(strategy):
    name, *passes = strategy.split(" + ")
    model, make = Residual(), partial(optim.SGD, lr=0.1)
    with cp.parallelize(model, make, F.cross_entropy, strategy=name, passes=tuple(passes), num_microbatches=2) as step:
        losses = [float(step(torch.randn(size, 8), torch.arange(size) % 4)) for size in (8, 4)]
    assert all(loss > 0 for loss in losses)


def untrained():
    torch.manual_seed(3)
    return Residual()


def batch(size):
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(size)), torch.arange(size) % 4


@pytest.mark.long(quick=["pipeline(2, balance=(1,5))"])
@pytest.mark.parametrize(
    "strategy",
    ["pipeline(2, balance=(1,5))", "zero3(2)", "pipeline(2, replicas=(1,2))", "tensor(2) * pipeline(2)"],
)
def test_training_equals_solo_with_an_uneven_last_batch(strategy):
    subject = ParityModel("residual", untrained, tuple(map(batch, (24, 24, 7))), F.cross_entropy)
    solo, ours = (train(subject, plan_for(plan, 4), TrainConfig()) for plan in ("solo", strategy))
    assert max(relative_difference(ours.params[name], value) for name, value in solo.params.items()) <= 1e-12


class TwoPairs(nn.Module):
    """Two pairs of layers as functions, both in the one module."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.randn(6, 6)) for _ in range(4))

    def forward(self, x):
        x = torch.tanh(F.linear(F.relu(F.linear(x, self.a)), self.b))
        return F.linear(F.relu(F.linear(x, self.c)), self.d)


def test_two_pairs_in_one_module_are_two_layers():
    model, inputs = TwoPairs(), (torch.randn(3, 6),)
    partitioned = TracedPartition(model, inputs)
    assert [layer.params for layer in partitioned.spec.layers if layer.tp] == [("a", "b"), ("c", "d")]
    assert worst_of(partitioned, model, inputs) <= 1e-12


def test_random_numbers_drawn_between_the_layers_keep_a_pair_from_being_sharded():
    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            x = torch.tanh(self.layers[0](x))
            inner, beside = torch.relu(self.layers[1](x)), F.dropout(x, 0.5, self.training)
            return torch.tanh(self.layers[2](inner)) + beside

    model, inputs = Draws(), (torch.randn(6, 6),)
    partitioned = TracedPartition(model, inputs, prefer="pairs")
    assert not [layer for layer in partitioned.spec.layers if layer.tp]
    assert worst_of(partitioned, model, inputs) <= 1e-12


class Wide(nn.Module):
    """A model that passes a value around the pair only on request."""

    def __init__(self, skips):
        super().__init__()
        self.skips = skips
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        first = torch.tanh(self.layers[0](x))
        out = self.layers[2](torch.relu(self.layers[1](first)))
        return self.layers[3](torch.tanh(out + first if self.skips(self, x) else out))


def test_other_layers_in_evaluation_are_refused():
    partitioned = TracedPartition(Wide(lambda model, x: model.training), (torch.randn(3, 6),), prefer="pairs")
    with pytest.raises(
        PlanError, match=r"other layers in evaluation with inputs of the shapes \(3, 6\) than in training with \(3, 6\)"
    ):
        partitioned.segment(0, 1, training=False)


def test_a_model_that_hands_on_other_values_for_a_batch_of_one_is_refused():
    partitioned = TracedPartition(model := Wide(lambda model, x: len(x) > 1), (torch.randn(3, 6),))
    values, found = (torch.randn(1, 6), torch.randn(1, 6)), r"\(1, 6\) the model passes other values between layers"
    with pytest.raises(PlanError, match=found + r" than for \(3, 6\): tanh"):
        partitioned.segment(2, 3, training=True)(values, *clone_tensors(model), seed, ((1, 6),))
