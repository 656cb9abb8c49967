"""Costs of an algorithm: the closed formula equals the traffic counted from its schedule, and the predicted time."""

import pytest
from hypothesis import given, settings, strategies as st

from counterpoint.fabric.collectives import ALGORITHMS, ChunkLayout, HostLinks, count_traffic, formulas
from counterpoint.fabric.collectives.algorithms import (
    butterfly,
    double_tree,
    fixed_tree,
    halving_doubling,
    hierarchical,
    pipelined_ring,
    ring,
    shard_owners,
    torus,
)
from counterpoint.fabric.collectives.choose import predict_s
from counterpoint.fabric.collectives.execute import num_steps
from counterpoint.world.cluster import Link
from tests.covering import given_few_or_many

LENGTHS = st.one_of(st.integers(0, 40), st.integers(41, 10**9))
LINK = Link(latency_s=1e-3, bytes_per_s=1e3)
INNER = {butterfly: formulas.butterfly, halving_doubling: formulas.halving_doubling, ring: formulas.ring,
         torus: formulas.torus, double_tree: formulas.double_tree}  # fmt: skip


def check_cost(schedule, cost, extent, group=None):
    """Steps, messages and elements of every rank are what the formula says."""
    counts = [counts for _, counts in sorted(count_traffic(schedule, extent, group=group).items())]
    assert num_steps(schedule, group) == cost.steps
    assert tuple(one.num_messages for one in counts) == cost.messages
    assert tuple(one.sent_bytes for one in counts) == cost.elements


@pytest.mark.long(quick=["star-8", "ring-7", "pipelined_ring-9", "torus-6"])
@pytest.mark.parametrize("num_ranks", range(1, 18))
@pytest.mark.parametrize("name", ALGORITHMS)
@given(length=LENGTHS)
@settings(max_examples=5)
def test_counts_are_what_the_closed_formula_says(name, num_ranks, length):
    algorithm, extent = ALGORITHMS[name], ChunkLayout(length)
    cost = algorithm.cost(num_ranks, extent)
    check_cost(algorithm.schedule(num_ranks), cost, extent, algorithm.group(num_ranks))


@given_few_or_many(20, 100, st.integers(1, 70), st.integers(1, 5), LENGTHS)
def test_so_they_are_for_pipelines_of_any_depth(num_ranks, num_pieces, length):
    extent = ChunkLayout(length)
    check_cost(double_tree(num_ranks, num_pieces), formulas.double_tree(num_ranks, extent, num_pieces), extent)
    few = min(num_ranks, 9)
    check_cost(pipelined_ring(few, num_pieces), formulas.pipelined_ring(few, extent, num_pieces), extent)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=17), st.sampled_from(list(INNER)), LENGTHS)
def test_so_they_are_for_hosts_of_any_sizes_in_any_order(hosts, inter, length):
    check_cost(
        hierarchical(hosts, inter), formulas.hierarchical(hosts, ChunkLayout(length), INNER[inter]), ChunkLayout(length)
    )


@given(st.integers(1, 40), st.integers(1, 40), LENGTHS)
def test_so_they_are_for_shards_of_any_number_on_ranks_of_any_number(num_ranks, more, length):
    holders = shard_owners(num_ranks - 1 + more, num_ranks)
    check_cost(
        fixed_tree(len(holders)), formulas.fixed_tree(holders, ChunkLayout(length)), ChunkLayout(length), holders
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_shards_dealt_evenly_cost_what_a_tree_of_their_ranks_costs(num_ranks):
    extent = ChunkLayout(100)
    assert formulas.fixed_tree(shard_owners(8, num_ranks), extent) == formulas.binomial_tree(num_ranks, extent)


@pytest.mark.parametrize("num_ranks", range(1, 18))
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if "fixed_tree" not in name])
def test_a_rank_sends_at_most_one_message_in_a_step_and_receives_at_most_one(name, num_ranks):
    for moves in ALGORITHMS[name].schedule(num_ranks).rounds:
        for ends in ([move.sender for move in moves], [move.receiver for move in moves]):
            assert len(set(ends)) == len(ends)
        assert all(move.sender != move.receiver for move in moves)


@pytest.mark.parametrize("num_ranks", range(1, 18))
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if "fixed_tree" not in name])
def test_the_closed_time_is_that_of_the_moves(name, num_ranks):
    algorithm = ALGORITHMS[name]
    schedule = algorithm.schedule(num_ranks)
    length = 24 * schedule.num_chunks
    moved_s = predict_s(schedule, length, HostLinks(tuple(range(num_ranks)), LINK, LINK, reduce_bytes_per_s=2e3))
    cost = algorithm.cost(num_ranks, ChunkLayout(length))
    hidden_s = cost.path_added / 2e3 if cost.hides_adding else 0.0
    assert moved_s == pytest.approx(cost.seconds(LINK, 1, 2e3) + hidden_s)


@given(st.integers(2, 17), st.integers(0, 10**6))
def test_a_ring_sends_the_least_that_is_possible(num_ranks, length):
    sent = formulas.ring(num_ranks, ChunkLayout(length)).elements
    assert sum(sent) == 2 * (num_ranks - 1) * length


def test_elements_and_bytes_differ_by_the_size_of_an_element():
    counts = count_traffic(ring(4), ChunkLayout(10), element_bytes=8)
    assert [one.sent_bytes for one in counts.values()] == [
        8 * sent for sent in formulas.ring(4, ChunkLayout(10)).elements
    ]
