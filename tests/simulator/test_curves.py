"""What a rank holds over the time of a step."""

import pytest

from counterpoint.compiler.compile import held_in
from counterpoint.program.trace import Trace
from counterpoint.simulator.costs import unit_costs
from counterpoint.simulator.curves import with_memory
from counterpoint.simulator.memory import peak_bytes
from counterpoint.simulator.simulate import simulate, simulate_turn
from tests.simulator.played import Ticks, compiled, program

PLANS = ["solo", "zero2(2)", "gpipe(2)", "pipeline(2) * data(2)", "gpipe(2, checkpoint=always)", "bsp(2)", "asp(2)",
         "elastic(2)", "ssp(2, staleness=0, compress=int8)"]  # fmt: skip


def ten(value, code=""):
    return 0 if value.name == "weight" else 10


def held(rows, costs):
    made = program(*rows)
    return with_memory(simulate(made, costs), made, ten).memory


def test_a_rank_holds_what_forwards_leave_until_the_end_of_their_backwards():
    assert held(["F0.0 F0.1 B0.1 B0.0"], Ticks()) == (((0.0, 10), (1.0, 20), (3.0, 10)),)


def test_nothing_is_kept_for_a_forward_that_has_not_begun():
    first, second = held(["F0.0 F0.1 x1.0>1", "x1.0<0 F1.0 B1.0"], Ticks(link_s=2))
    assert first == ((0.0, 10), (1.0, 20))
    assert second == ((0.0, 0), (4.0, 10))


@pytest.mark.parametrize("plan", PLANS)
def test_the_highest_point_of_a_curve_is_the_peak(plan):
    made = compiled(plan, m=4)
    sizes = held_in(made.model, 2)
    trace = with_memory(simulate(made.program, unit_costs()), made.program, sizes)
    assert tuple(max(size for _, size in curve) for curve in trace.memory) == peak_bytes(made.program, sizes)


def test_the_curve_of_a_stream_is_that_of_one_body():
    made = compiled("pipedream(2)", m=1)
    turn, sizes = made.turns[-1], held_in(made.model, 2)
    trace = with_memory(simulate_turn(turn, unit_costs()), turn.playable, sizes)
    assert [max(size for _, size in curve) for curve in trace.memory] == list(peak_bytes(turn.playable, sizes))
    assert all(0 <= at <= trace.step_s for curve in trace.memory for at, _ in curve)


def test_a_curve_is_written_and_read_with_its_trace():
    made = program("F0.0 B0.0")
    trace = with_memory(simulate(made, Ticks()), made, ten)
    assert Trace.from_json(trace.to_json()) == trace
