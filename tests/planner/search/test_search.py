"""A search from several starts: never worse than these, reproducible by its seed, within its budget."""

import time

import pytest

from counterpoint.errors import PlanError
from counterpoint.plan.plan import Plan
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.ranking import predict_plan, rank_plans
from counterpoint.planner.search.proposals import SearchSpace
from counterpoint.planner.search.search import SearchBudget, memory_lower_bound, search_plans
from counterpoint.world.cluster import Cluster, Device
from tests.planner.models import layers
from tests.planner.search.spaces import FLAT, MODELS, WIRE

LISTED = sorted({str(plan) for plan in enumerate_plans(4, MODELS["transformer"], batch_size=48)})[::3]
SPACE = SearchSpace.for_model(MODELS["transformer"], 4, 48)


def search_and_rank(**given):
    ranking = search_plans(
        SPACE, given.pop("cluster", FLAT), starts=given.pop("starts", ()), budget=SearchBudget(**given)
    )
    return [(str(one.plan), one.plan.passes, one.plan.num_microbatches, one.step_s) for one in ranking.predictions]


def test_the_same_seed_finds_the_same_and_another_need_not():
    assert search_and_rank(steps=60, seed=1) == search_and_rank(steps=60, seed=1)


def test_the_first_is_never_slower_than_data_parallelism_or_a_start():
    start = Plan.parse("pipeline(2) * data(2)", num_microbatches=4)
    ranking = search_plans(SPACE, FLAT, budget=SearchBudget(steps=40), starts=[start])
    for plan in (Plan.parse("data(4)"), start):
        assert ranking.predictions[0].step_s <= predict_plan(plan, SPACE.model, FLAT, batch_size=48).step_s


def test_all_found_plans_use_all_ranks_and_are_synchronous():
    for one in search_plans(SPACE, FLAT, budget=SearchBudget(steps=80, seed=3)).predictions:
        assert one.plan.num_ranks == 4
        assert one.is_synchronous


def test_a_start_of_another_kind_is_ranked_and_not_walked_from():
    start = Plan.parse("server(3)")
    ranking = search_plans(SPACE, FLAT, budget=SearchBudget(steps=5), starts=[start])
    assert start in [one.plan for one in ranking.predictions]


def test_no_step_still_ranks_the_starts():
    start = Plan.parse("pipeline(4)", num_microbatches=4)
    assert {plan for plan, *_ in search_and_rank(steps=0, starts=[start])} == {"data(4)", "pipeline(4)"}


def test_without_starts_the_best_of_the_enumeration_is_one():
    model = MODELS["layers"]
    listed = rank_plans(enumerate_plans(2, model, batch_size=8), model, FLAT, batch_size=8)
    fastest = next(one for one in listed.predictions if one.is_synchronous)
    ranking = search_plans(SearchSpace.for_model(model, 2, 8), FLAT, budget=SearchBudget(steps=0))
    assert ranking.predictions[0].step_s == fastest.step_s


@pytest.mark.parametrize("text", [*LISTED, "data(4, update=sharded)", "server(3, consistency=asp)"])
def test_no_rank_holds_less_on_the_fullest_than_the_bound(text):
    plan = Plan.parse(text, num_microbatches=12)
    assert (
        0 < memory_lower_bound(plan, SPACE.model) <= predict_plan(plan, SPACE.model, FLAT, batch_size=144).memory_bytes
    )


def test_a_budget_of_time_is_kept():
    began = time.perf_counter()
    assert search_and_rank(time_s=0.2)
    assert time.perf_counter() - began < 20, "the starts and the ranking come on top"


def test_what_does_not_fit_as_data_is_found_to_fit_otherwise():
    """The whole model and its states do not fit into a rank, a shard of them does."""
    model = layers(8, width=256, cost=1e8)
    small = Cluster(Device(memory_bytes=3 * 2**20), WIRE)
    ranking = search_plans(SearchSpace.for_model(model, 4, 32), small, budget=SearchBudget(steps=60, seed=2), starts=[])
    assert not predict_plan(Plan.parse("data(4)"), model, small, batch_size=32).fits
    assert ranking.predictions[0].fits


@pytest.mark.parametrize("bounds", [{}, {"steps": -1}, {"time_s": -0.5}])
def test_a_search_without_a_limit_is_rejected(bounds):
    with pytest.raises(PlanError, match="give 0 or more steps, or seconds"):
        SearchBudget(**bounds)
