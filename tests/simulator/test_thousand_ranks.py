"""A plan for 1,024 ranks is compiled, checked and simulated in seconds, in plain Python."""

import time

import pytest

from counterpoint.program.symmetry import classes
from counterpoint.simulator.costs import model_costs, unit_costs
from counterpoint.simulator.simulate import simulate
from counterpoint.simulator.spent import spend
from counterpoint.world.cluster import Cluster, Device, Level, Link
from tests.simulator.played import compiled, size_of_in

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


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_a_thousand_ranks_on_hosts_with_shared_cards_are_played_in_less_than_ten_seconds_of_the_processor():
    """Of 96 blocks and 64 microbatches, sliced inside 128 hosts of 8, in stages and replicas between them."""
    made = compiled("tensor(8) * pipeline(16) * data(8)", m=64, blocks=96, proves=False)
    levels = (Level("host", 8, Link(5e-6, 1e10)), Level("network", 128, Link(5e-5, 1.25e9), is_shared=True))
    cluster = Cluster(Device(1e7), levels=levels, crowding=(1.0,) * 4 + (0.9,) * 4)
    costs = model_costs(made.model, cluster, size_of_in(made), samples_per_micro=2)
    began = time.process_time()
    (spent,) = spend(made.turns[-1], [costs], cluster)
    assert time.process_time() - began < 10
    assert spent.step_s > 0
