"""Memory-bound ranks of one host share its bandwidth, although each has its own core."""

import pytest

from counterpoint.simulator.simulate import simulate
from counterpoint.world.cluster import Cluster, Level, Link
from tests.simulator.programs import FakeCosts, program

HALF = Cluster(memory_contention=(1.0, 0.5))


def ends(*rows, cluster=HALF):
    trace = simulate(program(*rows), FakeCosts(), cluster)
    return [max(event.stop_s for event in trace.events if event.rank == rank) for rank in range(len(rows))]


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [(("U0", "U0"), [2, 2]), (("U0", "F0.0"), [1, 1]), (("F0.0", "F0.1"), [1, 1]), (("F0.0 U0", "U0"), [2, 1])],
)
def test_only_memory_bound_instructions_contend_for_memory(rows, seconds):
    assert ends(*rows) == seconds


def test_ranks_of_two_hosts_have_memory_of_their_own():
    hosts = (Level("host", 1, Link()), Level("network", 2, Link()))
    assert ends("U0", "U0", cluster=Cluster(levels=hosts, memory_contention=(1.0, 0.5))) == [1, 1]


def test_more_ranks_than_were_measured_share_what_those_have():
    assert HALF.contended_memory_fraction(4) == 0.25
