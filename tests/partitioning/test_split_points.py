"""Models cut at the modules that users name: before modules of chains, of graphs, and in the middle of a block."""

import pytest
import torch
from torch import nn

from counterpoint.errors import PlanError
from counterpoint.partitioning.partition import partition_model
from counterpoint.partitioning.sequential import SequentialPartition
from tests.partitioning.models import gpt
from tests.partitioning.segment_runs import clone_tensors, forward


def sequential():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), inner, nn.Linear(4, 4)), (torch.randn(3, 4),)


def by_layers(partitioned, model, values):
    *_, (_, _, gave) = forward(
        partitioned, range(len(partitioned.spec.layers) + 1), values, *clone_tensors(model), training=True
    )
    return gave[0]


def starts(partitioned):
    return [block.layers[0].modules_started for block in partitioned.spec.blocks]


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        ((), [("0",), ("2", "2.0"), ("3",)]),
        (("1",), [("0",), ("1",), ("3",)]),
        (("2",), [("0",), ("2", "2.0"), ("3",)]),
        (("2.1",), [("0",), ("2", "2.0"), ("2.1",)]),
        (("1", "2.1"), [("0",), ("1",), ("2.1",)]),
    ],
)
def test_a_chain_is_split_before_any_child_that_is_named(cuts, expected):
    partitioned = partition_model(*sequential(), granularity="blocks", split_points=cuts)
    assert isinstance(partitioned, SequentialPartition)
    assert starts(partitioned) == expected


def test_a_graph_is_split_inside_a_block_where_a_module_is_named():
    model, inputs = gpt()
    partitioned = partition_model(model, inputs, granularity="blocks", split_points=("blocks.0.mlp", "head"))
    assert [names[0] for names in starts(partitioned)] == [
        "tok",
        "blocks.0",
        "blocks.0.mlp",
        "blocks.1",
        "norm",
        "head",
    ]


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


@pytest.mark.parametrize("granularity", ["blocks", "tensor_parallel"])
def test_a_child_of_a_sequential_is_opened_for_a_split_inside_it(granularity):
    model, inputs = nn.Sequential(Wide(), Wide()), (torch.randn(3, 4),)
    partitioned = partition_model(model, inputs, granularity=granularity, split_points=("1.act",))
    assert ("1.act",) in starts(partitioned)
    assert torch.equal(by_layers(partitioned, model, inputs), model(*inputs))


def test_every_layer_of_a_split_model_gives_the_output_of_the_whole():
    model, (x,) = gpt(dropout=0.0)
    partitioned = partition_model(
        model, (x,), granularity="blocks", split_points=("blocks.0.drop1", "blocks.1.attention.proj")
    )
    assert torch.allclose(by_layers(partitioned, model, (x,)), model(x))


class Passing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mark, self.last = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)

    def forward(self, x):
        x = self.mark(self.first(x))
        return self.last(x.relu_() + 0 * self.first(x))


@pytest.mark.parametrize(
    ("partitioned", "message"),
    [
        ("frist", "split_points names 'frist', but Passing has no such module; did you mean 'first'"),
        ("mark", "split_points names 'mark', which runs no operation of its own"),
    ],
)
def test_an_impossible_split_point_is_named(partitioned, message):
    with pytest.raises(PlanError) as caught:
        partition_model(Passing(), (torch.randn(3, 4),), granularity="blocks", split_points=(partitioned,))
    assert message in str(caught.value)
