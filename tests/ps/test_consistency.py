import pytest
from hypothesis import given, strategies as st

from counterpoint.errors import PlanError, ProtocolError
from counterpoint.ps.consistency import (
    NO_SLICE,
    Asp,
    Bsp,
    ConsistencyTracker,
    IntervalSet,
    Ssp,
    allows_lead,
    parse_consistency,
)


def make_tracker(consistency, *workers):
    tracker = ConsistencyTracker(consistency, "weight")
    for worker in workers:
        tracker.join_clock(worker)
    return tracker


def push(tracker, worker, slice_index=NO_SLICE, read=0):
    tracker.check_push(worker, read, slice_index)
    return tracker.record(worker, slice_index, is_counted=not tracker.is_duplicate(slice_index))


@given(st.permutations(range(9)).map(lambda order: order[:7]))
def test_runs_hold_what_was_added_and_nothing_else(numbers):
    runs = IntervalSet()
    for number in numbers:
        runs.add(number)
    assert {number for number in range(-1, 10) if number in runs} == set(numbers)
    assert runs.bounds == sorted(runs.bounds)
    assert len(set(runs.bounds)) == len(runs.bounds)


def test_a_step_is_due_when_its_last_slice_is_there_whatever_the_order():
    tracker = make_tracker(Bsp(3))
    assert [push(tracker, "worker", slice_index) for slice_index in (2, 0, 1)] == [False, False, True]
    assert tracker.version == 1


def test_a_slice_counts_once_from_any_worker():
    tracker = make_tracker(Asp())
    assert push(tracker, "first", 4)
    assert not push(tracker, "second", 4)
    assert tracker.version == 1


def test_a_slice_of_a_step_to_come_is_refused():
    with pytest.raises(ProtocolError, match="staleness: slice 3 of step 1"):
        push(make_tracker(Bsp(3)), "worker", 3)


def test_bsp_refuses_a_push_without_its_data():
    with pytest.raises(ProtocolError, match="without a slice index"):
        push(make_tracker(Bsp(3)), "worker")


def test_a_push_cannot_state_a_future_version():
    with pytest.raises(ProtocolError, match="at version 1, where version 0"):
        push(make_tracker(Asp()), "worker", read=1)


def test_the_fastest_waits_at_the_staleness_and_continues_with_the_slowest():
    tracker = make_tracker(Ssp(1), "fast", "slow")
    push(tracker, "fast", 0, 0)
    assert tracker.can_read("fast", 0)
    push(tracker, "fast", 1, 1)
    assert not tracker.can_read("fast", 0)
    push(tracker, "slow", 2, 0)
    assert tracker.can_read("fast", 0)


def test_a_gradient_that_is_too_old_is_refused_when_it_would_be_applied():
    tracker = make_tracker(Ssp(0), "fast", "slow")
    push(tracker, "fast", 0, 0)
    with pytest.raises(ProtocolError, match="staleness: push 2 of fast to weight, computed from version 0"):
        push(tracker, "fast", 1, 0)


def test_no_worker_waits_for_one_that_rests_or_has_not_joined():
    tracker = make_tracker(Ssp(0), "fast", "slow")
    push(tracker, "fast", 0, 0)
    tracker.leave_clock(["slow"])
    assert tracker.can_read("fast", 0)
    tracker.join_clock("slow")
    assert tracker.clocks == {"fast": 1, "slow": 1}


def test_only_those_who_have_entered_push():
    with pytest.raises(ProtocolError, match="has not joined the clock"):
        push(make_tracker(Ssp(0)), "worker", 0)


def test_a_worker_may_be_ahead_of_the_slowest_by_the_staleness_and_no_further():
    assert [allows_lead(2, lead) for lead in (0, 2, 3)] == [True, True, False]
    assert allows_lead(None, 100)


def test_a_push_without_data_advances_the_clock_and_not_the_version():
    tracker = make_tracker(Ssp(0), "fast", "slow")
    assert not tracker.record("fast", is_counted=False)
    assert (tracker.version, tracker.clocks) == (0, {"fast": 1, "slow": 0})
    assert not tracker.can_read("fast")


def test_the_former_spelling_names_the_new_one():
    with pytest.raises(PlanError, match=r"ssp\(2\) is now written consistency=ssp, staleness=2"):
        parse_consistency("ssp(2)", staleness=0, slices_per_step=4)
    assert parse_consistency("bsp", staleness=0, slices_per_step=4) == Bsp(4)
