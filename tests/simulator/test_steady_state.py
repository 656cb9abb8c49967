"""A step of an asynchronous pipeline is what it adds to a run, which is less than the duration of one body."""

import pytest

from counterpoint.plan.plan import Plan
from counterpoint.planner.ranking import predict_plan, predict_trace
from counterpoint.program.trace import Trace
from counterpoint.simulator.simulate import (
    find_representatives,
    run_rank_programs,
    simulate_breakdown,
    simulate_variant,
)
from counterpoint.world.cluster import Cluster, Link
from tests.planner.models import layers
from tests.simulator.programs import FakeCosts, compile_text

ASYNC_PIPELINES = ["pipedream(2)", "pipedream(4)", "pipedream(2, replicas=(2,1))", "pipedream_2bw(3)"]


def run_s(variant, costs, times):
    """Duration of a run of so many bodies."""
    rows = variant.async_pipeline.unroll(times)
    _, clock = run_rank_programs(rows, find_representatives(variant.async_pipeline, rows), costs)
    return max(stop for spans in clock.intervals.values() for _, _, stop, _ in spans)


@pytest.mark.long(quick=["pipedream(2)-2.0"])
@pytest.mark.parametrize("link_s", [0.0, 0.5, 2.0, 7.0])
@pytest.mark.parametrize("text", ASYNC_PIPELINES)
def test_a_step_of_an_async_pipeline_is_what_it_adds_to_a_long_run(text, link_s):
    (variant,), costs = (
        compile_text(text, m=6 if "2bw" in text else 2 if "replicas" in text else 1).step_variants,
        FakeCosts(link_s=link_s),
    )
    added_s = (run_s(variant, costs, 84) - run_s(variant, costs, 24)) / 60
    (breakdown,) = simulate_breakdown(variant, [costs])
    assert breakdown.step_s == pytest.approx(added_s, rel=0.02)
    assert simulate_variant(variant, costs).step_s == breakdown.step_s


def test_a_trace_of_an_async_pipeline_has_the_duration_of_a_step():
    (variant,) = compile_text("pipedream(2)", m=1).step_variants
    trace = simulate_variant(variant, FakeCosts(link_s=2.0))
    assert trace.steady_step_s is not None
    assert Trace.from_json(trace.to_json()) == trace


def test_the_predicted_step_of_an_async_pipeline_is_shorter_than_its_longest_body():
    plan, model, cluster = Plan.parse("pipedream(4)"), layers(4, width=256, cost=1e9), Cluster(link=Link(1e-3, 1e5))
    result = predict_plan(plan, model, cluster, batch_size=16)
    body = predict_trace(plan, model, cluster, batch_size=16)
    assert result.step_s == body.step_s < body.span_s
    parts = (result.compute_s, result.communication_s, result.idle_s, result.update_s)
    assert sum(parts) == pytest.approx(result.step_s)
