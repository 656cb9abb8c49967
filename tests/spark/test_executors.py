"""Training in real executors: processes of Java, each with a Python worker of its own."""

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from counterpoint import LaunchError, PlanError
from counterpoint.runtime.vote import Guard
from counterpoint.spark.driver import Options
from counterpoint.spark.training import train
from tests.spark.models import Dying, Killing
from tests.spark.subjects import BAR, Adam, cut, distance, mse, net, samples, solo

pytestmark = [
    pytest.mark.lab,
    pytest.mark.process,
    pytest.mark.alone,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
DATA = samples(23)
TEN = Options(batch_size=7, epochs=3, max_steps=10)


def rows(spark, *sizes):
    """The data in partitions of these sizes, the rest in the last."""
    parts = cut(DATA, *sizes)
    return spark.sparkContext.parallelize(range(len(parts)), len(parts)).flatMap(lambda place: parts[place])


def trained(spark, *sizes, model=None, options=TEN, **more):
    model = model or net()
    done = train(rows(spark, *sizes), model, loss=mse, optimizer=Adam, options=options, **more)
    return model, done


def jobs_of(spark, work):
    """How many jobs Spark's status tracker has seen of what was done."""
    context = spark.sparkContext
    context.setJobGroup(work.__name__, "counted")
    work()
    return len(context.statusTracker().getJobIdsForGroup(work.__name__))


@pytest.fixture(scope="module")
def ten_steps(spark):
    """A run over three partitions, one of them empty; slices come to the driver in mid-run."""
    found = []

    def ten_steps():
        found.extend(trained(spark, 9, 0, options=replace(TEN, cut_every=4)))

    num_jobs = jobs_of(spark, ten_steps)
    return *found, num_jobs


def test_three_partitions_one_of_them_empty_end_where_solo_ends(ten_steps):
    model, done, _ = ten_steps
    expected, losses = solo(DATA, TEN)
    assert distance(model, expected) < BAR
    assert done.losses == pytest.approx(losses, rel=BAR)


def test_a_step_is_two_jobs(ten_steps):
    _, _, num_jobs = ten_steps
    assert num_jobs == 1 + 2 * 10  # the first looks at the samples


def test_a_step_sends_what_the_programs_formula_says(ten_steps):
    _, done, _ = ten_steps
    assert {step.sent_bytes for step in done.steps} == {done.step_bytes}


@pytest.mark.slow
def test_an_executor_that_is_killed_in_mid_job_changes_no_number(spark, tmp_path):
    options = replace(TEN, max_steps=6, cut_every=100)
    model, _ = trained(spark, 9, 7, model=net(Killing, tmp_path / "killed"), options=options)
    assert (tmp_path / "killed").exists()
    assert distance(model, solo(DATA, options)[0]) < BAR


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(), (11,), (4, 5, 6)])
def test_one_two_and_four_partitions_end_where_solo_ends(spark, sizes):
    assert distance(trained(spark, *sizes)[0], solo(DATA, TEN)[0]) < BAR


@pytest.mark.slow
def test_clipping_by_the_norm_is_a_third_job(spark):
    options = replace(TEN, max_steps=2, guard=Guard(clip_norm=0.1))
    models = []

    def two_steps():
        models.append(trained(spark, 12, options=options)[0])

    assert jobs_of(spark, two_steps) == 1 + 3 * 2
    assert distance(models[0], solo(DATA, options, clip_norm=0.1)[0]) < BAR


@pytest.mark.slow
def test_a_data_frame_is_trained_on_by_its_columns(spark):
    parts = [([float(x) for x in inputs], float(target)) for inputs, target in DATA]
    frame = spark.createDataFrame(parts, "features array<double>, label double").repartition(2)
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).double()
    inputs, targets = torch.stack([one for one, _ in DATA]), torch.cat([target for _, target in DATA])
    before = mse(model(inputs), targets).item()
    done = train(frame, model, loss=mse, optimizer=partial(torch.optim.SGD, lr=0.1), options=TEN)
    assert len(done.losses) == 10
    assert mse(model(inputs), targets).item() < before


@pytest.mark.slow
def test_a_model_that_holds_a_lock_cannot_be_shipped(spark):
    model = net()
    model.lock = threading.Lock()
    with pytest.raises(PlanError, match="Spark cannot ship the model, the loss or the optimizer"):
        trained(spark, 12, model=model)


@pytest.mark.slow
def test_a_task_that_dies_again_and_again_is_told_with_the_step(spark):
    with pytest.raises(LaunchError, match="Spark gave up forward-backward of step 0: Job aborted"):
        trained(spark, 12, model=net(Dying))


def test_a_loss_that_holds_a_lock_cannot_be_shipped_and_leaves_nothing_behind(spark):
    lock = threading.Lock()

    def loss(outputs, targets):
        with lock:
            return mse(outputs, targets)

    with pytest.raises(PlanError, match="Spark cannot ship the model, the loss or the optimizer"):
        train(rows(spark, 12), net(), loss=loss, optimizer=Adam, options=TEN)
    assert spark.sparkContext.parallelize([1, 2], 2).map(twice).collect() == [2, 4]


def twice(number):
    return 2 * number
