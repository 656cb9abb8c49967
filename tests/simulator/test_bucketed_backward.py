"""An unpartitioned model: reductions of its gradients start during its backward, bucket by bucket, as in a run."""

from dataclasses import replace
from fractions import Fraction

import pytest

from counterpoint.compiler.compile import compile as compile_plan
from counterpoint.plan.plan import Plan
from counterpoint.planner.plan_simulation import build_costs
from counterpoint.planner.prepare import as_single_block
from counterpoint.planner.ranking import predict_plan, predict_trace
from counterpoint.program.text import format_instruction
from counterpoint.simulator.bucketed_backward import BackwardSlice, slice_backward
from counterpoint.simulator.simulate import simulate_breakdown
from counterpoint.strategies.buckets import BucketConfig
from counterpoint.world.cluster import Cluster, Device, Level, Link
from tests.model.profiles import build_profile, layer_profile
from tests.planner.models import layers

MODEL = layers(4, width=16, cost=1.0)
LAYER_BYTES = 4 * 16 * 16
DEVICE = Device(cost_per_s=1.0, memory_bytes_per_s=float("inf"))
"""A forward of a layer takes a second for a sample, a backward two, an update none."""


def place(sum_s, **link):
    """A cluster on which two ranks all-reduce the gradient of one layer in so many seconds."""
    return Cluster(DEVICE, Link(0.0, LAYER_BYTES / sum_s if sum_s else float("inf"), **link))


def step_s(text, cluster, passes=("overlap",), micros=1, profile=None):
    plan = replace(Plan.parse(text, num_microbatches=micros), passes=passes)
    return predict_plan(plan, MODEL, cluster, batch_size=plan.global_num_microbatches, profile=profile).step_s


@pytest.mark.parametrize(("sum_s", "expected"), [(0.5, 12.5), (2.0, 14.0), (3.0, 18.0)])
def test_only_the_last_all_reduce_is_exposed_unless_the_link_is_saturated(sum_s, expected):
    """Four forwards and four backwards of one sample are 12 seconds; the first all-reduce starts after six."""
    assert step_s("data(2, bucket=0)", place(sum_s)) == pytest.approx(expected)
    assert step_s("data(2, bucket=0)", place(sum_s), passes=()) == pytest.approx(12 + 4 * sum_s)


@pytest.mark.parametrize("text", ["data(2, bucket=0)", "data(4, bucket=0)", "zero(2, level=1)"])
@pytest.mark.parametrize("micros", [1, 3])
def test_a_model_in_one_block_takes_as_long_as_in_its_layers(text, micros):
    plan = replace(Plan.parse(text, num_microbatches=micros), passes=("overlap",))
    compiled = compile_plan(plan, MODEL)
    costs = build_costs((place(1.5),), MODEL, samples=1, global_num_microbatches=plan.global_num_microbatches)
    (spent,) = simulate_breakdown(compiled.step_variants[-1], costs)
    result = predict_plan(plan, MODEL, place(1.5), batch_size=plan.global_num_microbatches)
    if "zero" not in text:  # whose buckets are larger than such a model
        assert result.step_s == pytest.approx(spent.step_s)
    assert result.update_s == pytest.approx(spent.update_s)


def test_a_single_bucket_is_all_reduced_after_the_backward():
    assert step_s("data(2, tune=off)", place(1.5)) == step_s("data(2)", place(1.5), passes=()) == pytest.approx(18.0)


def test_reductions_in_shared_memory_do_not_overlap_the_backward():
    hosts = Cluster(
        DEVICE, levels=(Level("host", 2, Link(0.0, 1e3, is_shared_memory=True)), Level("network", 2, Link()))
    )
    for cluster in (place(0.5, is_shared_memory=True), hosts):
        text = "data(2, bucket=0)" if not cluster.levels else "data(4, bucket=0)"
        assert step_s(text, cluster, micros=2) == pytest.approx(step_s(text, cluster, passes=(), micros=2))


def test_a_profile_determines_when_each_bucket_is_complete():
    profile = build_profile(
        MODEL,
        [layer_profile(1.0, 6.0), layer_profile(1.0, 1.0), layer_profile(1.0, 1.0), layer_profile(1.0, 0.0)],
        samples=1,
    )
    assert step_s("data(2, bucket=0)", place(2.0), profile=profile) == pytest.approx(4 + 8 + 2)


def test_a_weight_of_several_layers_is_complete_with_the_first_of_them():
    pieces = MODEL.layers
    tied = replace(
        MODEL, blocks=(replace(as_single_block(MODEL).blocks[0], layers=(pieces[0], *pieces[1:3], pieces[0])),)
    )
    assert slice_backward(tied, [1.0, 2.0, 1.0, 4.0], BucketConfig(0)) == (
        BackwardSlice(5 / 8, Fraction(1, 3)), BackwardSlice(2 / 8, Fraction(1, 3)), BackwardSlice(1 / 8, Fraction(1, 3))
    )  # fmt: skip


def test_a_trace_has_the_instructions_of_the_program_and_not_their_slices():
    plan = replace(Plan.parse("data(2, bucket=0)", num_microbatches=2), passes=("overlap",))
    (variant,) = compile_plan(plan, as_single_block(MODEL)).step_variants
    trace = predict_trace(plan, MODEL, place(1.0), batch_size=4)
    for event in trace.events:
        assert event.text == format_instruction(variant.program.rank_programs[event.rank].body[event.index])
    assert trace.step_s == predict_plan(plan, MODEL, place(1.0), batch_size=4).step_s
