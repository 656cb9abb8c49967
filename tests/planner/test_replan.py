"""Another plan when ranks come or go: nearly the fastest, and of those the cheapest to move to."""

import pytest

from counterpoint.errors import PlanError
from counterpoint.plan.plan import Plan
from counterpoint.planner.choose import MEASURED_TOLERANCE, rank_and_choose
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.memory_suggestions import PlanningProblem
from counterpoint.planner.prepare import compile_for
from counterpoint.planner.replan import find_owned_state, missing_bytes, replan
from counterpoint.world.cluster import Cluster, Level, Link
from tests.planner.models import layers

MODEL = layers(4, width=64, cost=1e9)
WEIGHT_BYTES = 4 * 4 * 64 * 64


def ranks(count):
    return Cluster(levels=(Level("host", count, Link()),))


def held(text, num_micros=1):
    plan = Plan.parse(text, num_microbatches=num_micros)
    return find_owned_state(compile_for(plan, MODEL, Cluster(), 48)[0])


def kept_bytes(text, num_micros=1):
    """State that each rank owns under a plan: a weight and two optimizer states per parameter."""
    return [missing_bytes(one, None) for one in held(text, num_micros)]


@pytest.mark.parametrize(
    ("text", "micros", "weights", "states"),
    [
        ("data(4)", 1, 1, 1),
        ("zero(4, level=1)", 1, 1, 1 / 4),
        ("zero(4, level=3)", 1, 1 / 4, 1 / 4),
        ("pipeline(4)", 4, 1 / 4, 1 / 4),
        ("tensor(4)", 1, 1 / 4, 1 / 4),
        ("pipeline(2) * zero(2, level=1)", 4, 1 / 2, 1 / 4),
    ],
)
def test_a_rank_keeps_what_its_plan_leaves_to_it(text, micros, weights, states):
    assert kept_bytes(text, micros) == [WEIGHT_BYTES * (weights + 2 * states)] * 4


def test_a_server_keeps_all_and_its_workers_only_weights():
    assert kept_bytes("server(3, servers=1)") == [WEIGHT_BYTES] * 3 + [3 * WEIGHT_BYTES]


def test_nothing_moves_to_a_rank_that_has_what_it_needs():
    assert [missing_bytes(one, other) for one, other in zip(held("zero3(4)"), held("data(4)"), strict=True)] == [0] * 4
    assert missing_bytes(held("pipeline(2)", 2)[1], held("pipeline(2)", 2)[0]) == 3 * WEIGHT_BYTES / 2


def test_shards_of_other_sizes_move_only_where_they_do_not_intersect():
    quarters, halves = held("zero3(4)"), held("zero3(2)")
    assert [missing_bytes(halves[rank], quarters[rank]) for rank in (0, 1)] == [
        3 * WEIGHT_BYTES / 4,
        3 * WEIGHT_BYTES / 2,
    ]


def test_the_plan_stays_where_the_ranks_stay_and_nothing_is_faster():
    plan = rank_and_choose(enumerate_plans(4, MODEL), PlanningProblem(MODEL, ranks(4), 48)).plan
    result = replan(plan, MODEL, ranks(4), ranks(4), 48)
    assert (result.plan, result.moved_bytes) == (plan, 0)


@pytest.mark.parametrize(("before", "count"), [("zero(4, level=1)", 3), ("zero(4, level=3)", 2)])
def test_the_chosen_plan_is_nearly_fastest_and_no_other_such_plan_is_cheaper_to_move_to(before, count):
    plan = Plan.parse(before)
    result = replan(plan, MODEL, ranks(4), ranks(count), 48)
    choice = rank_and_choose(enumerate_plans(count, MODEL), PlanningProblem(MODEL, ranks(count), 48))
    kept = [one for one in choice.ranking.predictions if one.is_synchronous and one.fits]
    assert result.plan.num_ranks == count
    assert result.step_s <= MEASURED_TOLERANCE * kept[0].step_s
    old = find_owned_state(compile_for(plan, MODEL, ranks(4), 48)[0])
    for other in (one.plan for one in kept if one.step_s <= MEASURED_TOLERANCE * kept[0].step_s):
        new = find_owned_state(compile_for(other, MODEL, ranks(count), 48)[0])
        moved = sum(missing_bytes(needs, old[at] if at < 4 else None) for at, needs in enumerate(new))
        assert result.moved_bytes <= moved


def test_a_rank_that_is_new_gets_all_that_it_needs():
    alone = replan(Plan.parse("data(4)"), MODEL, ranks(4), ranks(4), 48, survivors={1: 0, 2: 2})
    assert alone.moved_bytes > replan(Plan.parse("data(4)"), MODEL, ranks(4), ranks(4), 48).moved_bytes == 0


def test_it_says_what_the_plan_was_preferred_to():
    result = replan(Plan.parse("zero(4, level=1)"), MODEL, ranks(4), ranks(3), 48)
    assert f"{result.moved_bytes} bytes to move; " in result.reason
    assert "bytes would move" in result.reason or "no other plan is within 2 %" in result.reason


def test_a_cluster_without_a_number_of_ranks_is_rejected():
    with pytest.raises(PlanError, match="does not say how many ranks it has; give it levels, or a speed for each"):
        replan(Plan.parse("data(4)"), MODEL, ranks(4), Cluster(), 48)
