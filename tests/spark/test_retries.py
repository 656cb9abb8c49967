"""Where Spark gives up a job the run goes on from the last slices that came to the driver, as often as was said."""

from dataclasses import replace

import pytest

from counterpoint import LaunchError, PlanError
from counterpoint.spark.driver import Options
from counterpoint.spark.exchange import Here
from counterpoint.spark.recipe import Known
from counterpoint.spark.samples import looks_here, packed_here
from counterpoint.spark.training import Training
from tests.spark.subjects import BAR, Adam, cut, distance, mse, net, samples, solo

DATA = samples(23)
TEN = Options(batch_size=7, epochs=3, max_steps=10, cut_every=4)


class Failing(Here):
    """Gives up some jobs, by their number."""

    def __init__(self, parcels, *numbers):
        super().__init__(parcels)
        self.numbers, self.jobs = set(numbers), 0

    def notes(self, held, label):
        self.jobs += 1
        if self.jobs in self.numbers:
            raise LaunchError(f"Spark gave up {label}: Job aborted")
        return super().notes(held, label)


def trained(options, *numbers):
    model, partitions, taken = net(), cut(DATA, 9), []
    training = Training(model, mse, Adam, options, len(partitions))
    parcels = packed_here(partitions, training.layout.dtype)
    exchange, recipe = Failing(parcels, *numbers), training.recipe(Known(training.still))
    done = training.run(exchange, recipe, looks_here(parcels), on_step=lambda one: taken.append(one.progress.step))
    return model, done, taken


def test_the_numbers_are_those_of_a_run_that_was_not_disturbed():
    with pytest.warns(RuntimeWarning, match="Spark gave up .* of step 6: Job aborted; going on from step 4"):
        model, done, taken = trained(replace(TEN, retries=1), 14)  # two jobs a step: the second of step 6
    expected, losses = solo(DATA, TEN)
    assert distance(model, expected) < BAR
    assert done.losses == pytest.approx(losses, rel=BAR)
    assert taken == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9, 10]


def test_before_any_slices_have_come_it_begins_anew():
    with pytest.warns(RuntimeWarning, match="going on from step 0"):
        model, done, taken = trained(replace(TEN, retries=1), 5)
    assert len(done.losses) == 10
    assert taken == [1, 2, *range(1, 11)]
    assert distance(model, solo(DATA, TEN)[0]) < BAR


@pytest.mark.filterwarnings("ignore:Spark gave up:RuntimeWarning")
@pytest.mark.parametrize("retries", [0, 2])
def test_once_more_than_was_said_it_is_an_error(retries):
    with pytest.raises(LaunchError, match="Spark gave up"):
        trained(replace(TEN, retries=retries), *range(3, 4 + retries))


@pytest.mark.parametrize("retries", [-1, True, 1.5])
def test_what_is_no_number_of_times_is_refused(retries):
    with pytest.raises(PlanError, match="is no number of times"):
        replace(TEN, retries=retries)
