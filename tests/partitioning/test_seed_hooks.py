"""The same masks fall wherever a module runs."""

import torch
from torch import nn

from counterpoint.partitioning.partition import partition_model
from counterpoint.partitioning.seed_hooks import SeedHooks, seeded_modules
from counterpoint.partitioning.sequential import SequentialPartition
from counterpoint.partitioning.tracing.traced import TracedPartition
from tests.partitioning.models import draws_in_forward, gpt, perceptron
from tests.partitioning.segment_runs import clone_tensors, seed, worst_of


def test_root_links_and_layers_that_draw_are_seeded():
    model, _ = gpt(num_layers=1)
    assert seeded_modules(model) == ("", "drop", "blocks.0", "blocks.0.drop1", "blocks.0.drop2")


def test_links_of_a_nested_chain_are_seeded_but_not_what_is_inside_them():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert seeded_modules(nn.Sequential(inner, nn.Linear(2, 2))) == ("", "0.0", "0.1", "1")


def test_each_call_of_one_module_has_a_path_of_its_own():
    model, inputs = draws_in_forward()
    seen: list[str] = []
    seeding = SeedHooks(model, seen.append)
    model(*inputs)
    model(*inputs)
    seeding.remove()
    model(*inputs)
    once = ["", "drop", "layers.0", "drop#1", "layers.1", "drop#2", "layers.2"]
    assert seen == once * 2


def test_the_graph_seeds_only_what_something_is_drawn_from():
    model, inputs = gpt(num_layers=1)
    partitioned = TracedPartition(model, inputs)
    seen: list[str] = []
    partitioned.segment(0, len(partitioned.spec.layers), training=True)(
        partitioned.flatten_inputs(inputs).values, *clone_tensors(model), seen.append
    )
    assert seen == ["drop", "blocks.0.drop1", "blocks.0.drop2"]


def test_no_split_parts_a_draw_from_its_seed():
    model, inputs = draws_in_forward()
    assert [block.name for block in TracedPartition(model, inputs).spec.blocks] == [
        "layers.0",
        "layers.1",
        "layers.2..norm",
    ]


def test_a_model_draws_when_a_forward_in_training_mode_does():
    for granularity in ("whole", "blocks"):
        assert partition_model(*gpt(), granularity=granularity).uses_rng
        assert not partition_model(*gpt(dropout=0.0), granularity=granularity).uses_rng
        assert not partition_model(*perceptron(), granularity=granularity).uses_rng


def test_a_chain_gives_a_layer_that_it_has_twice_two_masks():
    drop = nn.Dropout(0.5)
    model = nn.Sequential(nn.Linear(4, 4), drop, nn.Linear(4, 4), drop, nn.Linear(4, 4))
    inputs = (torch.randn(3, 4),)
    partitioned = partition_model(model, inputs, granularity="blocks")
    seen: list[str] = []
    partitioned.segment(1, 3, training=True)(
        partitioned.segment(0, 1, training=True)(inputs, *clone_tensors(model), seed),
        *clone_tensors(model),
        seen.append,
    )
    assert seen == ["2", "1#1", "4"]
    assert worst_of(partitioned, model, inputs) <= 1e-12


def test_a_chain_with_seeds_attached_is_still_a_chain():
    model, inputs = perceptron()
    before = seeded_modules(model)
    seeding = SeedHooks(model, seed)
    assert isinstance(partition_model(model, inputs, granularity="blocks"), SequentialPartition)
    assert seeded_modules(model) == before
    seeding.remove()
