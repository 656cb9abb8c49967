"""The model description that strategies read: blocks, their work, and what a cut would send."""

import pytest
import torch
from torch import nn

from counterpoint.partitioning.partition import partition_model
from counterpoint.partitioning.traced import TracedPartition
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
