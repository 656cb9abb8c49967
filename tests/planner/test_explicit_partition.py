"""Stages that were ranked by seconds keep their partition wherever their plan is read."""

from functools import partial, reduce
from math import inf

import pytest

from counterpoint.compiler.compile import compile as compile_plan
from counterpoint.plan.plan import Plan
from counterpoint.planner.choose import rank_and_choose, simulator_for_problem
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.memory_suggestions import PlanningProblem
from counterpoint.planner.pipeline.candidates import DEFAULT_SYNCHRONOUS_SCHEDULES, find_pipeline_plans
from counterpoint.planner.prepare import compile_for, with_explicit_partition
from counterpoint.planner.ranking import predict_plan, rank_with_schedules
from counterpoint.planner.replan import replan
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.world.cluster import Cluster, Level, Link
from tests.model.profiles import build_profile, layer_profile
from tests.planner.models import layers
from tests.planner.pipeline.test_candidates import uneven
from tests.strategies.pipeline.test_intra_block_splits import model as parted

MODEL = layers(6, width=64, cost=1e6)
LATE = build_profile(MODEL, [layer_profile(0.01, 0.02)] * 5 + [layer_profile(0.05, 0.1)])
"""The last of six layers takes as long as the others together, which operation counts do not show."""
FREE = Cluster(link=Link(0.0, inf))
QUESTION = PlanningProblem(MODEL, FREE, 8, LATE)


def ranks(count, bytes_per_s):
    """So many ranks of a host with links of that speed."""
    return Cluster(levels=(Level("host", count, Link(0.0, bytes_per_s)),))


def runs(plan, model=MODEL):
    """The blocks of every chunk."""
    refined = reduce(lambda spec, strategy: strategy.split_model(spec), plan.strategies, model)
    return [one.chunks(refined).block_ranges for one in plan.strategies if isinstance(one, Pipeline)]


def test_pipelines_of_a_profiled_model_are_partitioned_by_its_seconds_explicitly():
    plans = find_pipeline_plans(2, MODEL, FREE, 8, DEFAULT_SYNCHRONOUS_SCHEDULES, profile=LATE)
    assert {one.balance for plan in plans for one in plan.strategies if isinstance(one, Pipeline)} == {(5, 1)}
    assert {runs(plan)[0] for plan in plans} == {(range(5), range(5, 6))}


def test_a_plan_that_was_ranked_by_seconds_has_the_same_partition_after_parsing():
    for result in rank_and_choose(enumerate_plans(2, MODEL), QUESTION, tolerance=None).ranking.predictions:
        read = Plan.from_yaml(result.plan.to_yaml())
        assert runs(read) == runs(compile_for(result.plan, MODEL, FREE, 8, LATE)[0].plan)
        assert predict_plan(read, MODEL, FREE, batch_size=8, profile=LATE) == result
        assert all(one.balance == (5, 1) for one in read.strategies if isinstance(one, Pipeline))


def test_resolved_plans_are_ranked_once_and_simpler_plans_still_win_within_two_per_cent():
    choice = rank_and_choose(
        [*enumerate_plans(2, MODEL), Plan.parse("pipeline(2, balance=(5,1))", num_microbatches=2)], QUESTION
    )
    plans = [result.plan for result in choice.ranking.predictions]
    assert len(plans) == len(set(plans))
    assert set(choice.by_simplicity) <= set(plans)
    assert choice.plan == Plan.parse("data(2)")


def test_other_schedules_are_tried_of_a_pipeline_with_its_default_partition():
    own, given = (Plan.parse(text, num_microbatches=4) for text in ("pipeline(2)", "pipeline(2, balance=(4,2))"))
    tried = partial(rank_with_schedules, simulator=simulator_for_problem(QUESTION))
    assert any("zero_bubble" in str(one.plan) for one in tried([own]).predictions)
    assert [one.plan for one in tried([given]).predictions] == [given]


@pytest.mark.parametrize(
    ("text", "costs", "written"),
    [
        ("pipeline(2)", ([2, 2], [2, 2], [2, 2]), "pipeline(2, split_points=p3)"),
        ("pipeline(2) * data(2)", ([2, 2], [2, 2]), "pipeline(2, balance=(1,1)) * data(2)"),
        ("pipeline(3)", ([1, 1], [1]), "pipeline(3, split_points=p1+p2)"),
        (
            "interleaved(2)",
            ([1], [1], [1], [1]),
            "pipeline(2, schedule=interleaved, chunks_per_stage=2, balance=(1,1,1,1))",
        ),
    ],
)
def test_a_split_inside_a_block_is_written_by_the_module_that_starts_there(text, costs, written):
    model, plan = parted(*costs), Plan.parse(text, num_microbatches=4)
    result = with_explicit_partition(plan, model)
    assert str(result) == written
    assert compile_plan(result, model).program == compile_plan(plan, model).program


def test_another_plan_for_fewer_ranks_is_partitioned_by_the_seconds_of_a_profile():
    plan = Plan.parse("pipeline(4)", num_microbatches=4)
    result = replan(plan, MODEL, ranks(4, 1e3), ranks(2, 1e3), 8, profile=LATE)
    assert runs(result.plan)[0] == (range(5), range(5, 6))


def test_another_plan_may_have_stages_with_unequal_replicas():
    result = replan(Plan.parse("data(4)"), uneven(2e8, 1e8, width=64), ranks(4, 1e5), ranks(3, 1e5), 24)
    (pipeline,) = result.plan.strategies
    assert isinstance(pipeline, Pipeline)
    assert pipeline.replicas == (2, 1)
