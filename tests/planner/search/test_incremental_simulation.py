"""Incremental simulation equals a full one to the last bit, in less than a third of the time."""

import sys
import time
from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from counterpoint.errors import PlanError
from counterpoint.model.model_profile import Overheads
from counterpoint.plan.plan import Plan
from counterpoint.planner.incremental_simulator import IncrementalSimulator
from counterpoint.planner.plan_simulation import summarize_step
from counterpoint.planner.ranking import predict_plan
from counterpoint.planner.search.proposals import SearchSpace
from tests.model.profiles import build_profile, layer_profile
from tests.planner.search.spaces import COPIES, FLAT, HOSTS, MODELS, random_plans

BATCH = 48
OPTIONS = ("reshard_after_forward=off", "persistence_threshold=4096", "min_num_params=9000")


def timed(count, plan):
    """The result or the error, and the seconds."""
    began = time.process_time()
    try:
        result = count(plan)
    except PlanError as error:
        result = str(error)
    return result, time.process_time() - began


def compared(space, cluster, seed, count):
    """Seconds of both over so many changes, each of which must be equal."""
    replay = IncrementalSimulator(space.model, (cluster,), space.batch_size)
    spent = [0.0, 0.0]
    for plan in islice(random_plans(space, seed), count):
        result, own_s = timed(replay.summary, plan)
        full, full_s = timed(lambda one: summarize_step(one, space.model, cluster, batch_size=space.batch_size), plan)
        assert result == full, f"{plan} with {plan.num_microbatches} microbatches and {plan.passes}"
        spent = [spent[0] + own_s, spent[1] + full_s]
    return spent


@pytest.mark.long(quick=["plain-flat-tied", "overlap-hosts-ladder"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cluster", [FLAT, HOSTS, COPIES], ids=["flat", "hosts", "copies"])
@pytest.mark.parametrize("passes", [(), ("overlap",)], ids=["plain", "overlap"])
def test_random_changes_equal_full_simulations(name, cluster, passes):
    space = SearchSpace(MODELS[name], 8, 48, passes, dims=("heads", "hidden"), codecs=("", "fp16"))
    assert len(compared(space, cluster, seed=5, count=12)) == 2


@pytest.mark.parametrize("prefetch", ["prefetch", "prefetch:2"])
def test_prefetched_gathers_are_simulated_in_full(prefetch):
    plan, model = replace(Plan.parse("zero(4, level=3)"), passes=("overlap", prefetch)), MODELS["layers"]
    result = IncrementalSimulator(model, (HOSTS,), 48).summary(plan)
    assert result == summarize_step(plan, model, HOSTS, batch_size=48)
    assert result != summarize_step(replace(plan, passes=("overlap",)), model, HOSTS, batch_size=48)


@pytest.mark.parametrize("text", ["server(3)", "pipeline(2, schedule=pipedream)", "data(2) * server(2)", "tree(4)"])
def test_plans_of_other_kinds_are_simulated_in_full(text):
    plan, model = Plan.parse(text, num_microbatches=4), MODELS["layers"]
    assert IncrementalSimulator(model, (FLAT,), 48).summary(plan) == summarize_step(plan, model, FLAT, batch_size=48)


def test_plans_for_a_profiled_model_are_partitioned_by_its_seconds_and_take_them():
    model = MODELS["layers"]
    pieces = [layer_profile(1e-3 * (1 + at), 2e-3) for at in range(len(model.layers))]
    timing = build_profile(model, pieces, overheads=Overheads(1e-4, 2e-4))
    replay = IncrementalSimulator(model, (FLAT,), 48, timing)
    zero = [f"zero(4, level=3, {option})" for option in OPTIONS]
    for text in ("solo", "pipeline(2) * data(2)", "pipeline(4)", "zero(4, level=3)", *zero):
        for count in (1, 4):
            plan = Plan.parse(text, num_microbatches=count)
            assert replay.summary(plan) == summarize_step(plan, model, FLAT, batch_size=48, profile=timing)


def test_a_summary_equals_the_prediction():
    plan, model = Plan.parse("pipeline(2) * zero(2)", num_microbatches=4), MODELS["transformer"]
    result, one = IncrementalSimulator(model, (FLAT,), 32).summary(plan), predict_plan(plan, model, FLAT, batch_size=32)
    assert (result.step_s, result.compute_s, result.update_s) == (one.step_s, one.compute_s, one.update_s)
    assert (result.sent_bytes, result.memory_bytes) == (one.sent_bytes, one.memory_bytes)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_random_changes_are_equal_and_take_less_than_a_third_of_the_time(capsys):
    draw, own_s, full_s = Random(6), 0.0, 0.0
    for walk in range(40):
        model = MODELS[draw.choice([*MODELS])]
        passes = draw.choice([(), ("overlap",)])
        space = SearchSpace(model, draw.choice([4, 8, 16, 32]), BATCH, passes, ("heads", "hidden"), ("", "fp16"))
        spent = compared(space, FLAT, walk, 250)
        own_s, full_s = own_s + spent[0], full_s + spent[1]
    with capsys.disabled():
        sys.stdout.write(f"\n10,000 changes: full {full_s:.0f} s, incremental {own_s:.0f} s: {full_s / own_s:.1f} x\n")
    assert full_s > 3 * own_s
