"""Pipelines with the fastest simulated step, compared with the released optimizer and with exhaustive search."""

from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given, settings, strategies as st

from counterpoint.errors import PlanError
from counterpoint.planner.pipeline.candidates import find_pipeline, simulate_layout
from counterpoint.planner.pipeline.graph_models import prefix_cuts
from counterpoint.planner.pipeline.layer_graph import GraphNode, chain_graph
from counterpoint.planner.pipeline.stage_layout import LayoutEstimator, PipelineQuery, StageLayout
from counterpoint.world.cluster import Cluster, Device, Link
from tests.planner.pipeline.released_optimizer import CASES, DEVICE, case_name, query_for, released_layout

FREE = Cluster(DEVICE, Link(0.0, float("inf")))
FLUSHED = 4
"""A synchronous step has so many times the microbatches that the replicas of the reference share at least."""


def cases(max_ranks):
    """All cases, those for more ranks as slow ones."""
    marks = [
        [pytest.mark.slow] if len(case["machines"]) > 1 or max(case["machines"]) > max_ranks else [] for case in CASES
    ]
    return [pytest.param(case, marks=mark, id=case_name(case)) for case, mark in zip(CASES, marks, strict=True)]


def chain_of(*figures):
    """Layers with seconds, activation bytes and weight bytes; a third of the seconds is forward."""
    return chain_graph(
        GraphNode(f"node{at}", "Layer", seconds / 3, seconds * 2 / 3, sent, weights)
        for at, (seconds, sent, weights) in enumerate(figures)
    )


def query(profile, num_ranks, schedule="pipedream", num_microbatches=None, cluster=FREE):
    return PipelineQuery(prefix_cuts(profile), cluster, num_ranks, schedule, num_microbatches)


def every_layout(pipeline):
    """All stages of a chain over all ranks."""
    last = pipeline.cuts.num_cuts - 1
    for count in range(1, min(last, pipeline.num_ranks) + 1):
        inner = combinations(range(1, last), count - 1)
        for cuts, replicas in product(inner, product(range(1, pipeline.num_ranks + 1), repeat=count)):
            if sum(replicas) == pipeline.num_ranks and pipeline.is_allowed(StageLayout((0, *cuts, last), replicas)):
                yield StageLayout((0, *cuts, last), replicas)


@pytest.mark.long(quick=["vgg16-[4]-1e+09"])
@pytest.mark.parametrize("case", cases(max_ranks=8))
def test_the_simulated_step_is_no_slower_than_that_of_the_released_optimizer(case):
    pipeline = query_for(case)
    reference = simulate_layout(pipeline, released_layout(case, pipeline.cuts))
    assert find_pipeline(pipeline).step_s <= reference.step_s + 1e-9


