"""Layer graphs as models: layers in an order that fits the cuts, with their times and sizes."""

import pytest
from hypothesis import given, settings

from counterpoint.compiler.compile import compile, message_size_fn  # noqa: A004 - read as cp.compile
from counterpoint.model.spec import linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.planner.pipeline.graph_models import (
    graph_from_model,
    linearize,
    merge_blocks,
    model_from_graph,
    prefix_cuts,
)
from counterpoint.planner.pipeline.layer_graph import find_cuts
from counterpoint.planner.ranking import predict_plan
from counterpoint.simulator.cost_model import analytic_costs
from counterpoint.simulator.simulate import simulate
from counterpoint.world.cluster import Cluster, Link
from tests.planner.pipeline.released_optimizer import DEVICE, read_published
from tests.planner.pipeline.test_partition import graphs

FREE = Cluster(DEVICE, Link(0.0, 1e9))


@settings(max_examples=60, deadline=None)
@given(profile=graphs())
def test_layers_follow_their_inputs(profile):
    states = find_cuts(profile)
    row = [layer.name for layer in linearize(states, (states.num_cuts - 1,)).nodes]
    assert sorted(row) == sorted(layer.name for layer in profile.nodes)
    assert all(row.index(one) < row.index(other) for one, other in profile.edges)


def test_a_cut_through_branches_is_between_neighbours():
    states = find_cuts(read_published("resnet18").without_inputs())
    for cut in range(1, states.num_cuts - 1):
        row = linearize(states, (cut, states.num_cuts - 1)).nodes
        assert {layer.name for layer in row[: states.layer_sets[cut].bit_count()]} == set(states.layer_names(cut))


@pytest.mark.parametrize("model", ["vgg16", "gnmt"])
def test_a_model_takes_the_seconds_of_its_graph(model):
    profile = linearize(states := find_cuts(read_published(model).without_inputs()), (states.num_cuts - 1,))
    spec = model_from_graph(profile, FREE)
    result = predict_plan(Plan(), spec, FREE, batch_size=1)
    assert result.compute_s == pytest.approx(sum(layer.seconds for layer in profile.nodes), rel=1e-9)
    assert sum(param.num_bytes for param in spec.params) == sum(layer.weight_bytes for layer in profile.nodes)


def test_stages_as_one_block_each_take_as_long():
    profile = linearize(states := find_cuts(read_published("vgg16").without_inputs()), (states.num_cuts - 1,))
    fine, counts = model_from_graph(profile, FREE), (20, 20)
    plans = [Plan.parse(f"pipeline(2, balance={balance})", num_microbatches=4) for balance in ("(20,20)", "(1,1)")]
    steps = []
    for plan, model in zip(plans, (fine, merge_blocks(fine, counts)), strict=True):
        compiled = compile(plan, model, verified=False)
        costs = analytic_costs(model, FREE, message_size_fn(model, 1))
        steps.append(simulate(compiled.program, costs).step_s)
    assert steps[0] == pytest.approx(steps[1], rel=1e-9)


def test_a_model_becomes_a_graph_of_one_microbatch():
    model = linear_chain(3, width=8)
    profile = graph_from_model(model, Cluster(DEVICE), samples=5)
    assert [layer.seconds for layer in profile.nodes] == [15.0] * 3, "a backward counts twice"
    states = prefix_cuts(profile)
    assert list(states.crossing_bytes) == [0, 5 * 32, 5 * 32, 0]
    assert list(states.weight_bytes) == [0, 256, 512, 768]
