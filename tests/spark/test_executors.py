"""Training in real executors: processes of Java, each with a Python worker of its own."""

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from counterpoint import LaunchError, PlanError
from counterpoint.runtime.commit.step_commit import StepGuard
from counterpoint.spark.training import train
from counterpoint.spark.training_loop import SparkOptions
from tests.spark.models import ExitsWorker, KillsExecutor
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

pytestmark = [
    pytest.mark.integration,
    pytest.mark.process,
    pytest.mark.serial,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
DATA = make_samples(23)
TEN = SparkOptions(batch_size=7, epochs=3, max_steps=10)


def to_rdd(spark, *sizes):
    """The data in partitions of these sizes, the rest in the last."""
    parts = split_partitions(DATA, *sizes)
    return spark.sparkContext.parallelize(range(len(parts)), len(parts)).flatMap(lambda place: parts[place])


def train_on_spark(spark, *sizes, model=None, options=TEN, **more):
    model = model or make_net()
    done = train(to_rdd(spark, *sizes), model, loss=mse, optimizer=Adam, options=options, **more)
    return model, done


def count_jobs(spark, work):
    """How many jobs Spark's status tracker has seen of what was done."""
    context = spark.sparkContext
    context.setJobGroup(work.__name__, "counted")
    work()
    return len(context.statusTracker().getJobIdsForGroup(work.__name__))


@pytest.fixture(scope="module")
def ten_steps(spark):
    """A run over three partitions, one of them empty; slices come to the driver in mid-run."""
    result = []

    def ten_steps():
        result.extend(train_on_spark(spark, 9, 0, options=replace(TEN, snapshot_every=4)))

    num_jobs = count_jobs(spark, ten_steps)
    return *result, num_jobs


def test_three_partitions_one_of_them_empty_end_where_solo_ends(ten_steps):
    model, done, _ = ten_steps
    expected, losses = train_single_process(DATA, TEN)
    assert max_relative_difference(model, expected) < TOLERANCE
    assert done.losses == pytest.approx(losses, rel=TOLERANCE)


def test_a_step_is_two_jobs(ten_steps):
    _, _, num_jobs = ten_steps
    assert num_jobs == 1 + 2 * 10  # the first looks at the samples


def test_a_step_sends_what_the_programs_formula_says(ten_steps):
    _, done, _ = ten_steps
    assert {step.sent_bytes for step in done.steps} == {done.step_bytes}


@pytest.mark.slow
def test_an_executor_that_is_killed_in_mid_job_changes_no_number(spark, tmp_path):
    options = replace(TEN, max_steps=6, snapshot_every=100)
    model, _ = train_on_spark(spark, 9, 7, model=make_net(KillsExecutor, tmp_path / "killed"), options=options)
    assert (tmp_path / "killed").exists()
    assert max_relative_difference(model, train_single_process(DATA, options)[0]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(), (11,), (4, 5, 6)])
def test_one_two_and_four_partitions_end_where_solo_ends(spark, sizes):
    assert max_relative_difference(train_on_spark(spark, *sizes)[0], train_single_process(DATA, TEN)[0]) < TOLERANCE


@pytest.mark.slow
def test_clipping_by_the_norm_is_a_third_job(spark):
    options = replace(TEN, max_steps=2, step_guard=StepGuard(clip_norm=0.1))
    models = []

    def two_steps():
        models.append(train_on_spark(spark, 12, options=options)[0])

    assert count_jobs(spark, two_steps) == 1 + 3 * 2
    assert max_relative_difference(models[0], train_single_process(DATA, options, clip_norm=0.1)[0]) < TOLERANCE


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
    model = make_net()
    model.lock = threading.Lock()
    with pytest.raises(PlanError, match="cannot serialize the model, the loss or the optimizer"):
        train_on_spark(spark, 12, model=model)


@pytest.mark.slow
def test_a_task_that_dies_repeatedly_is_reported_with_the_step(spark):
    with pytest.raises(LaunchError, match="Spark aborted forward-backward of step 0: Job aborted"):
        train_on_spark(spark, 12, model=make_net(ExitsWorker))


def test_a_loss_with_a_lock_cannot_be_serialized_and_no_job_remains(spark):
    lock = threading.Lock()

    def loss(outputs, targets):
        with lock:
            return mse(outputs, targets)

    with pytest.raises(PlanError, match="cannot serialize the model, the loss or the optimizer"):
        train(to_rdd(spark, 12), make_net(), loss=loss, optimizer=Adam, options=TEN)
    assert spark.sparkContext.parallelize([1, 2], 2).map(twice).collect() == [2, 4]


def twice(number):
    return 2 * number
