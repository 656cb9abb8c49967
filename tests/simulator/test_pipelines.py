"""Bubbles and ticks of pipelines: the numbers of the papers, exactly."""

import pytest

from counterpoint.simulator.costs import unit_costs
from counterpoint.simulator.simulate import simulate, simulate_turn
from tests.simulator.played import compiled

BUBBLES = [(4, 1, 0.75), (4, 4, 0.4286), (4, 8, 0.2727), (4, 32, 0.0857), (8, 32, 0.1795)]
ORDERS = ["gpipe", "one_f_one_b"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("n", "m", "bubble"), BUBBLES)
@pytest.mark.parametrize("ticks", [1, 2])
def test_the_bubble_of_a_pipeline_is_stages_but_one_over_stages_but_one_and_microbatches(order, n, m, bubble, ticks):
    made = compiled(f"pipeline({n}, order={order})", m=m, blocks=n)
    trace = simulate(made.program, unit_costs(backward_ticks=ticks))
    assert round(trace.bubble, 4) == bubble
    assert trace.bubble == pytest.approx((n - 1) / (m + n - 1), abs=1e-12)


@pytest.mark.parametrize(("n", "m"), [(2, 2), (4, 8), (8, 32)])
def test_one_f_one_b_takes_twice_stages_but_one_and_microbatches_ticks(n, m):
    trace = simulate(compiled(f"pipeline({n})", m=m, blocks=n).program, unit_costs())
    assert trace.step_s == 2 * (m + n - 1)


@pytest.mark.parametrize("plan", ["pipedream(4)", "pipedream(4, vertical_sync=on)", "pipedream_2bw(4)"])
def test_a_pipeline_without_a_flush_has_no_bubble_in_the_long_run(plan):
    made = compiled(plan, m=8, blocks=4)
    trace = simulate_turn(made.turns[-1], unit_costs(backward_ticks=2))
    assert (trace.step_s, trace.bubble) == (24.0, 0.0)


def test_every_stage_of_a_pipeline_is_busy_for_its_microbatches():
    trace = simulate(compiled("gpipe(4)", m=8).program, unit_costs(backward_ticks=2))
    assert [trace.busy_s(rank) for rank in range(4)] == [24.0] * 4


def test_gpipe_on_three_stages_computes_at_these_ticks():
    trace = simulate(compiled("gpipe(3)", m=2, blocks=3).program, unit_costs())
    computed = [(e.rank, e.words, e.start_s) for e in trace.events if e.lane == "compute" and e.seconds]
    assert [at for rank, _, at in computed if rank == 0] == [0, 1, 6, 7]
    assert [at for rank, _, at in computed if rank == 1] == [1, 2, 5, 6]
    assert [(words, at) for rank, words, at in computed if rank == 2] == [
        ("F2.0", 2), ("F2.1", 3), ("B2.1", 4), ("B2.0", 5),
    ]  # fmt: skip
