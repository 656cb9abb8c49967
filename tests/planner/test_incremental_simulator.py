"""Plans of a list share cached rank programs: results equal separate predictions, and deadlines hold."""

from dataclasses import replace

import pytest

from counterpoint.plan.plan import DEFAULT_PASSES, Plan
from counterpoint.planner.deadline import Deadline
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.incremental_simulator import IncrementalSimulator
from counterpoint.planner.plan_simulation import summarize_step
from counterpoint.planner.ranking import merge_rankings, predict_plan, rank_plans
from tests.planner.search.spaces import COPIES, FLAT, HOSTS, MODELS

UNCUT = ("data(8)", "zero(4, level=1)", "zero(2, level=2) * data(4)", "data(4, update=sharded)", "solo")


def listed(model, num_ranks, every=1):
    """Some of the plans for a model, with the passes that plans have."""
    plans = enumerate_plans(num_ranks, model, batch_size=48)
    return [replace(plan, passes=DEFAULT_PASSES) for plan in plans[::every]]


@pytest.mark.long(quick=["tied-flat"])
@pytest.mark.parametrize("cluster", [FLAT, HOSTS, COPIES], ids=["flat", "hosts", "copies"])
@pytest.mark.parametrize("name", ["transformer", "tied"])
def test_a_plan_of_a_list_is_predicted_as_by_itself(cluster, name):
    model = MODELS[name]
    result = rank_plans(listed(model, 8, every=9), model, cluster, batch_size=48).predictions
    assert len(result) > 4
    assert list(result) == [predict_plan(one.plan, model, cluster, batch_size=48) for one in result]


@pytest.mark.parametrize("text", UNCUT)
def test_bucketed_reductions_of_an_unpartitioned_model_use_cached_rank_programs(text):
    model = MODELS["layers"]
    sizes = "bucket=4KiB, first_bucket=1KiB, tune=off"
    with_sizes = text.replace("data(8)", f"data(8, {sizes})").replace("data(4)", f"data(4, {sizes})")
    plan = replace(Plan.parse(with_sizes), passes=DEFAULT_PASSES)
    replay = IncrementalSimulator(model, (HOSTS,), 48)
    assert replay.simulate(plan) is not None
    assert replay.summary(plan) == summarize_step(plan, model, HOSTS, batch_size=48)


def test_plans_with_other_buckets_take_other_times():
    model, replay = MODELS["layers"], IncrementalSimulator(MODELS["layers"], (FLAT,), 48)
    plans = [replace(Plan.parse(f"data(8, bucket={size})"), passes=DEFAULT_PASSES) for size in ("4KiB", "64MiB")]
    assert [replay.summary(plan) for plan in plans] == [
        summarize_step(plan, model, FLAT, batch_size=48) for plan in plans
    ]


def test_plans_that_were_not_evaluated_before_the_deadline_are_named():
    model = MODELS["layers"]
    plans = listed(model, 4)
    ranking = rank_plans(plans, model, FLAT, batch_size=48, deadline=Deadline.after(0.0))
    assert [result.plan for result in ranking.predictions] == plans[:1]
    assert list(ranking.not_evaluated) == plans[1:]


def test_of_two_rankings_only_plans_that_neither_evaluated_are_not_evaluated():
    model = MODELS["layers"]
    plans = listed(model, 4)[:3]
    hurried = rank_plans(plans, model, FLAT, batch_size=48, deadline=Deadline.after(0.0))
    assert merge_rankings(hurried, rank_plans(plans[1:2], model, FLAT, batch_size=48)).not_evaluated == (plans[2],)
