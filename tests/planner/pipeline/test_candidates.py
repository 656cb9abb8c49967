"""Pipelines with explicit partitions and replicas as plans."""

from dataclasses import replace

import pytest

from counterpoint.model.spec import Block, linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.planner.pipeline.candidates import find_pipeline_plans, rank_graph
from counterpoint.planner.ranking import rank_plans
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.world.cluster import Cluster, Link
from tests.covering import each_value_once
from tests.planner.models import layers
from tests.planner.pipeline.released_optimizer import CASES, case_cluster, read_published

SLOW = Cluster(link=Link(50e-6, 1e8))


def uneven(*costs, width=256):
    """Layers of equal size and unequal work."""
    model = layers(len(costs), width=width)
    pieces = [replace(block.layers[0], cost=cost) for block, cost in zip(model.blocks, costs, strict=True)]
    return replace(model, blocks=tuple(Block((piece,), at) for at, piece in enumerate(pieces)))


def fixed(num_ranks):
    """Two equal stages with each number of replicas, in 1F1B and asynchronous."""
    for first in range(1, num_ranks):
        for schedule in ("one_f_one_b", "pipedream"):
            pipeline = Pipeline(2, schedule, (first, num_ranks - first))
            yield from {Plan((pipeline,), pipeline.usable_microbatches(count)) for count in (2, 4, 8)}


MODELS = {
    "even": layers(6, width=256, cost=1e8),
    "head": uneven(1e8, 1e8, 1e8, 6e8),
    "tail": uneven(6e8, 1e8, 1e7, 1e7, 1e7),
    "wide": uneven(1e6, 1e6, 1e6, 1e6, width=1024),
}


@pytest.mark.long(quick=["wide-3"])
@pytest.mark.parametrize(("model", "num_ranks"), each_value_once([*MODELS], [3, 4, 6]))
def test_they_are_no_slower_than_two_stages_with_any_replicas(model, num_ranks):
    model, size = MODELS[model], 24 * num_ranks
    for is_synchronous in (True, False):
        best = [
            min(
                one.step_s
                for one in rank_plans(plans, model, SLOW, batch_size=size).predictions
                if one.is_synchronous == is_synchronous
            )
            for plans in (find_pipeline_plans(num_ranks, model, SLOW, size), fixed(num_ranks))
        ]
        assert best[0] <= best[1] * (1 + 1e-9 if is_synchronous else 1.01), (
            "the bodies of an asynchronous pipeline may take different times"
        )


def test_all_of_them_can_be_executed():
    model = layers(5, width=64, cost=1e8)
    for num_ranks, size in [(2, 12), (4, 12), (5, 12), (8, 64)]:
        plans = find_pipeline_plans(num_ranks, model, SLOW, size)
        assert {plan.num_ranks for plan in plans} == {num_ranks}
        assert not rank_plans(plans, model, SLOW, batch_size=size).rejected


def test_stages_of_an_async_pipeline_share_no_weights():
    plans = find_pipeline_plans(4, linear_chain(4, width=64, tied=True), SLOW, 8)
    assert not rank_plans(plans, linear_chain(4, width=64, tied=True), SLOW, batch_size=8).rejected


def test_one_rank_and_one_block_have_no_stages():
    assert find_pipeline_plans(1, linear_chain(4), SLOW, 8) == find_pipeline_plans(4, linear_chain(1), SLOW, 8) == ()


@pytest.mark.long
def test_a_graph_is_ranked_with_every_schedule_and_data_and_zero():
    case = next(case for case in CASES if case["model"] == "vgg16" and case["machines"] == [4])
    result = rank_graph(read_published("vgg16"), case_cluster(case), 4, 12)
    plans = [str(one.plan) for one in result.ranking.predictions]
    assert {"data(4)", *(f"zero(4, level={level})" for level in (1, 2, 3))} <= set(plans)
    orders = {one.schedule for plan in result.graphs for one in plan.strategies if isinstance(one, Pipeline)}
    assert orders == {"one_f_one_b", "gpipe", "pipedream", "pipedream_2bw"}
    assert plans[0].startswith("pipeline(2")
    assert "replicas=(3,1)" in plans[0], "as published"


def test_its_balance_counts_layers_in_the_order_that_is_returned():
    result = rank_graph(read_published("resnet18"), Cluster(case_cluster(CASES[-6]).device, Link(1e-5, 3e7)), 2, 4)
    for plan, profile in result.graphs.items():
        for one in plan.strategies:
            assert not isinstance(one, Pipeline) or sum(one.balance) == len(profile.nodes)
