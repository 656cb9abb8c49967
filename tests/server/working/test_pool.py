"""Who works where, when several jobs share workers."""

import pytest

from counterpoint.errors import PlanError
from counterpoint.server.working.pool import Move, Pool, Want, shares


def test_a_job_that_cannot_have_its_least_waits():
    assert shares([Want("first", least=4), Want("second", least=3), Want("third", least=2)], 6) == {
        "first": 4,
        "second": 0,
        "third": 2,
    }


def test_workers_that_nobody_can_use_stay_idle():
    assert shares([Want("first", most=2)], 6) == {"first": 2}


def test_a_job_of_twice_the_weight_has_twice_the_workers():
    assert shares([Want("first", weight=2.0), Want("second")], 6) == {"first": 4, "second": 2}


def test_what_a_job_leaves_goes_to_the_others():
    pool = Pool([f"w{index}" for index in range(6)])
    pool.begin(Want("first", most=4))
    moves = pool.begin(Want("second", most=4))
    assert [(move.source, move.target) for move in moves] == [("", "second"), ("", "second"), ("first", "second")]
    assert [(move.source, move.target) for move in pool.end("first")] == [
        ("first", "second"),
        ("first", ""),
        ("first", ""),
    ]


def test_a_worker_that_is_taken_away_is_replaced_by_who_can_be_spared():
    pool = Pool(["a", "b", "c"])
    pool.begin(Want("first", least=2))
    assert pool.begin(Want("second")) == [Move("c", "first", "second")]
    assert pool.leave("a") == [Move("c", "second", "first")]
    assert pool.enter("d") == [Move("d", "", "second")]


def test_a_job_begins_once():
    pool = Pool(["a"])
    pool.begin(Want("first"))
    with pytest.raises(PlanError, match="has begun already"):
        pool.begin(Want("first"))
    with pytest.raises(PlanError, match="cannot be meant"):
        Want("second", least=2, most=1)
