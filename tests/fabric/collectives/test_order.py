"""Schedules do not deadlock, even if a send returns only when its message has been received."""

import pytest
from hypothesis import given, strategies as st

from counterpoint.fabric.collectives import ALGORITHMS, AllReduceSchedule, ChunkTransfer, rank_schedule
from counterpoint.fabric.collectives.algorithms import fixed_tree, hierarchical, ring, shard_owners
from counterpoint.fabric.collectives.schedule import endpoints


def stuck(schedule, group):
    """Where each rank waits at last; a move happens when it is the next one of both its ends."""
    rows = {rank: rank_schedule(schedule, group, rank) for rank in set(group)}
    ahead = {rank: [move for step in row.steps for move in step][::-1] for rank, row in rows.items()}
    while ready := [
        moves[-1] for moves in ahead.values()
        if moves and all(ahead[rank] and ahead[rank][-1] is moves[-1] for rank in endpoints(moves[-1], group))
    ]:  # fmt: skip
        for move in {id(move): move for move in ready}.values():
            for rank in set(endpoints(move, group)):
                ahead[rank].pop()
    return {rank: moves[-1] for rank, moves in ahead.items() if moves}


@pytest.mark.long(quick=["star-8", "ring-7", "pipelined_ring-9", "torus-6"])
@pytest.mark.parametrize("num_ranks", range(1, 18))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_rank_is_left_waiting(name, num_ranks):
    algorithm = ALGORITHMS[name]
    assert stuck(algorithm.schedule(num_ranks), algorithm.group(num_ranks)) == {}


@given(st.lists(st.integers(0, 3), min_size=1, max_size=17))
def test_no_rank_is_left_waiting_on_any_hosts(hosts):
    assert stuck(hierarchical(hosts), tuple(range(len(hosts)))) == {}


@given(st.integers(1, 9), st.integers(0, 9))
def test_no_rank_is_left_waiting_over_any_shards(num_ranks, more):
    assert stuck(fixed_tree(num_ranks + more), shard_owners(num_ranks + more, num_ranks)) == {}


def test_in_an_exchange_the_lower_rank_sends_first():
    both = (ChunkTransfer(1, 0, range(1), "add"), ChunkTransfer(0, 1, range(1), "add"))
    lower, upper = (rank_schedule(AllReduceSchedule(2, 1, (both[::-1],)), (0, 1), rank).steps[0] for rank in (0, 1))
    assert ([move.sender for move in lower], [move.sender for move in upper]) == ([0, 1], [0, 1])


def test_a_ring_needs_two_colors_and_three_for_an_odd_number_of_ranks():
    firsts = [[rank_schedule(ring(num), range(num), rank).steps[0][0].sender for rank in range(num)] for num in (4, 5)]
    assert firsts == [[0, 0, 2, 2], [0, 0, 2, 2, 3]]


def test_a_schedule_reads_as_its_rows():
    assert str(ring(2)).splitlines() == ["0  1>1,0+<1 0>1,1=<1", "1  1+<0,0>0 0=<0,1>0"]
