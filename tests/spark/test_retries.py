"""Where Spark gives up a job the run goes on from the last slices that came to the driver, as often as was said."""

from dataclasses import replace

import pytest

from counterpoint import LaunchError, PlanError
from counterpoint.spark.samples import inspect_local, pack_local
from counterpoint.spark.shuffle import LocalShuffle
from counterpoint.spark.training import SparkTraining
from counterpoint.spark.training_loop import SparkOptions
from counterpoint.spark.training_spec import LocalBytes
from tests.spark.training_helpers import (
    TOLERANCE,
    Adam,
    make_net,
    make_samples,
    max_relative_difference,
    mse,
    split_partitions,
    train_single_process,
)

DATA = make_samples(23)
TEN = SparkOptions(batch_size=7, epochs=3, max_steps=10, snapshot_every=4)


class FailingShuffle(LocalShuffle):
    """Gives up some jobs, by their number."""

    def __init__(self, parcels, *numbers):
        super().__init__(parcels)
        self.numbers, self.jobs = set(numbers), 0

    def collect_reports(self, data, label):
        self.jobs += 1
        if self.jobs in self.numbers:
            raise LaunchError(f"Spark aborted {label}: Job aborted")
        return super().collect_reports(data, label)


def train_with_failures(options, *numbers):
    model, partitions, taken = make_net(), split_partitions(DATA, 9), []
    training = SparkTraining(model, mse, Adam, options, len(partitions))
    parcels = pack_local(partitions, training.layout.dtype)
    exchange, recipe = FailingShuffle(parcels, *numbers), training.make_spec(LocalBytes(training.constants))
    done = training.run(exchange, recipe, inspect_local(parcels), on_step=lambda one: taken.append(one.progress.step))
    return model, done, taken


def test_the_numbers_are_those_of_a_run_that_was_not_disturbed():
    with pytest.warns(RuntimeWarning, match="Spark aborted .* of step 6: Job aborted; restarting from step 4"):
        model, done, taken = train_with_failures(
            replace(TEN, max_retries=1), 14
        )  # two jobs a step: the second of step 6
    expected, losses = train_single_process(DATA, TEN)
    assert max_relative_difference(model, expected) < TOLERANCE
    assert done.losses == pytest.approx(losses, rel=TOLERANCE)
    assert taken == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9, 10]


def test_before_any_slices_have_come_it_begins_anew():
    with pytest.warns(RuntimeWarning, match="restarting from step 0"):
        model, done, taken = train_with_failures(replace(TEN, max_retries=1), 5)
    assert len(done.losses) == 10
    assert taken == [1, 2, *range(1, 11)]
    assert max_relative_difference(model, train_single_process(DATA, TEN)[0]) < TOLERANCE


@pytest.mark.filterwarnings("ignore:Spark aborted:RuntimeWarning")
@pytest.mark.parametrize("retries", [0, 2])
def test_once_more_than_was_said_it_is_an_error(retries):
    with pytest.raises(LaunchError, match="Spark aborted"):
        train_with_failures(replace(TEN, max_retries=retries), *range(3, 4 + retries))


@pytest.mark.parametrize("retries", [-1, True, 1.5])
def test_what_is_no_number_of_times_is_refused(retries):
    with pytest.raises(PlanError, match="is not a count"):
        replace(TEN, max_retries=retries)
