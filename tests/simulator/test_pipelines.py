"""Bubbles and ticks of pipelines: the numbers of the papers, exactly."""

import pytest

from counterpoint.program.instruction import Recv
from counterpoint.simulator.cost_model import unit_costs
from counterpoint.simulator.simulate import simulate, simulate_variant
from tests.simulator.programs import compile_text

BUBBLES = [(4, 1, 0.75), (4, 4, 0.4286), (4, 8, 0.2727), (4, 32, 0.0857), (8, 32, 0.1795)]
SCHEDULES = ["gpipe", "one_f_one_b"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("n", "m", "bubble"), BUBBLES)
@pytest.mark.parametrize("ticks", [1, 2])
def test_the_bubble_of_a_pipeline_is_stages_but_one_over_stages_but_one_and_microbatches(schedule, n, m, bubble, ticks):
    compiled = compile_text(f"pipeline({n}, schedule={schedule})", m=m, blocks=n)
    trace = simulate(compiled.program, unit_costs(backward_ticks=ticks))
    assert round(trace.bubble, 4) == bubble
    assert trace.bubble == pytest.approx((n - 1) / (m + n - 1), abs=1e-12)


@pytest.mark.parametrize(("n", "m"), [(2, 2), (4, 8), (8, 32)])
def test_one_f_one_b_takes_twice_stages_but_one_and_microbatches_ticks(n, m):
    trace = simulate(compile_text(f"pipeline({n})", m=m, blocks=n).program, unit_costs())
    assert trace.step_s == 2 * (m + n - 1)


@pytest.mark.long(quick=["pipedream(4, vertical_sync=on)", "pipedream_2bw(4)"])
@pytest.mark.parametrize("plan", ["pipedream(4)", "pipedream(4, vertical_sync=on)", "pipedream_2bw(4)"])
def test_an_async_pipeline_has_no_bubble_in_the_steady_state(plan):
    compiled = compile_text(plan, m=8, blocks=4)
    trace = simulate_variant(compiled.step_variants[-1], unit_costs(backward_ticks=2))
    assert (trace.step_s, trace.bubble) == (24.0, 0.0)


def test_every_stage_of_a_pipeline_is_busy_for_its_microbatches():
    trace = simulate(compile_text("gpipe(4)", m=8).program, unit_costs(backward_ticks=2))
    assert [trace.busy_s(rank) for rank in range(4)] == [24.0] * 4


def test_gpipe_on_three_stages_computes_at_these_ticks():
    trace = simulate(compile_text("gpipe(3)", m=2, blocks=3).program, unit_costs())
    computed = [(e.rank, e.text, e.start_s) for e in trace.events if e.lane == "compute" and e.seconds]
    assert [at for rank, _, at in computed if rank == 0] == [0, 1, 6, 7]
    assert [at for rank, _, at in computed if rank == 1] == [1, 2, 5, 6]
    assert [(words, at) for rank, words, at in computed if rank == 2] == [
        ("F2.0", 2), ("F2.1", 3), ("B2.1", 4), ("B2.0", 5),
    ]  # fmt: skip


@pytest.mark.long(quick=["2-2-5", "3-2-2", "3-4-4", "3-4-9"])
@pytest.mark.parametrize(("n", "m"), [(2, 2), (2, 5), (4, 4), (4, 9), (4, 32), (8, 32)])
@pytest.mark.parametrize("v", [2, 3])
def test_chunks_make_the_bubble_as_many_times_smaller(n, m, v):
    """Megatron-LM, section 2.2.2, for numbers of microbatches that do not divide by the stages, too."""
    for schedule in ("interleaved", "gpipe"):
        compiled = compile_text(f"pipeline({n}, schedule={schedule}, chunks_per_stage={v})", m=m, blocks=n * v)
        trace = simulate(compiled.program, unit_costs(backward_ticks=2))
        assert trace.bubble == pytest.approx((n - 1) / (v * m + n - 1), abs=1e-12)


@pytest.mark.long(quick=["4-6", "2-3", "2-5", "4-9"])
@pytest.mark.parametrize(("n", "m"), [(2, 3), (2, 5), (4, 6), (4, 9), (4, 32), (8, 32)])
def test_zero_bubble_is_idle_for_a_forward_of_each_stage_but_one_and_in_a_v_for_half_of_one(n, m):
    """1F1B idles (n-1)(F + Bi + Bw), ZB-H1 (n-1)(F + Bi - Bw): a third of it where all take equally long."""
    for virtual, ticks in ((1, 3 * m), (2, 6 * m)):
        compiled = compile_text(
            f"pipeline({n}, schedule=zero_bubble, chunks_per_stage={virtual})", m=m, blocks=n * virtual
        )
        trace = simulate(compiled.program, unit_costs(backward_ticks=2))
        assert trace.step_s == ticks + n - 1
        assert trace.bubble == pytest.approx((n - 1) / (ticks + n - 1), abs=1e-12)


@pytest.mark.long(
    quick=[
        "zero_bubble(2, replicas=(2,1))-peaks6",
        "gpipe(4)-peaks0",
        "one_f_one_b(4)-peaks1",
        "gpipe(4, chunks_per_stage=2)-peaks5",
        "zero_bubble(4)-peaks2",
    ]
)
@pytest.mark.parametrize(
    ("text", "peaks"),
    [
        ("gpipe(4)", [9, 9, 9, 9]),
        ("one_f_one_b(4)", [4, 3, 2, 1]),
        ("zero_bubble(4)", [4, 4, 4, 4]),
        ("zero_bubble(4, chunks_per_stage=2)", [8, 8, 8, 8]),
        ("interleaved(4)", [12, 10, 8, 6]),
        ("gpipe(4, chunks_per_stage=2)", [18, 18, 18, 18]),
        ("zero_bubble(2, replicas=(2,1))", [2, 2, 2]),
    ],
)
def test_the_program_has_as_much_in_flight_as_the_formulas_say(text, peaks):
    """Nine microbatches make an interleaved group of five, and one more chunk in flight than groups of four would."""
    compiled = compile_text(text, m=9 if "replicas" not in text else 10, blocks=8)
    assert compiled.symbolic.peak_in_flight == peaks == [rank.in_flight for rank in compiled.cost.ranks]


@pytest.mark.parametrize("text", ["interleaved(4, chunks_per_stage=3)", "zero_bubble(4, chunks_per_stage=2)"])
def test_receives_that_are_posted_early_cost_no_time(text):
    """Each stage replica receives when the value arrives, so that a step is as long as without messages."""
    compiled = compile_text(text, m=9, blocks=12)
    assert {event.seconds for event in simulate(compiled.program, unit_costs()).events if event.lane == "link"} <= {0.0}
    early = sum(
        1
        for rank_program in compiled.program.rank_programs
        for instruction, following in zip(rank_program.body, rank_program.body[1:], strict=False)
        if isinstance(instruction, Recv) and isinstance(following, Recv)
    )
    assert early > 0
