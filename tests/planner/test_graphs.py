"""Profiles as models: their layers in an order that fits the cuts, with the figures that they had."""

import pytest
from hypothesis import given, settings

from counterpoint.compiler.compile import compile, sizes_in  # noqa: A004 - read as cp.compile
from counterpoint.model.spec import chain
from counterpoint.plan import Plan
from counterpoint.planner.graphs import joined, linear, model_of, prefixes, profile_of
from counterpoint.planner.rank import predict
from counterpoint.planner.states import find_states
from counterpoint.simulator.costs import model_costs
from counterpoint.simulator.simulate import simulate
from counterpoint.world.cluster import Cluster, Link
from tests.planner.released import DEVICE, read
from tests.planner.test_partition import graphs

FREE = Cluster(DEVICE, Link(0.0, 1e9))


@settings(max_examples=60, deadline=None)
@given(profile=graphs())
def test_layers_stand_behind_what_they_read(profile):
    states = find_states(profile)
    row = [layer.name for layer in linear(states, (states.count - 1,)).layers]
    assert sorted(row) == sorted(layer.name for layer in profile.layers)
    assert all(row.index(one) < row.index(other) for one, other in profile.edges)


def test_a_cut_through_branches_is_between_neighbours():
    states = find_states(read("resnet18").without_inputs())
    for cut in range(1, states.count - 1):
        row = linear(states, (cut, states.count - 1)).layers
        assert {layer.name for layer in row[: states.held[cut].bit_count()]} == set(states.names(cut))


@pytest.mark.parametrize("model", ["vgg16", "gnmt"])
def test_alone_a_model_takes_the_seconds_of_its_profile(model):
    profile = linear(states := find_states(read(model).without_inputs()), (states.count - 1,))
    spec = model_of(profile, FREE)
    found = predict(Plan(), spec, FREE, batch_size=1)
    assert found.compute_s == pytest.approx(sum(layer.seconds for layer in profile.layers), rel=1e-9)
    assert sum(param.num_bytes for param in spec.params) == sum(layer.weight_bytes for layer in profile.layers)


def test_stages_as_one_block_each_take_as_long():
    profile = linear(states := find_states(read("vgg16").without_inputs()), (states.count - 1,))
    fine, counts = model_of(profile, FREE), (20, 20)
    plans = [Plan.parse(f"pipeline(2, balance={balance})", num_microbatches=4) for balance in ("(20,20)", "(1,1)")]
    steps = []
    for plan, model in zip(plans, (fine, joined(fine, counts)), strict=True):
        compiled = compile(plan, model, proves=False)
        costs = model_costs(model, FREE, sizes_in(model, 1))
        steps.append(simulate(compiled.program, costs).step_s)
    assert steps[0] == pytest.approx(steps[1], rel=1e-9)


def test_a_model_is_a_profile_of_one_microbatch():
    model = chain(3, width=8)
    profile = profile_of(model, Cluster(DEVICE), samples=5)
    assert [layer.seconds for layer in profile.layers] == [15.0] * 3, "a backward counts twice"
    states = prefixes(profile)
    assert list(states.crossing_bytes) == [0, 5 * 32, 5 * 32, 0]
    assert list(states.weight_bytes) == [0, 256, 512, 768]
