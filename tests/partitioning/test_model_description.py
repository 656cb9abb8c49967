"""The model description that strategies read: blocks, their work, and what a cut would send."""

import copy
from typing import cast

import pytest
import torch
from torch import nn

from counterpoint.partitioning.partition import partition_model
from counterpoint.partitioning.tracing.traced import TracedPartition
from counterpoint.partitioning.whole_model import WholeModel
from tests.partitioning.models import cnn, gpt, perceptron, recurrent


def test_blocks_are_the_children_of_the_chain_and_what_is_around_it():
    spec = TracedPartition(*gpt(num_layers=2)).spec
    assert [block.name.split(".norm1")[0] for block in spec.blocks] == [
        "tok..pos",
        "blocks.0",
        "blocks.1",
        "norm..head",
    ]


def test_without_a_chain_the_blocks_are_the_children_of_the_model():
    assert [block.name for block in TracedPartition(*recurrent()).spec.blocks] == ["table", "lstm", "head"]


def test_children_without_parameters_belong_to_the_block_before():
    assert [block.name for block in partition_model(*cnn(), granularity="blocks").spec.blocks] == [
        "0",
        "1",
        "3",
        "4",
        "8",
    ]


@pytest.mark.parametrize("make", [cnn, perceptron])
def test_a_chain_is_described_equally_whether_it_is_traced_or_not(make):
    model, inputs = make()
    eager, traced = partition_model(model, inputs, granularity="blocks").spec, TracedPartition(model, inputs).spec
    assert [(p.name, p.params, p.output_bytes) for p in eager.layers] == [
        (p.name, p.params, p.output_bytes) for p in traced.layers
    ]
    assert [layer.cost for layer in eager.layers] == pytest.approx([layer.cost for layer in traced.layers])


def test_a_layer_costs_two_operations_per_weight_and_sends_its_output():
    first, *_ = partition_model(
        nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), (torch.randn(6, 8),), granularity="blocks"
    ).spec.layers
    assert (first.cost, first.output_bytes) == (2 * 8 * 16, 8 * 16)


def test_a_convolution_costs_two_operations_per_weight_and_place():
    assert partition_model(*cnn(), granularity="blocks").spec.layers[0].cost == 2 * 9 * 4 * 64


def test_attention_counts_its_two_products_and_its_projections():
    model, inputs = gpt(num_layers=1)
    attention = next(
        layer for layer in TracedPartition(model, inputs).spec.layers if layer.tp and layer.tp.dim == "heads"
    )
    assert attention.cost == pytest.approx(8 * 4 * 2 * 16 * 16 + 2 * 2 * 8 * 8 * 16, rel=0.03)


def test_a_model_with_its_chain_inside_a_wrapper_is_split_at_that_chain():
    inner, inputs = gpt(num_layers=2)
    wrapper = nn.Sequential(inner, nn.Linear(11, 3))
    assert TracedPartition(wrapper, inputs).spec.num_blocks == 4


def test_parameters_are_listed_once_in_the_order_of_the_model():
    model, inputs = gpt()
    assert [param.name for param in TracedPartition(model, inputs).spec.params] == [
        n for n, _ in model.named_parameters()
    ]


class Averaged(nn.Module):
    """Draws, replaces a buffer, keeps what it has computed, and returns a dict; the runs of all copies are counted."""

    num_runs = 0
    mean: torch.Tensor

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        Averaged.num_runs += 1
        hidden = nn.functional.dropout(self.layer(x), 0.5)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        self.last = hidden
        return {"hidden": hidden, "name": "averaged"}


def test_a_copy_of_a_whole_model_is_described_as_a_run_of_it_would_and_is_not_run():
    inputs = (torch.ones(4, 3),)
    whole = cast("WholeModel", partition_model(model := Averaged(), inputs, granularity="whole"))
    num_runs = Averaged.num_runs
    copied = whole.of_copy(copy.deepcopy(model))
    assert Averaged.num_runs == num_runs
    by_itself = cast("WholeModel", partition_model(copy.deepcopy(model), inputs, granularity="whole"))
    assert Averaged.num_runs == num_runs + 1
    assert copied.example == by_itself.example
    assert copied.example.replaced_buffers == {"mean"}
    assert copied.example.kept_attributes == ("last",)
    assert (copied.spec, copied.uses_rng) == (by_itself.spec, True)
    (hidden,) = copied.segment(0, 1, training=True)(inputs, {}, {}, lambda path: None, ())
    assert copied.unflatten_output([hidden]) == {"hidden": hidden, "name": "averaged"}
    assert torch.equal(cast("Averaged", copied.model).mean, 0.1 * hidden.detach().mean(0))
    assert not model.mean.any()
