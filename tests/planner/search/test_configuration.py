"""Configurations of a search and their plans."""

from dataclasses import replace

import pytest

from counterpoint.model.spec import linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.planner.search.configuration import SearchConfiguration, recompute_pass
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.recomputation import Recomputation
from counterpoint.strategies.tensor import Tensor
from tests.planner.search.spaces import MODELS, transformer

PLANS = [
    "solo", "data(4)", "zero(2, level=3) * data(2)", "tensor(2, dims=heads) * pipeline(2, schedule=gpipe) * data(2)",
    "pipeline(3, balance=(3,1,4))", "pipeline(2, replicas=(3,1))", "pipeline(2, schedule=zero_bubble, chunks_per_stage=2)",
    "pipeline(2, recompute=always) * zero(2, level=1)", "data(4, compress=fp16)",
]  # fmt: skip


@pytest.mark.parametrize("text", PLANS)
def test_a_plan_is_the_configuration_that_it_came_from(text):
    plan = Plan.parse(text, num_microbatches=6)
    result = SearchConfiguration.from_plan(plan, MODELS["layers"])
    assert result is not None
    assert result.plan(MODELS["layers"]) == plan


@pytest.mark.parametrize("text", ["server(3)", "pipedream(2)", "data(2) * zero(2)", "data(2) * data(2)"])
def test_a_plan_with_other_parts_is_none(text):
    assert SearchConfiguration.from_plan(Plan.parse(text), MODELS["layers"]) is None


def test_recomputed_blocks_are_named_and_found_again():
    model = transformer(3)
    for blocks in ({1}, {0, 2}, {1, 3, 4}, {0, 1, 2, 3, 4}):
        plan = SearchConfiguration(recomputed=frozenset(blocks)).plan(model)
        assert plan.recomputation is not None
        assert plan.recomputation.select_blocks(model) == blocks
        again = SearchConfiguration.from_plan(plan, model)
        assert again is not None
        assert again.recomputed == blocks


def test_a_block_is_named_by_the_module_that_it_is():
    assert recompute_pass(transformer(3), frozenset({1, 3})) == "recompute:layers.0+layers.2"


def test_names_with_signs_of_patterns_match_themselves_alone():
    model = linear_chain(3)
    odd = replace(model.blocks[1].layers[0], name="a[0]*")
    model = replace(model, blocks=(model.blocks[0], replace(model.blocks[1], layers=(odd,)), model.blocks[2]))
    name = recompute_pass(model, frozenset({1}))
    assert Recomputation.from_pass(name).select_blocks(model) == {1}


def test_other_tensor_parallelism_keeps_the_starts_of_stages():
    model = transformer(3)
    sliced = SearchConfiguration(tensor=Tensor(2), pipeline=Pipeline(2, balance=(3, 5)))
    assert [block.first_layer for block in Tensor(2).split_model(model).blocks][3] == 3
    whole = sliced.with_tensor(Tensor(1), model)
    assert whole.pipeline.balance == (2, 3)
    assert whole.with_tensor(Tensor(2), model) == sliced
