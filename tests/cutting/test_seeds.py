"""The same masks fall wherever a module runs."""

import torch
from torch import nn

from counterpoint.cutting.chain import ChainCut
from counterpoint.cutting.choose import cut_model
from counterpoint.cutting.graph import GraphCut
from counterpoint.cutting.seeds import attach_seeds, seeded_modules
from tests.cutting.models import draws_in_forward, gpt, perceptron
from tests.cutting.same import owned, seed, worst_of


def test_root_links_and_layers_that_draw_are_seeded():
    model, _ = gpt(num_layers=1)
    assert seeded_modules(model) == ("", "drop", "blocks.0", "blocks.0.drop1", "blocks.0.drop2")


def test_links_of_a_nested_chain_are_seeded_but_not_what_is_inside_them():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert seeded_modules(nn.Sequential(inner, nn.Linear(2, 2))) == ("", "0.0", "0.1", "1")


def test_each_call_of_one_module_has_a_path_of_its_own():
    model, inputs = draws_in_forward()
    seen: list[str] = []
    seeding = attach_seeds(model, seen.append)
    model(*inputs)
    model(*inputs)
    seeding.remove()
    model(*inputs)
    once = ["", "drop", "layers.0", "drop#1", "layers.1", "drop#2", "layers.2"]
    assert seen == once * 2


def test_the_graph_seeds_only_what_something_is_drawn_from():
    model, inputs = gpt(num_layers=1)
    cut = GraphCut(model, inputs)
    seen: list[str] = []
    cut.segment(0, len(cut.spec.pieces), training=True)(cut.flatten_inputs(inputs), *owned(model), seen.append)
    assert seen == ["drop", "blocks.0.drop1", "blocks.0.drop2"]


def test_no_cut_parts_a_draw_from_its_seed():
    model, inputs = draws_in_forward()
    assert [block.name for block in GraphCut(model, inputs).spec.blocks] == ["layers.0", "layers.1", "layers.2..norm"]


def test_a_model_draws_when_a_forward_in_training_mode_does():
    for need in ("none", "chain"):
        assert cut_model(*gpt(), need=need).draws
        assert not cut_model(*gpt(dropout=0.0), need=need).draws
        assert not cut_model(*perceptron(), need=need).draws


def test_a_chain_gives_a_layer_that_it_has_twice_two_masks():
    drop = nn.Dropout(0.5)
    model = nn.Sequential(nn.Linear(4, 4), drop, nn.Linear(4, 4), drop, nn.Linear(4, 4))
    inputs = (torch.randn(3, 4),)
    cut = cut_model(model, inputs, need="chain")
    seen: list[str] = []
    cut.segment(1, 3, training=True)(
        cut.segment(0, 1, training=True)(inputs, *owned(model), seed), *owned(model), seen.append
    )
    assert seen == ["2", "1#1", "4"]
    assert worst_of(cut, model, inputs) <= 1e-12


def test_a_chain_with_seeds_attached_is_still_a_chain():
    model, inputs = perceptron()
    before = seeded_modules(model)
    seeding = attach_seeds(model, seed)
    assert isinstance(cut_model(model, inputs, need="chain"), ChainCut)
    assert seeded_modules(model) == before
    seeding.remove()
