"""The algorithm that the cost model predicts to be the cheapest is chosen and built."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from counterpoint.errors import PlanError
from counterpoint.fabric.collectives import HostLinks, choose_algorithm, interpret
from counterpoint.fabric.collectives.algorithms import ring
from counterpoint.fabric.collectives.choose import predict_s
from counterpoint.world.cluster import Link
from tests.covering import given_few_or_many

NEAR = Link(latency_s=2e-6, bytes_per_s=5e9)
FAR = Link(latency_s=100e-6, bytes_per_s=125e6)


def flat(num_ranks, link=FAR):
    return HostLinks(tuple(range(num_ranks)), link, link, reduce_bytes_per_s=10e9)


def test_small_values_take_few_steps_and_large_ones_few_bytes():
    assert choose_algorithm(64, flat(8)).name == "butterfly()"
    assert choose_algorithm(1 << 20, flat(8)).name == "halving_doubling()"
    assert choose_algorithm(64 << 20, flat(6)).name in {"ring()", "torus()", "pipelined_ring(num_segments=2)"}


def test_one_rank_has_nothing_to_wait_for():
    assert choose_algorithm(1 << 20, flat(1)).seconds == 0.0


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1, 1, 1, 2, 2)])
def test_large_values_on_hosts_of_several_ranks_are_reduced_hierarchically(hosts):
    assert choose_algorithm(16 << 20, HostLinks(hosts, NEAR, FAR)).name.startswith("hierarchical")


def test_across_two_hosts_a_flat_ring_sends_1_5_times_as_much_in_order_and_3_times_alternating():
    slow = Link(latency_s=0.0, bytes_per_s=1.0)
    fast = Link(latency_s=0.0, bytes_per_s=1e15)
    best = choose_algorithm(1200, HostLinks((0, 0, 1, 1), fast, slow)).seconds
    in_order, in_turns = (
        predict_s(ring(4), 1200, HostLinks(hosts, fast, slow)) for hosts in ((0, 0, 1, 1), (0, 1, 0, 1))
    )
    assert (best, in_order, in_turns) == pytest.approx((1200, 1800, 3600))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 1 << 24))
def test_what_is_chosen_adds_up(hosts, num_bytes):
    schedule = choose_algorithm(num_bytes, HostLinks(tuple(hosts), NEAR, FAR)).schedule()
    results = interpret(schedule, [np.full(7, 2**rank) for rank in range(len(hosts))])
    assert all((result == 2 ** len(hosts) - 1).all() for result in results)


@given_few_or_many(10, 100, st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_a_larger_value_never_takes_less_time(hosts):
    network = HostLinks(tuple(hosts), NEAR, FAR, reduce_bytes_per_s=1e9)
    times = [choose_algorithm(1 << power, network).seconds for power in range(0, 28, 3)]
    assert all(less <= more for less, more in pairwise(times))


def test_slow_addition_overlaps_with_the_link():
    network = HostLinks(tuple(range(8)), FAR, FAR, reduce_bytes_per_s=150e6)
    assert choose_algorithm(256 << 20, network).name.startswith("pipelined_ring")


def test_halving_and_doubling_is_hierarchical_where_hosts_are_in_order_and_powers_of_two():
    """Its first exchanges stay within a host, and are fewer than a host's pairwise ones."""
    assert (
        choose_algorithm(1 << 20, HostLinks(tuple(rank // 8 for rank in range(64)), NEAR, FAR)).name
        == "halving_doubling()"
    )
    assert choose_algorithm(1 << 20, HostLinks(tuple(rank % 8 for rank in range(64)), NEAR, FAR)).name.startswith(
        "hierarchical"
    )


def test_hundreds_of_ranks_are_chosen_for_at_once():
    assert choose_algorithm(1 << 20, flat(1000)).seconds > 0
    assert choose_algorithm(1 << 20, HostLinks(tuple(rank % 32 for rank in range(256)), NEAR, FAR)).seconds > 0


def test_no_ranks_at_all_are_refused():
    with pytest.raises(PlanError, match="there are no ranks to reduce over"):
        choose_algorithm(1, HostLinks((), NEAR, FAR))
