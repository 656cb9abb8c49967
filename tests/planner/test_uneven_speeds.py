"""Ranks of different speed: stages are balanced by it, and each rank is simulated at its own speed."""

from fractions import Fraction

import pytest

from counterpoint.compiler.compile import compile as compile_plan
from counterpoint.model.spec import linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.planner.prepare import balance_by_speed
from counterpoint.planner.ranking import predict_plan
from counterpoint.program.instruction import Backward, Forward
from counterpoint.simulator.cost_model import unit_costs
from counterpoint.simulator.simulate import simulate
from counterpoint.world.cluster import Cluster, Link

FREE = Link(latency_s=0.0, bytes_per_s=1e18)


@pytest.mark.parametrize(
    ("plan", "speeds", "blocks", "written"),
    [
        ("pipeline(2)", (3, 1), 8, "pipeline(2, balance=(6,2))"),
        ("gpipe(4)", (1, 1, 1, 3), 12, "pipeline(4, schedule=gpipe, balance=(2,2,2,6))"),
        ("pipeline(2, replicas=(2,1))", (1, 1, 4), 6, "pipeline(2, replicas=(2,1), balance=(2,4))"),
        ("tensor(2) * pipeline(2)", (4, 2, 1, 1), 6, "tensor(2) * pipeline(2, balance=(4,2))"),
        ("pipeline(2) * data(2)", (2, 1, 4, 1), 6, "pipeline(2, balance=(4,2)) * data(2)"),
        ("interleaved(2)", (3, 1), 8, "pipeline(2, schedule=interleaved, chunks_per_stage=2, balance=(3,1,3,1))"),
        (
            "zero_bubble(2, chunks_per_stage=2)",
            (3, 1),
            8,
            "pipeline(2, schedule=zero_bubble, chunks_per_stage=2, balance=(3,1,1,3))",
        ),
        ("pipeline(2, balance=(4,4))", (3, 1), 8, "pipeline(2, balance=(4,4))"),
        ("pipeline(2)", (2, 2), 8, "pipeline(2)"),
        ("data(2)", (3, 1), 8, "data(2)"),
    ],
)
def test_a_stage_gets_as_many_blocks_as_its_ranks_are_fast(plan, speeds, blocks, written):
    assert str(balance_by_speed(Plan.parse(plan), linear_chain(blocks), Cluster(speeds=speeds))) == written


@pytest.mark.parametrize(("n", "m", "speeds"), [(2, 8, (3.0, 1.0)), (4, 8, (1.0, 2.0, 1.0, 4.0))])
def test_stages_balanced_by_their_speed_have_the_bubble_of_equal_ones(n, m, speeds):
    """The bubble is (n-1)/(m+n-1) of a step that takes all work at the total speed."""
    plan = Plan.parse(f"pipeline({n})", num_microbatches=m)
    blocks = int(2 * sum(speeds))
    program = compile_plan(
        balance_by_speed(plan, linear_chain(blocks), Cluster(speeds=speeds)), linear_chain(blocks)
    ).program
    trace = simulate(program, unit_costs(), Cluster(speeds=speeds))
    assert trace.step_s == pytest.approx(2 * 2 * (m + n - 1))
    assert trace.bubble == pytest.approx((n - 1) / (m + n - 1))


def test_a_rank_computes_at_its_own_speed():
    program = compile_plan(Plan.parse("data(2)"), linear_chain(4)).program
    trace = simulate(program, unit_costs(), Cluster(speeds=(4.0, 1.0)))
    words = program.unroll(1)
    spent = [Fraction(0)] * 2
    for event in trace.events:
        if isinstance(words[event.rank][event.index], Forward | Backward):
            spent[event.rank] += Fraction(event.stop_s - event.start_s)
    assert spent == [2, 8]


def test_a_prediction_is_of_the_plan_balanced_by_speed_and_faster_than_an_even_one():
    cluster, model = Cluster(link=FREE, speeds=(3.0, 1.0)), linear_chain(8, width=64)
    plans = [Plan.parse(text, num_microbatches=4) for text in ("pipeline(2)", "pipeline(2, balance=(4,4))")]
    by_speed, evenly = (predict_plan(plan, model, cluster, batch_size=32) for plan in plans)
    assert str(by_speed.plan) == "pipeline(2, balance=(6,2))"
    assert by_speed.step_s < 0.7 * evenly.step_s
