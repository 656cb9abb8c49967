"""A plan for 1,024 ranks is compiled, checked and simulated in seconds, in plain Python."""

import time

import pytest

from counterpoint.program.symmetry import classes
from counterpoint.simulator.costs import unit_costs
from counterpoint.simulator.simulate import simulate
from tests.simulator.played import compiled

SLOW = pytest.mark.slow
PLANS = [
    ("pipeline(8) * zero2(128)", 8, 8, 8, 7 / 15),
    pytest.param("pipeline(8) * tensor(8) * data(16)", 8, 8, 8, 7 / 15, marks=SLOW),
    pytest.param("pipeline(16) * data(64)", 16, 16, 16, 15 / 31, marks=SLOW),
    pytest.param("data(1024)", 8, 8, 1, 0.0, marks=SLOW),
    pytest.param("zero3(1024)", 8, 1, 1, 0.0, marks=SLOW),
]


@pytest.mark.parametrize(("plan", "blocks", "m", "num_classes", "bubble"), PLANS)
def test_a_thousand_ranks_take_less_than_five_seconds_of_the_processor(plan, blocks, m, num_classes, bubble):
    """In seconds of this process, not of the clock: a busy machine cannot fail it."""
    began = time.process_time()
    made = compiled(plan, m=m, blocks=blocks)
    trace = simulate(made.program, unit_costs())
    assert time.process_time() - began < 5
    assert trace.num_ranks == 1024
    assert trace.bubble == pytest.approx(bubble, abs=1e-9)
    assert len(classes(made.program)) == num_classes
