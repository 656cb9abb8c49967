"""Schedules that are tried only if the bubble of a pipeline is long enough for them to win."""

from functools import cache

from counterpoint.plan.plan import Plan
from counterpoint.planner.choose import choose_plan_from
from counterpoint.planner.ranking import build_simulator, rank_plans, rank_with_schedules
from counterpoint.world.cluster import Cluster
from tests.planner.models import layers, memory

DEEP = layers(8, cost=1e9)
"""So much work in so few parameters that nothing but the bubble of a pipeline matters."""
PIPELINE = Plan.parse("pipeline(4)", num_microbatches=8)


@cache
def list_schedules():
    ranking = rank_with_schedules([PIPELINE], build_simulator(DEEP, Cluster(), 16))
    return {str(one.plan): one.step_s for one in ranking.predictions}


def test_a_pipeline_with_a_bubble_is_tried_with_schedules_that_have_less():
    assert list(list_schedules()) == [
        "pipeline(4, schedule=zero_bubble, chunks_per_stage=2)",
        "pipeline(4, schedule=zero_bubble)",
        "pipeline(4, schedule=interleaved, chunks_per_stage=2)",
        "pipeline(4)",
    ]


def test_the_schedule_that_is_predicted_fastest_is_chosen():
    chosen = choose_plan_from([PIPELINE], DEEP, Cluster(), batch_size=16)
    assert str(chosen) == "pipeline(4, schedule=zero_bubble, chunks_per_stage=2)"
    assert chosen.num_microbatches == 8


def test_no_schedule_is_tried_if_a_plan_without_a_bubble_is_faster_than_any_could_be():
    plans = [Plan.parse("data(4)"), PIPELINE]
    ranking = rank_with_schedules(plans, build_simulator(DEEP, Cluster(), 16))
    assert ranking == rank_plans(plans, DEEP, Cluster(), batch_size=16)


def test_chunks_are_tried_only_where_there_are_blocks_for_them():
    ranking = rank_with_schedules([PIPELINE], build_simulator(layers(4, cost=1e9), Cluster(), 16))
    assert [str(one.plan) for one in ranking.predictions] == ["pipeline(4, schedule=zero_bubble)", "pipeline(4)"]


def test_other_pipelines_are_not_changed():
    plans = [Plan.parse("gpipe(4)", num_microbatches=4), Plan.parse("pipeline(2, replicas=(1,3))", num_microbatches=3)]
    for plan in plans:
        size = 12 if plan.num_microbatches == 3 else 16
        ranking = rank_with_schedules([plan], build_simulator(DEEP, Cluster(), size))
        assert [one.plan for one in ranking.predictions] == [plan]


def test_where_nothing_fits_nothing_else_is_tried():
    ranking = rank_with_schedules([PIPELINE], build_simulator(DEEP, memory(1), 16))
    assert [one.plan for one in ranking.predictions] == [PIPELINE]
