"""Plans that are certainly slower are not simulated, and the choice is the same as without pruning."""

from dataclasses import replace

import pytest

from counterpoint.errors import PlanError
from counterpoint.plan.plan import DEFAULT_PASSES, Plan
from counterpoint.planner.choice_report import explain_skipped
from counterpoint.planner.choose import PREDICTED_TOLERANCE, rank_and_choose, simulator_for_problem
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.incremental_simulator import StepTooSlow
from counterpoint.planner.memory_suggestions import PlanningProblem
from counterpoint.planner.ranking import (
    PlanRanking,
    attribute_time,
    build_simulator,
    merge_rankings,
    rank_with_simulator,
)
from counterpoint.world.cluster import Cluster, Level, Link
from tests.covering import each_value_once
from tests.planner.search.spaces import COPIES, FLAT, HOSTS, MODELS, WIRE

UNLIKE = Cluster(link=WIRE, speeds=(1.0, 0.5))
CARDS = Cluster(levels=(Level("host", 4, Link(5e-6, 5e9)), Level("network", 2, WIRE, is_shared=True)))
SLOW = replace(HOSTS, slow_links=((1, 2, 0.25),))
CLUSTERS = {"flat": FLAT, "hosts": HOSTS, "copies": COPIES, "unlike": UNLIKE, "cards": CARDS, "slow": SLOW}


def listed(name):
    """Every fifth plan for a model, with the passes that plans have."""
    return [replace(plan, passes=DEFAULT_PASSES) for plan in [*enumerate_plans(8, MODELS[name], batch_size=48)][::5]]


def problem(name, cluster):
    return PlanningProblem(MODELS[name], CLUSTERS[cluster], 48)


@pytest.mark.long(quick=["tied-copies"])
@pytest.mark.parametrize(("name", "cluster"), each_value_once([*MODELS], [*CLUSTERS]))
def test_pruning_changes_no_choice_and_pruned_plans_are_too_slow(name, cluster):
    asked, plans = problem(name, cluster), listed(name)
    every, near = (rank_and_choose(plans, asked, within) for within in (None, PREDICTED_TOLERANCE))
    assert near.plan == every.plan
    seconds = {actual.plan: actual.step_s for actual in every.ranking.predictions}
    assert all(seconds[actual.plan] == actual.step_s for actual in near.ranking.predictions)
    best_s = every.ranking.eligible[0].step_s
    assert all(seconds[plan] > PREDICTED_TOLERANCE * best_s for plan in near.ranking.pruned if plan in seconds)


@pytest.mark.long(quick=["ladder-unlike", "transformer-slow"])
@pytest.mark.parametrize(("name", "cluster"), each_value_once([*MODELS], [*CLUSTERS]))
def test_the_lower_bound_never_exceeds_the_step(name, cluster):
    simulator = build_simulator(MODELS[name], CLUSTERS[cluster], 48)
    for plan in listed(name)[::2]:
        try:
            result = simulator.simulate(plan)
        except PlanError:
            continue
        assert result is None or simulator.simulate(plan, max_step_s=result.breakdowns[0].step_s) == result


def test_the_lower_bound_adds_the_traffic_of_the_ranks_of_a_host():
    apart, simulators = Plan.parse("pipeline(4) * data(2)"), {}
    for is_shared in (True, False):
        network = Level("network", 2, Link(0.0, 1e6), is_shared=is_shared)
        simulators[is_shared] = build_simulator(MODELS["layers"], Cluster(levels=(CARDS.levels[0], network)), 48)
    each, together = simulators[False].lower_bound_s(apart), simulators[True].lower_bound_s(apart)
    assert 1.5 * each < together <= simulators[True].summary(apart).step_s


@pytest.mark.long
def test_plans_are_ranked_alike_in_whatever_order_they_are_asked_for():
    asked, plans = problem("layers", "cards"), listed("layers")
    there, back = (rank_and_choose(given, asked).ranking for given in (plans, plans[::-1]))
    assert [actual.step_s for actual in there.eligible] == [actual.step_s for actual in back.eligible]
    assert set(there.pruned) == set(back.pruned)


def test_for_one_rank_the_lower_bound_is_the_step():
    simulator = build_simulator(MODELS["layers"], FLAT, 48)
    step_s = simulator.summary(Plan()).step_s
    with pytest.raises(StepTooSlow):
        simulator.simulate(Plan(), max_step_s=0.999 * step_s)


def test_pruned_plans_are_reported():
    simulator = build_simulator(MODELS["layers"], Cluster(), 48)
    plans = [Plan.parse("data(4)"), Plan(), Plan.parse("data(2)")]
    ranking = rank_with_simulator(plans, simulator, tolerance=1.1)
    assert ranking.pruned == (Plan(), Plan.parse("data(2)"))
    text = "solo and 1 more plans of the list are certainly slower: a lower bound of its step, from the work of one rank or"
    assert explain_skipped(ranking)[0].startswith(text)


def test_of_two_rankings_only_plans_that_neither_simulated_are_pruned():
    simulator = build_simulator(MODELS["layers"], Cluster(), 48)
    quick = PlanRanking((), (), (), (Plan(), Plan.parse("data(2)")))
    assert merge_rankings(quick, rank_with_simulator([Plan()], simulator)).pruned == (Plan.parse("data(2)"),)


@pytest.mark.long
def test_time_that_is_attributed_later_is_attributed_equally():
    asked, plans = problem("tied", "hosts"), listed("tied")[:20]
    simulator = simulator_for_problem(asked)
    near = rank_with_simulator(plans, simulator, tolerance=PREDICTED_TOLERANCE).predictions
    assert any(actual.free_links_s is None for actual in near)
    assert [attribute_time(actual, simulator) for actual in near] == [
        one for one in rank_with_simulator(plans, simulator).predictions if one.plan in {actual.plan for actual in near}
    ]
