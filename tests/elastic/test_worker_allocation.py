"""Who works where, when several jobs share workers."""

import pytest

from counterpoint.elastic.worker_allocation import JobDemand, Reassignment, WorkerAllocator, fair_shares
from counterpoint.errors import PlanError


def test_a_job_that_cannot_have_its_least_waits():
    assert fair_shares(
        [JobDemand("first", min_workers=4), JobDemand("second", min_workers=3), JobDemand("third", min_workers=2)], 6
    ) == {
        "first": 4,
        "second": 0,
        "third": 2,
    }


def test_workers_that_no_job_can_use_stay_idle():
    assert fair_shares([JobDemand("first", max_workers=2)], 6) == {"first": 2}


def test_a_job_of_twice_the_weight_has_twice_the_workers():
    assert fair_shares([JobDemand("first", weight=2.0), JobDemand("second")], 6) == {"first": 4, "second": 2}


def test_what_a_job_leaves_goes_to_the_others():
    pool = WorkerAllocator([f"w{index}" for index in range(6)])
    pool.add_job(JobDemand("first", max_workers=4))
    moves = pool.add_job(JobDemand("second", max_workers=4))
    assert [(move.source, move.target) for move in moves] == [("", "second"), ("", "second"), ("first", "second")]
    assert [(move.source, move.target) for move in pool.remove_job("first")] == [
        ("first", "second"),
        ("first", ""),
        ("first", ""),
    ]


def test_a_worker_that_is_taken_away_is_replaced_by_who_can_be_spared():
    pool = WorkerAllocator(["a", "b", "c"])
    pool.add_job(JobDemand("first", min_workers=2))
    assert pool.add_job(JobDemand("second")) == [Reassignment("c", "first", "second")]
    assert pool.remove_worker("a") == [Reassignment("c", "second", "first")]
    assert pool.add_worker("d") == [Reassignment("d", "", "second")]


def test_a_job_begins_once():
    pool = WorkerAllocator(["a"])
    pool.add_job(JobDemand("first"))
    with pytest.raises(PlanError, match="is already running"):
        pool.add_job(JobDemand("first"))
    with pytest.raises(PlanError, match="is invalid"):
        JobDemand("second", min_workers=2, max_workers=1)
