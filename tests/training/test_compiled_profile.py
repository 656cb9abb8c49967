"""Profiles of compiled models: their times beside those of eager ones, and when compiling has paid."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from counterpoint.model.compilation import parse_compilation
from counterpoint.model.model_profile import CompiledTimes, Overheads, format_profile, parse_profile
from counterpoint.planner.choice_report import explain_choice
from counterpoint.planner.choose import rank_and_choose
from counterpoint.planner.memory_suggestions import PlanningProblem
from counterpoint.planner.ranking import predict_plan, rank_plans
from counterpoint.world.cluster import Cluster
from tests.model.profiles import build_profile, layer_profile
from tests.planner.models import layers
from tests.training.compile_backend import reset_counter

MODEL = layers(4)


def eager_profile():
    return build_profile(MODEL, [layer_profile(1.0, 2.0)] * 4)


def compiled_profile(factor=0.5, compile_s=60.0):
    """Return a profile whose compiled model takes another share of the time."""
    profile = eager_profile()
    sizes = tuple(one.scale_seconds(factor) for one in profile.batch_sizes)
    return replace(profile, compiled=CompiledTimes("segments", compile_s, sizes, Overheads()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parts", ["segments", "blocks"])
def test_a_compiled_model_is_measured_beside_the_eager_one(parts):
    counter = reset_counter()
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    inputs, targets, compilation = torch.randn(4, 4), torch.randint(2, (4,)), f"{parts}(backend=counting)"
    for _ in range(2):  # the hooks of the first one are not compiled with the second one's model
        profile = cp.profile(model, inputs, targets, loss=F.cross_entropy, microbatch_sizes=(4,), compile=compilation)
    assert counter.num_calls
    assert profile.compiled is not None
    assert profile.compiled.compilation == compilation
    assert profile.compiled.compile_s > 0
    assert profile.for_compilation(compilation).batch_sizes == profile.compiled.batch_sizes != profile.batch_sizes
    assert parse_profile(format_profile(profile)) == profile
    reset_counter()


def test_a_profile_without_compiled_times_can_still_be_read():
    text = format_profile(eager_profile()).replace('"compiled": null', '"other": null')
    assert parse_profile(text) == eager_profile()


def test_plans_that_compile_are_predicted_by_compiled_times():
    eager = cp.Plan.parse("data(2)", num_microbatches=2)
    plans = [eager, replace(eager, compile=parse_compilation("segments"))]
    ranked = rank_plans(plans, MODEL, Cluster(), batch_size=16, profile=compiled_profile())
    for predicted in (
        {one.plan.compile: one.compute_s for one in ranked.predictions},
        {
            plan.compile: predict_plan(plan, MODEL, Cluster(), batch_size=16, profile=compiled_profile()).compute_s
            for plan in plans
        },
    ):
        assert predicted[plans[1].compile] == pytest.approx(0.5 * predicted[None], rel=0.01)


def test_a_plan_that_compiles_otherwise_is_predicted_by_eager_times():
    profile = compiled_profile()
    assert profile.for_compilation("blocks") is profile
    assert profile.for_compilation(None) is profile


def test_the_compile_time_is_paid_back_by_what_each_microbatch_saves():
    profile = compiled_profile(0.5, 60.0)
    samples = profile.batch_sizes[0].samples
    saved = 0.5 * profile.batch_sizes[0].unpartitioned.seconds + sum(
        (profile.overheads.forward_s, profile.overheads.backward_s)
    )
    assert profile.microbatches_to_repay(samples) == math.ceil(60.0 / saved)
    assert math.isinf(compiled_profile(1.5).microbatches_to_repay(samples))
    assert math.isinf(eager_profile().microbatches_to_repay(samples))


def test_the_report_of_a_choice_says_when_compiling_has_paid():
    plans = [cp.Plan.parse("data(2)", num_microbatches=2)]

    def last_line(profile):
        return explain_choice(rank_and_choose(plans, PlanningProblem(MODEL, Cluster(), 16, profile)))[-1]

    assert last_line(compiled_profile()).startswith("compile=segments: forward and backward of 4 samples take ")
    assert " of compiling are paid back after " in last_line(compiled_profile())
    assert last_line(compiled_profile(1.5)).endswith(", so compiling never pays")
    assert "compile" not in last_line(eager_profile())


def test_scaling_a_profile_scales_compiled_times():
    scaled = compiled_profile().scale(2.0)
    assert scaled.compiled.compile_s == 120.0
    assert scaled.compiled.batch_sizes == tuple(
        one.scale_seconds(2.0) for one in compiled_profile().compiled.batch_sizes
    )
