"""Bucket sizes are tried by the time of the device, which the host reads once, after the last trial."""

import itertools

import pytest

from counterpoint.testing.device_survey import batches, make_step
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore")


def autotuners_of(step):
    """Return the autotuner of each rank."""
    overlaps = [rank.interpreter.communication.overlap for rank in step.local_ranks.ranks.values()]
    return [one.bucket_plan.autotuner for overlap in overlaps for found in overlap.reducers.values() for one in found]


def test_trials_take_the_time_of_the_device_and_wait_once():
    """The host's clock told how long it takes to launch a step."""
    step, _ = make_step("mlp", "data(2, bucket=512, first_bucket=256, tune=on) + overlap", StandInAccelerator())
    samples = itertools.cycle(list(batches("mlp")))
    with step:
        for batch in itertools.islice(samples, 5):
            step(*batch)
        tuners = autotuners_of(step)
        assert [one.num_candidates > 1 for one in tuners] == [True, True]
        with DEVICE.count_host_waits(max_operations_behind=60) as waits:
            while not tuners[0].is_done:
                step(*next(samples))
        assert waits.total() == 0
        times = [time() for one in tuners for of_one in one.seconds.values() for time in of_one]
        assert min(times) >= 0.05  # a step has more than 50 operations of a millisecond each
        assert all(abs(seconds * 1e3 - round(seconds * 1e3)) < 1e-6 for seconds in times)
        step(*next(samples))
        assert [one.num_candidates for one in autotuners_of(step)] == [1, 1]
