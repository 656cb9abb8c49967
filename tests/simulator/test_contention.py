"""Contention of ranks on the cores of a host, and of flows on its network card; computed by hand."""

import pytest

from counterpoint.simulator.simulate import simulate
from counterpoint.world.cluster import Cluster, Level, Link
from tests.simulator.programs import FakeCosts, program

CONTENTION = Cluster(compute_contention=(1.0, 0.5))
HOSTS = (Level("host", 2, Link()), Level("network", 2, Link(0.0, 10.0), is_shared=True))
NICS = Cluster(levels=HOSTS)


class SharedLinkCosts(FakeCosts):
    """All link time is on shared links, except for a delay before."""

    def __init__(self, link_s, apart_s=0.0):
        super().__init__(link_s + apart_s)
        self.flow_s = link_s

    def shared_link_s(self, instruction, fraction, rank):
        return self.flow_s


def stops(rows, costs, cluster):
    """When the last instruction in each lane except waiting ends, by rank."""
    trace = simulate(program(*rows), costs, cluster)
    result = {}
    for event in trace.events:
        if event.lane != "wait":
            result[event.rank, event.text] = event.stop_s
    return result


def test_two_concurrent_ranks_each_have_half_of_a_core():
    assert stops(["F0.0 F0.1", "F1.0"], FakeCosts(), CONTENTION) == {(0, "F0.0"): 2, (0, "F0.1"): 3, (1, "F1.0"): 2}


def test_a_waiting_rank_causes_no_contention():
    assert stops(["F0.0 x1.0>1", "x1.0<0 F1.0"], FakeCosts(), CONTENTION)[1, "F1.0"] == 3


def test_a_later_activity_slows_down_a_running_one():
    """The first is half done when the second starts; it needs 1 s for the other half, the second 0.5 s more by itself."""
    result = stops(["x1.0>1 F0.0", "x1.0<0 F1.0"], FakeCosts(link_s=0.5), CONTENTION)
    assert (result[0, "F0.0"], result[1, "F1.0"]) == (1.5, 2.0)


def test_ranks_of_two_hosts_do_not_contend():
    cluster = Cluster(levels=(Level("host", 1, Link()), Level("network", 2, Link())), compute_contention=(1.0, 0.5))
    assert set(stops(["F0.0", "F1.0"], FakeCosts(), cluster).values()) == {1}


def test_a_server_and_its_worker_share_their_core():
    """Server and worker compute from 1 to 3, then the server replies."""
    rows = ["push(grad0)>1 F0.0 pull(weight0)<1", "apply_and_reply(0)@0"]
    result = stops(rows, FakeCosts(link_s=0.0, server_update_s=(1, 1)), CONTENTION)
    assert (result[0, "F0.0"], result[1, "apply_and_reply(0)@0"]) == (2, 3)


def test_two_flows_on_one_nic_each_have_half_of_it():
    result = stops(["x1.0>2", "x1.1>3", "x1.0<0", "x1.1<1"], SharedLinkCosts(2), NICS)
    assert result == {(0, "x1.0>2"): 4, (1, "x1.1>3"): 4}


def test_a_later_flow_has_half_of_a_nic_until_the_first_one_ends():
    result = stops(["x1.0>2", "F0.0 x1.1>3", "x1.0<0", "x1.1<1"], SharedLinkCosts(2), NICS)
    assert (result[0, "x1.0>2"], result[1, "x1.1>3"]) == (3, 4)


def test_latency_uses_no_bandwidth_of_a_nic():
    result = stops(["x1.0>2", "x1.1>3", "x1.0<0", "x1.1<1"], SharedLinkCosts(2, apart_s=1), NICS)
    assert set(result.values()) == {5}


def test_the_two_directions_of_a_nic_are_independent():
    assert set(stops(["x1.0>2", "x1.1<3", "x1.0<0", "x1.1>1"], SharedLinkCosts(2), NICS).values()) == {2}


def test_flows_into_one_host_share_its_nic():
    cluster = Cluster(levels=(HOSTS[0], Level("network", 3, Link(0.0, 10.0), is_shared=True)))
    rows = ["x1.0>4", "", "x1.1>5", "", "x1.0<0", "x1.1<2"]
    assert set(stops(rows, SharedLinkCosts(2), cluster).values()) == {4}


def test_a_flow_inside_a_host_crosses_nothing():
    result = stops(["x1.0>1", "x1.0<0 x1.1>2", "x1.1<1"], SharedLinkCosts(2), NICS)
    assert result == {(0, "x1.0>1"): 2, (1, "x1.1>2"): 4}


def test_a_rank_uses_the_link_inside_its_host_while_it_sends_to_another_host():
    rows = ["x1.0>2 x1.1>1", "x1.1<0", "x1.0<0"]
    assert set(stops(rows, SharedLinkCosts(2), NICS).values()) == {2}


def test_messages_of_one_rank_out_of_its_host_are_sequential():
    result = stops(["x1.0>2 x1.1>3", "", "x1.0<0", "x1.1<0"], SharedLinkCosts(2), NICS)
    assert (result[0, "x1.0>2"], result[0, "x1.1>3"]) == (2, 4)


def test_two_concurrent_all_reduces_over_a_nic_each_take_twice_as_long():
    rows = ["all_reduce(grad0)@0,2", "all_reduce(grad1)@1,3", "all_reduce(grad0)@0,2", "all_reduce(grad1)@1,3"]
    assert set(stops(rows, SharedLinkCosts(2), NICS).values()) == {4}


def test_a_slow_nic_slows_down_all_its_flows():
    cluster = Cluster(levels=HOSTS, slow_links=((1, 1, 0.5),))
    assert cluster.link_among((0, 1)) == Link()
    assert cluster.link_among((1, 2)) == Link(0.0, 5.0)
    assert cluster.link_at(1, (0,)) == Link(0.0, 10.0)


@pytest.mark.parametrize(("plan_speeds", "step_s"), [((), 3), ((1.0, 0.5), 5), ((0.5,), 5)])
def test_a_step_waits_for_a_rank_that_is_half_as_fast(plan_speeds, step_s):
    rows = ["F0.0 B0.0 all_reduce(grad0)@0,1", "F0.1 B0.1 all_reduce(grad0)@0,1"]
    assert simulate(program(*rows), FakeCosts(), Cluster(speeds=plan_speeds)).step_s == step_s


def test_a_slow_rank_recomputes_as_slowly_as_it_computes():
    rows = ["F0.0 R0.0 B0.0"]
    assert simulate(program(*rows), FakeCosts(), Cluster(speeds=(0.5,))).step_s == 6
