"""Which size of buckets is tried when, and what comes of the times."""

import logging

import pytest

from counterpoint.fabric.local import LocalWorld
from counterpoint.runtime.comm.bucket_plan import BucketAutotuner, BucketPlan, GradSize, choose_fastest
from counterpoint.strategies.buckets import BucketConfig

SIZES = BucketConfig(bucket_bytes=8, first_bytes=8)
ORDER = [0.003, 0.002, 0.001, 0.0]


def test_every_way_is_tried_equally_often_and_never_counts_in_its_first_step():
    trials = BucketAutotuner(3)
    while not trials.is_done:
        trials.record(1.0)
    assert {way: len(seconds) for way, seconds in trials.seconds.items()} == {0: 6, 1: 6, 2: 6}


def test_the_first_steps_count_for_nothing():
    trials = BucketAutotuner(2, warm_up=3, num_rounds=1, num_steps=2)
    for seconds in (9.0, 9.0, 9.0, 5.0, 1.0, 5.0, 2.0):
        trials.record(seconds)
    assert trials.is_done
    assert trials.medians() == [1.0, 2.0]


@pytest.mark.parametrize(("seconds", "chosen"), [([1.0, 0.5], 1), ([1.0, 0.98], 0), ([1.0, 1.0], 0), ([1.0, 2.0], 0)])
def test_what_there_is_stays_unless_something_is_faster_by_more_than_noise(seconds, chosen):
    assert choose_fastest(seconds) == chosen


def agreed(fabric, seconds_of, sizes=SIZES, num_steps=60):
    """Agree on the order of four gradients of 4 bytes, then try sizes for so many steps; return the agreement."""
    one = BucketPlan(fabric, (0, 1), sizes, [GradSize(0, 4)] * 4, "grad0")
    for _ in range(num_steps):
        one.start_sync(ORDER if fabric.rank == 0 else ORDER[::-1])
        seconds = seconds_of(fabric.rank, len(one.assignment))
        one.finish_sync()
        if one.is_tuning:
            one.autotuner.record(seconds)
    return one


def test_the_order_of_the_first_member_is_everybodys():
    with LocalWorld(2) as world:
        found = world.run(lambda fabric: agreed(fabric, lambda *_: 1.0, num_steps=1).assignments[0])
    assert found == [((3, 2), (1, 0))] * 2


def test_members_that_measure_different_times_go_on_with_the_same_buckets(caplog):
    """Rank 0 is fast with four buckets, rank 1 with one; the slower of both counts."""
    with LocalWorld(2) as world, caplog.at_level(logging.INFO, "counterpoint.buckets"):
        times = ({1: 1.0, 2: 1.0, 4: 0.1}, {1: 0.5, 2: 1.0, 4: 0.6})
        found = world.run(lambda fabric: agreed(fabric, lambda rank, count: times[rank].get(count, 1.0)).assignment)
    assert found == [((3,), (2,), (1,), (0,))] * 2
    assert [one.getMessage() for one in caplog.records] == [
        "grad0: buckets of 2B instead of 8B, 4 instead of 2 of them: 600.0 ms a step instead of 1000.0"
    ]


def test_without_tuning_nothing_is_tried_and_nothing_said(caplog):
    with LocalWorld(2) as world, caplog.at_level(logging.INFO, "counterpoint.buckets"):
        kept = BucketConfig(8, 8, tune=False)
        found = world.run(lambda fabric: agreed(fabric, lambda _, count: 1 / (count + 1), kept).candidates)
    assert found == [[kept]] * 2
    assert not caplog.records
