"""Ranks in real executors, each with the samples of its partition: the numbers of one rank, under any plan."""

import pytest
import torch

from counterpoint import LaunchError
from counterpoint.spark.ranks import run_ranks
from counterpoint.spark.training_loop import SparkOptions
from tests.lab.launch_systems import losses_alone, script_in
from tests.process.test_launchers import losses_of
from tests.spark import rank_functions as ranked
from tests.spark.training_helpers import TOLERANCE, make_net, make_samples, mse, split_partitions, train_single_process

pytestmark = [
    pytest.mark.integration,
    pytest.mark.process,
    pytest.mark.serial,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
DATA = make_samples(23)
TEN = SparkOptions(batch_size=8, epochs=4, max_steps=10)


def to_rdd(spark, *sizes):
    parts = split_partitions(DATA, *sizes)
    return spark.sparkContext.parallelize(range(len(parts)), len(parts)).flatMap(lambda place: parts[place])


def max_relative_difference(params, expected):
    pairs = zip(params, expected.parameters(), strict=True)
    return max(float((one - other).detach().abs().max() / other.detach().abs().max()) for one, other in pairs)


def test_a_plan_ends_where_solo_ends_from_uneven_partitions(spark):
    result = run_ranks(to_rdd(spark, 23), ranked.train_on_all, args=["pipeline(2)", 8, 10], dtype="float64")
    expected, losses = train_single_process(DATA, TEN)
    assert [one["own"] for one in result] == [23, 0]
    assert result[0]["losses"] == pytest.approx(losses, rel=TOLERANCE)
    assert max(max_relative_difference(one["params"], expected) for one in result) < TOLERANCE


def test_the_same_script_has_the_losses_of_python(spark, tmp_path):
    (tmp_path / "ranks").mkdir()
    run_ranks(spark, ranked.run_script, ranks=2, args=[str(script_in(tmp_path)), str(tmp_path / "ranks")])
    losses, num_ranks = losses_of(tmp_path / "ranks")
    assert num_ranks == 2
    assert losses == pytest.approx(losses_alone(tmp_path), rel=TOLERANCE)


def test_samples_stay_where_they_are_and_count_alike(spark):
    result = run_ranks(to_rdd(spark, 17), ranked.train_on_local, dtype="float64")
    model = make_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs, targets = (torch.stack(field) for field in zip(*DATA, strict=True))
    mse(model(inputs), targets).backward()
    optimizer.step()
    assert max_relative_difference(result[1], model) < TOLERANCE


def test_more_ranks_than_there_is_room_for_are_refused_with_the_numbers(spark):
    with pytest.raises(LaunchError, match="3 ranks must run at the same time, but Spark has slots for 2 tasks"):
        run_ranks(spark, ranked.describe_rank, ranks=3, args=["hi"])


@pytest.mark.slow
def test_ranks_are_fed_by_batches_of_a_frame(spark):
    pytest.importorskip("pyarrow")
    data = [([float(row), 1.0], row) for row in range(20)]
    frame = spark.createDataFrame(data, "features array<double>, label int")
    result = run_ranks(frame.repartition(5), ranked.count_samples, ranks=2)
    assert [one[1:] for one in result] == [[20, ["torch.float32", "torch.int32"]]] * 2
    assert sum(own for own, *_ in result) == 20


@pytest.mark.slow
def test_a_chain_that_no_barrier_stage_takes_is_refused_with_what_to_do(spark):
    pytest.importorskip("pyarrow")
    frame = spark.createDataFrame([([1.0], 1)] * 4, "features array<double>, label int").coalesce(1)
    with pytest.raises(LaunchError, match=r"a barrier stage cannot follow coalesce\(\).*call repartition\(n\)"):
        run_ranks(frame, ranked.count_samples)


@pytest.mark.slow
def test_the_error_of_a_rank_reaches_the_driver(spark):
    with pytest.raises(LaunchError, match="rank 1 failed: ValueError: the cat sat") as caught:
        run_ranks(spark, ranked.raise_on_rank, ranks=2, args=[1])
    assert "the traceback of rank 1 ends:" in str(caught.value)
