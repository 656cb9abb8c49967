"""A plan for 1,024 ranks is compiled, checked and simulated in seconds, in plain Python."""

import cProfile
import time

import pytest

from counterpoint.program.rank_classes import find_rank_classes
from counterpoint.simulator.cost_model import analytic_costs, unit_costs
from counterpoint.simulator.simulate import simulate, simulate_breakdown
from counterpoint.world.cluster import Cluster, Device, Level, Link
from tests.simulator.programs import compile_text, size_fn_for

SLOW = pytest.mark.slow
PLANS = [
    ("pipeline(8) * zero2(128)", 8, 8, 8, 7 / 15, 4000),
    pytest.param("pipeline(8) * tensor(8) * data(16)", 8, 8, 8, 7 / 15, 4000, marks=SLOW),
    pytest.param("pipeline(16) * data(64)", 16, 16, 16, 15 / 31, 5500, marks=SLOW),
    pytest.param("data(1024)", 8, 8, 1, 0.0, 6000, marks=SLOW),
    pytest.param("zero3(1024)", 8, 1, 1, 0.0, 5200, marks=SLOW),
]


def compile_and_simulate(plan, m, blocks):
    compiled = compile_text(plan, m=m, blocks=blocks)
    return compiled, simulate(compiled.program, unit_costs())


@pytest.mark.long
@pytest.mark.parametrize(("plan", "blocks", "m", "num_classes", "bubble", "calls"), PLANS)
def test_a_thousand_ranks_take_some_thousand_calls_each(plan, blocks, m, num_classes, bubble, calls):
    """Counted, not timed: how many functions are called is the same on every machine, however busy. A call is 1 us."""
    counting = cProfile.Profile(builtins=False)
    compiled, trace = counting.runcall(compile_and_simulate, plan, m, blocks)
    assert sum(called.callcount for called in counting.getstats()) < calls * trace.num_ranks
    assert trace.num_ranks == 1024
    assert trace.bubble == pytest.approx(bubble, abs=1e-9)
    assert len(find_rank_classes(compiled.program)) == num_classes


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_a_thousand_ranks_on_hosts_with_shared_nics_are_simulated_in_less_than_ten_seconds_of_cpu_time():
    """96 blocks and 64 microbatches, tensor parallelism inside 128 hosts of 8, stages and replicas between them."""
    compiled = compile_text("tensor(8) * pipeline(16) * data(8)", m=64, blocks=96, verify=False)
    levels = (Level("host", 8, Link(5e-6, 1e10)), Level("network", 128, Link(5e-5, 1.25e9), is_shared=True))
    cluster = Cluster(Device(1e7), levels=levels, compute_contention=(1.0,) * 4 + (0.9,) * 4)
    costs = analytic_costs(compiled.model, cluster, size_fn_for(compiled), samples_per_microbatch=2)
    began = time.process_time()
    (spent,) = simulate_breakdown(compiled.step_variants[-1], [costs], cluster)
    assert time.process_time() - began < 10
    assert spent.step_s > 0
