"""Checkpoints of a training on Spark are checkpoints of any training."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from counterpoint import CheckpointError, Trainer
from counterpoint.spark.training_loop import SparkOptions
from tests.spark.training_helpers import (
    TOLERANCE,
    Adam,
    make_net,
    make_samples,
    max_relative_difference,
    mse,
    split_partitions,
    train_partitions,
    train_single_process,
)

DATA = make_samples(23)
TEN = SparkOptions(batch_size=7, epochs=3, max_steps=10)


def train_three_steps(folder, *sizes):
    """A run of four of ten steps, in the first epoch, its checkpoint in the folder."""
    train_partitions(split_partitions(DATA, *sizes), replace(TEN, max_steps=3, checkpoint_dir=folder))


def test_a_run_resumes_with_other_partitions_with_the_same_results(tmp_path):
    train_three_steps(tmp_path, 4, 12)
    model, losses = train_partitions(split_partitions(DATA, 10), TEN, resume=tmp_path)
    assert max_relative_difference(model, train_single_process(DATA, TEN)[0]) < TOLERANCE
    assert len(losses) == 7


def test_a_trainer_resumes_from_sparks_checkpoint(tmp_path):
    train_three_steps(tmp_path, 4, 12)
    model = make_net()
    trainer = Trainer(model, loss=mse, optimizer=Adam, strategy="pipeline(2)", progress="off")
    trainer.fit(DATA, batch_size=7, epochs=3, max_steps=10, resume=tmp_path)
    trainer.close()
    assert max_relative_difference(model, train_single_process(DATA, TEN)[0]) < TOLERANCE


def test_spark_resumes_from_a_trainers_checkpoint(tmp_path):
    trainer = Trainer(make_net(), loss=mse, optimizer=Adam, strategy="pipeline(2)", progress="off")
    trainer.fit(DATA, batch_size=7, epochs=3, max_steps=4, checkpoint_dir=tmp_path)
    assert (
        max_relative_difference(
            train_partitions(split_partitions(DATA, 4, 12), TEN, resume=tmp_path)[0], train_single_process(DATA, TEN)[0]
        )
        < TOLERANCE
    )


def test_checkpoints_are_written_when_it_was_said(tmp_path):
    train_partitions(split_partitions(DATA, 4), replace(TEN, checkpoint_dir=tmp_path, save_every=4, keep_last=None))
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000004", "step-00000008", "step-00000010"]


def test_a_run_does_not_resume_with_another_optimizer(tmp_path):
    train_three_steps(tmp_path, 4, 12)
    with pytest.raises(CheckpointError, match="was saved with optimizer Adam, this run has SGD"):
        train_partitions(split_partitions(DATA, 10), TEN, partial(torch.optim.SGD, lr=0.1), resume=tmp_path)