@pytest.mark.long(quick=["resnet18-[4]-1e+10"])
@pytest.mark.parametrize("case", cases(max_ranks=4))
def test_neither_is_it_with_a_flush(case):
    straight = query_for(case)
    shared = straight.step_microbatches(released_layout(case, straight.cuts))
    pipeline = replace(
        straight, schedule="one_f_one_b", num_microbatches=shared * -(-FLUSHED * straight.num_ranks // shared)
    )
    reference = simulate_layout(pipeline, released_layout(case, pipeline.cuts))
    assert find_pipeline(pipeline).step_s <= reference.step_s + 1e-9


figures = st.tuples(st.integers(1, 9).map(float), st.integers(0, 3).map(float), st.integers(0, 9).map(float))
schedules = st.sampled_from([("pipedream", None), ("one_f_one_b", 4), ("gpipe", 2), ("pipedream_2bw", None)])


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(rows=st.lists(figures, min_size=2, max_size=4), num_ranks=st.integers(2, 4), schedule=schedules)
def test_no_stages_of_a_small_model_are_faster(rows, num_ranks, schedule):
    cluster = Cluster(replace(DEVICE, memory_bytes_per_s=1e3), Link(0.0, 4.0))
    schedule_name, micros = schedule
    pipeline = query(chain_of(*rows), num_ranks, schedule_name, micros, cluster)
    best = min(simulate_layout(pipeline, one).step_s for one in every_layout(pipeline))
    assert find_pipeline(pipeline).step_s == pytest.approx(best, rel=1e-9)


def test_a_heavy_layer_with_few_weights_gets_replicas():
    profile = chain_of((6.0, 1.0, 4.0), (2.0, 1.0, 4e6))
    result = find_pipeline(query(profile, 4, cluster=Cluster(DEVICE, Link(0.0, 1e5))))
    assert result.layout == StageLayout((0, 1, 2), (3, 1))
    assert result.step_s == pytest.approx(2.0, rel=1e-3)


def test_what_does_not_fit_gives_way_to_what_does():
    profile = chain_of(*[(1.0, 1e3, 4e6)] * 4)
    free = find_pipeline(query(profile, 4, "one_f_one_b", 4))
    small = replace(FREE, device=replace(DEVICE, memory_bytes=free.memory_bytes // 2))
    result = find_pipeline(query(profile, 4, "one_f_one_b", 4, small))
    assert free.layout.num_stages == 1
    assert result.layout.num_stages > 1
    assert result.missing_bytes == 0


def test_where_nothing_fits_what_misses_least_is_found():
    profile = chain_of(*[(1.0, 1e3, 4e6)] * 4)
    none = replace(FREE, device=replace(DEVICE, memory_bytes=1))
    pipeline = query(profile, 4, "one_f_one_b", 4, none)
    least = min(simulate_layout(pipeline, one).missing_bytes for one in every_layout(pipeline))
    assert find_pipeline(pipeline).missing_bytes == least


def test_replicas_share_the_microbatches_there_are():
    profile = chain_of((6.0, 0.0, 0.0), (2.0, 0.0, 0.0))
    assert find_pipeline(query(profile, 4, "one_f_one_b", 8)).layout.replicas in {(2, 2), (4,)}
    with pytest.raises(PlanError, match="no numbers of replicas on 3 ranks can share 1 microbatches"):
        find_pipeline(query(chain_of((1.0, 0.0, 0.0)), 3, "one_f_one_b", 1))


@pytest.mark.parametrize(("stages", "micros"), [(2, 4), (4, 8), (4, 4)])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "gpipe"])
def test_the_estimate_of_equal_stages_is_what_is_simulated(schedule, stages, micros):
    pipeline = query(chain_of(*[(1.0, 0.0, 0.0)] * stages), stages, schedule, micros)
    staging = StageLayout(tuple(range(stages + 1)), (1,) * stages)
    assert LayoutEstimator(pipeline).estimate(staging).seconds == pytest.approx((micros + stages - 1) / micros)
    assert simulate_layout(pipeline, staging).step_s == pytest.approx((micros + stages - 1) / micros)


def test_an_async_pipeline_waits_for_its_links():
    """Two microbatches are in flight, and each takes 6 s: 1 s on either stage, 2 s there and 2 s back."""
    pipeline = query(chain_of((1.0, 2.0, 0.0), (1.0, 0.0, 0.0)), 2, cluster=Cluster(DEVICE, Link(0.0, 1.0)))
    staging = StageLayout((0, 1, 2), (1, 1))
    assert LayoutEstimator(pipeline).estimate(staging).seconds == pytest.approx(3.0)
    assert simulate_layout(pipeline, staging).step_s == pytest.approx(3.0)


def test_a_device_of_another_speed_changes_no_measured_seconds():
    fast = Cluster(Device(cost_per_s=1e12, memory_bytes=2**50), FREE.link)
    pipeline = query(chain_of((1.0, 0.0, 0.0), (3.0, 0.0, 0.0)), 2, cluster=fast)
    assert simulate_layout(pipeline, StageLayout((0, 1, 2), (1, 1))).step_s == pytest.approx(3.0)
