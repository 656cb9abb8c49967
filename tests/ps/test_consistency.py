import pytest
import torch
from hypothesis import given, strategies as st

from counterpoint.errors import ProtocolError
from counterpoint.ps.consistency import ConsistencyTracker, IntervalSet
from counterpoint.ps.job_config import Asp, Bsp, Ssp
from counterpoint.ps.messages import PushRequest, RequestHeader


def push(slice_index=-1, read=0):
    return PushRequest(RequestHeader("worker", 1, 1), 0, "weight", slice_index, read, torch.zeros(1))


def counted(tally, worker, one):
    return tally.record(worker, one, is_duplicate=tally.is_duplicate(worker, one))


@given(st.permutations(range(9)).map(lambda order: order[:7]))
def test_runs_hold_what_was_added_and_nothing_else(numbers):
    runs = IntervalSet()
    for number in numbers:
        runs.add(number)
    assert {number for number in range(-1, 10) if number in runs} == set(numbers)
    assert runs.bounds == sorted(runs.bounds)
    assert len(set(runs.bounds)) == len(runs.bounds)


def test_a_step_is_due_when_its_last_slice_is_there_whatever_the_order():
    tally = ConsistencyTracker(Bsp(3))
    assert [counted(tally, "worker", push(slice_index)) for slice_index in (2, 0, 1)] == [False, False, True]
    assert tally.version == 1


def test_a_slice_counts_once_whoever_pushes_it():
    tally = ConsistencyTracker(Asp())
    assert counted(tally, "first", push(4))
    assert not counted(tally, "second", push(4))
    assert tally.version == 1


def test_a_slice_of_a_step_to_come_is_refused():
    with pytest.raises(ProtocolError, match="staleness: slice 3 of step 1"):
        ConsistencyTracker(Bsp(3)).is_duplicate("worker", push(3))


def test_bsp_refuses_a_push_without_its_data():
    with pytest.raises(ProtocolError, match="without a slice index"):
        ConsistencyTracker(Bsp(3)).is_duplicate("worker", push())


def test_nobody_has_read_a_version_that_is_not_there_yet():
    with pytest.raises(ProtocolError, match="at version 1, where version 0"):
        ConsistencyTracker(Asp()).is_duplicate("worker", push(read=1))


def test_the_fastest_waits_at_the_staleness_and_continues_with_the_slowest():
    tally = ConsistencyTracker(Ssp(1))
    tally.join_clock("fast")
    tally.join_clock("slow")
    counted(tally, "fast", push(0, 0))
    assert tally.can_read("fast", 0)
    counted(tally, "fast", push(1, 1))
    assert not tally.can_read("fast", 0)
    counted(tally, "slow", push(2, 0))
    assert tally.can_read("fast", 0)


def test_a_gradient_that_is_too_old_is_refused_when_it_would_be_applied():
    tally = ConsistencyTracker(Ssp(0))
    tally.join_clock("fast")
    tally.join_clock("slow")
    counted(tally, "fast", push(0, 0))
    with pytest.raises(ProtocolError, match="staleness: push 2 of fast to weight, computed from version 0"):
        tally.is_duplicate("fast", push(1, 0))


def test_nobody_waits_for_one_who_rests_or_before_it_enters():
    tally = ConsistencyTracker(Ssp(0))
    tally.join_clock("fast")
    tally.join_clock("slow")
    counted(tally, "fast", push(0, 0))
    tally.leave_clock(["slow"])
    assert tally.can_read("fast", 0)
    tally.join_clock("slow")
    assert tally.clocks == {"fast": 1, "slow": 1}


def test_only_those_who_have_entered_push():
    with pytest.raises(ProtocolError, match="has not joined the clock"):
        ConsistencyTracker(Ssp(0)).is_duplicate("worker", push(0))
