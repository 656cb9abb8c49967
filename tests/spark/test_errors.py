"""Errors for data, models and settings that cannot be used."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import counterpoint as cp
from counterpoint import DataError, LaunchError, PlanError
from counterpoint.compiler.compile import compile as compile_plan
from counterpoint.model.spec import linear_chain
from counterpoint.spark.samples import (
    PartitionInfo,
    check_columns,
    check_partitions_match,
    encode_samples,
    find_samples,
    sample_digest,
)
from counterpoint.spark.settings import check_worker_memory, insecure_settings, warn_insecure_settings
from counterpoint.spark.shuffle import ShuffleMessage, ShuffleMessageKind, ShuffleTask, parse_message
from counterpoint.spark.training import partition_microbatches, train_local
from counterpoint.spark.training_loop import SparkOptions
from tests.spark.training_helpers import Adam, make_net, make_samples, mse, split_partitions

DATA = make_samples(23)
TEN = SparkOptions(batch_size=7, epochs=3, max_steps=10)


def assert_refused(error, match, **more):
    arguments = {
        "partitions": split_partitions(DATA, 9, 3),
        "model": make_net(),
        "loss": mse,
        "optimizer": Adam,
        "options": TEN,
        **more,
    }
    with pytest.raises(error, match=match):
        train_local(**arguments)


def test_a_loss_that_fails_is_named_with_its_partition():
    def loss(outputs, targets):
        raise RuntimeError("no such thing")

    assert_refused(
        DataError, r"partition 0 failed in the forward-backward of step 0: RuntimeError: no such thing", loss=loss
    )


def test_a_parameter_without_a_gradient_is_named():
    model = make_net()
    model.spare = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    assert_refused(DataError, "no gradient reached spare", model=model)


def test_a_loss_with_parameters_to_train_is_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, output, target):
            return mse(output * self.scale, target)

    message = "the loss has trainable parameters of its own, scale, which counterpoint.spark would not train; .*freeze"
    assert_refused(PlanError, message, loss=Scaled())
    assert_refused(PlanError, message, loss=Scaled().forward)
    train_local(
        split_partitions(DATA, 9, 3), make_net(), loss=Scaled().requires_grad_(False), optimizer=Adam,
        options=replace(TEN, max_steps=1),
    )  # fmt: skip


def test_a_model_with_running_statistics_is_refused():
    assert_refused(
        PlanError, "1 keeps running statistics", model=nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    )


def test_an_optimizer_that_looks_at_whole_tensors_is_refused():
    assert_refused(PlanError, "LAMB is not elementwise", optimizer=partial(cp.LAMB, lr=0.1))


def test_weights_of_two_dtypes_are_refused():
    model = make_net()
    model.last.float()
    assert_refused(PlanError, r"of one dtype, but .*float", model=model)


def test_a_place_for_checkpoints_is_needed_to_save_often():
    assert_refused(PlanError, "save_every=2 needs a folder", options=replace(TEN, save_every=2))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((None, 1.0), r"partition 1: row 0 is null in field 0"),
        (([1.0, 2.0, 3.0], "cat"), "partition 1: field 1 of sample 0 is a str"),
        ((["a", "b", "c"], 1.0), "partition 1: field 0 of row 0 is a list of <U1"),
        ("cat", "partition 1: row 0 is a str"),
    ],
)
def test_a_row_that_is_no_sample_is_named(row, message):
    assert_refused(DataError, message, partitions=[DATA[:4], [row]])


def test_partitions_with_other_fields_are_listed_side_by_side():
    wider = [(torch.ones(4, dtype=torch.float64), torch.ones(1, dtype=torch.float64))]
    assert_refused(
        DataError, r"float64\[3\], float64\[1\] in partition 0, but float64\[4\]", partitions=[DATA, [], wider]
    )


def test_data_without_a_sample_is_refused():
    assert_refused(DataError, "there is no sample in 2 partitions", partitions=[[], []])


def test_executors_with_another_torch_are_listed_with_the_driver():
    looks = [PartitionInfo(1, "x", ("float64[3]",), "3.11.7", "1.0.0")]
    with pytest.raises(LaunchError, match=r"driver: Python 3\..*torch 2.*\n.*partition 0: Python 3.11.7, torch 1.0.0"):
        check_partitions_match(looks, 1)


def test_samples_that_come_out_differently_the_second_time_are_an_error():
    first, second = (encode_samples(make_samples(3, seed), torch.float64) for seed in (1, 2))
    with pytest.raises(DataError, match="partition 2 changed since training began"):
        find_samples([ShuffleMessage(ShuffleMessageKind.SAMPLES, 2, 0, second)], sample_digest(first), 2)


def test_a_plan_that_is_no_two_jobs_is_refused():
    plan = cp.Plan.parse("zero(2, level=3)")
    with pytest.raises(PlanError, match=r"F0\.0 cannot run in two Spark jobs"):
        partition_microbatches(compile_plan(plan, linear_chain(1)))


def test_a_column_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(DataError, match="there is no column target; the DataFrame has features, label"):
        check_columns({"features": "vector", "label": "int"}, ("features", "target"))


def test_an_insecure_setting_causes_a_warning():
    with pytest.warns(
        RuntimeWarning, match=r"spark.authenticate is off: anybody who can connect .*never on the command line"
    ):
        warn_insecure_settings("spark://host:7077", {"spark.network.crypto.enabled": "true"})
    assert insecure_settings("local-cluster[2,1,1024]", {}) == []


def test_a_worker_without_memory_gets_an_error_that_names_the_setting():
    with pytest.raises(PlanError, match=r"spark.executor.pyspark.memory is 268,435,456 bytes; set .*=700m or more"):
        check_worker_memory(
            100 << 20, "spark://host:7077", {"spark.executor.pyspark.memory": "512m", "spark.executor.cores": "2"}
        )


def test_bytes_that_are_no_parcel_are_refused():
    with pytest.raises(cp.PeerError, match="which are not a shuffle message"):
        parse_message(b"pickle of something else")


def test_the_partition_of_the_notes_has_nothing_to_do():
    assert list(ShuffleTask(lambda *_: [(0, ShuffleMessage(ShuffleMessageKind.REPORT, 0, 0, b""))], 2)(2, [])) == []
