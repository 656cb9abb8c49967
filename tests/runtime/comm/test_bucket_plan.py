"""When each bucket size is tried, and which one is adopted."""

import logging

import pytest

from counterpoint.fabric.local import LocalWorld
from counterpoint.runtime.comm.bucket_plan import BucketAutotuner, BucketPlan, GradSize, choose_fastest
from counterpoint.strategies.buckets import BucketConfig

SIZES = BucketConfig(bucket_bytes=8, first_bytes=8)
ORDER = [0.003, 0.002, 0.001, 0.0]


def test_every_candidate_is_tried_equally_often_and_not_measured_in_its_first_step():
    autotuner = BucketAutotuner(3)
    while not autotuner.is_done:
        autotuner.record(1.0)
    assert {candidate: len(seconds) for candidate, seconds in autotuner.seconds.items()} == {0: 6, 1: 6, 2: 6}


def test_the_first_steps_are_not_measured():
    autotuner = BucketAutotuner(2, warm_up=3, num_rounds=1, num_steps=2)
    for seconds in (9.0, 9.0, 9.0, 5.0, 1.0, 5.0, 2.0):
        autotuner.record(seconds)
    assert autotuner.is_done
    assert autotuner.medians() == [1.0, 2.0]


@pytest.mark.parametrize(("seconds", "chosen"), [([1.0, 0.5], 1), ([1.0, 0.98], 0), ([1.0, 1.0], 0), ([1.0, 2.0], 0)])
def test_the_current_size_stays_unless_another_is_faster_by_more_than_noise(seconds, chosen):
    assert choose_fastest(seconds) == chosen


def run_steps(fabric, seconds_of, sizes=SIZES, num_steps=60):
    """Agree on the order of four gradients of 4 bytes, then try sizes for so many steps; return the agreement."""
    bucket_plan = BucketPlan(fabric, (0, 1), sizes, [GradSize(0, 4)] * 4, "grad0")
    for _ in range(num_steps):
        bucket_plan.start_sync(ORDER if fabric.rank == 0 else ORDER[::-1])
        seconds = seconds_of(fabric.rank, len(bucket_plan.assignment))
        bucket_plan.finish_sync()
        if bucket_plan.is_tuning:
            bucket_plan.autotuner.record(seconds)
    return bucket_plan


def test_all_members_use_the_order_of_the_first():
    with LocalWorld(2) as world:
        assignments = world.run(lambda fabric: run_steps(fabric, lambda *_: 1.0, num_steps=1).assignments[0])
    assert assignments == [((3, 2), (1, 0))] * 2


def test_members_that_measure_different_times_adopt_the_same_buckets(caplog):
    """Rank 0 is fast with four buckets, rank 1 with one; the slower of both counts."""
    with LocalWorld(2) as world, caplog.at_level(logging.INFO, "counterpoint.buckets"):
        times = ({1: 1.0, 2: 1.0, 4: 0.1}, {1: 0.5, 2: 1.0, 4: 0.6})
        assignments = world.run(
            lambda fabric: run_steps(fabric, lambda rank, count: times[rank].get(count, 1.0)).assignment
        )
    assert assignments == [((3,), (2,), (1,), (0,))] * 2
    assert [bucket_plan.getMessage() for bucket_plan in caplog.records] == [
        "grad0: buckets of 2B instead of 8B, 4 instead of 2 of them: 600.0 ms a step instead of 1000.0"
    ]


def test_without_tuning_nothing_is_tried_or_logged(caplog):
    with LocalWorld(2) as world, caplog.at_level(logging.INFO, "counterpoint.buckets"):
        kept = BucketConfig(8, 8, tune=False)
        assignments = world.run(lambda fabric: run_steps(fabric, lambda _, count: 1 / (count + 1), kept).candidates)
    assert assignments == [[kept]] * 2
    assert not caplog.records
