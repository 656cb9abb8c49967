"""The Metropolis walk: acceptance, and plans that do not fit."""

from random import Random

import pytest

from counterpoint.planner.plan_simulation import StepSummary
from counterpoint.planner.search.configuration import SearchConfiguration
from counterpoint.planner.search.proposals import SearchSpace
from counterpoint.planner.search.search import MetropolisWalk, acceptance, penalized_step_s
from counterpoint.strategies.data import Data
from tests.planner.search.spaces import MODELS


def figures(step_s, memory_bytes=0):
    return StepSummary(step_s, 0.0, 0.0, 0, memory_bytes)


def test_faster_is_always_accepted_and_slower_with_decreasing_probability():
    assert acceptance(2.0, 1.9, 1.0) == acceptance(2.0, 2.0, 1.0) == 1
    assert 1 > acceptance(1.0, 1.01, 1.0) > acceptance(1.0, 1.1, 1.0) > acceptance(1.0, 2.0, 1.0) > 0


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_the_unit_of_time_does_not_matter(unit):
    assert acceptance(3.0 * unit, 3.1 * unit, 2.9 * unit) == pytest.approx(acceptance(3.0, 3.1, 2.9))


def test_what_does_not_fit_costs_more_the_less_it_fits():
    costs = [penalized_step_s(figures(1.0, size), capacity_bytes=100) for size in (50, 100, 101, 150, 300)]
    assert costs[0] == costs[1] == 1.0
    assert costs == sorted(costs)
    assert costs[1] < costs[2] < costs[3] < costs[4]


def test_a_walk_goes_through_what_does_not_fit_to_what_does():
    """Only two replicas fit, reachable only through three microbatches; every other number needs too much memory."""
    space = SearchSpace(MODELS["layers"], 4, 24)

    def judge(at):
        return figures(1.0, 400 - 10 * at.num_microbatches)

    walk = MetropolisWalk(space, judge, capacity_bytes=365, rng=Random(0))
    walk.start(SearchConfiguration(data=Data(4)))
    assert not walk.fits
    assert any(walk.step() and walk.fits for _ in range(200))


def test_a_plan_that_cannot_be_executed_is_never_accepted():
    walk = MetropolisWalk(
        SearchSpace.for_model(MODELS["layers"], 4, 16),
        lambda at: figures(1.0) if at.pipeline.degree == 1 else None,
        1,
        Random(0),
    )
    walk.start(SearchConfiguration(data=Data(4)))
    for _ in range(100):
        walk.step()
        assert walk.current.pipeline.degree == 1
