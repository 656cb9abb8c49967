"""Checkpoints of a training on Spark are checkpoints of any training."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from counterpoint import CheckpointError, Trainer
from counterpoint.spark.driver import Options
from tests.spark.subjects import BAR, Adam, cut, distance, here, mse, net, samples, solo

DATA = samples(23)
TEN = Options(batch_size=7, epochs=3, max_steps=10)


def halfway(folder, *sizes):
    """A run of four of ten steps, in the first epoch, its checkpoint in the folder."""
    here(cut(DATA, *sizes), replace(TEN, max_steps=3, save_to=folder))


def test_a_run_goes_on_with_other_partitions_as_if_nothing_had_been(tmp_path):
    halfway(tmp_path, 4, 12)
    model, losses = here(cut(DATA, 10), TEN, resume=tmp_path)
    assert distance(model, solo(DATA, TEN)[0]) < BAR
    assert len(losses) == 7


def test_a_trainer_goes_on_from_sparks_checkpoint(tmp_path):
    halfway(tmp_path, 4, 12)
    model = net()
    trainer = Trainer(model, loss=mse, optimizer=Adam, strategy="pipeline(2)", progress="off")
    trainer.fit(DATA, batch_size=7, epochs=3, max_steps=10, resume=tmp_path)
    trainer.close()
    assert distance(model, solo(DATA, TEN)[0]) < BAR


def test_spark_goes_on_from_a_trainers_checkpoint(tmp_path):
    trainer = Trainer(net(), loss=mse, optimizer=Adam, strategy="pipeline(2)", progress="off")
    trainer.fit(DATA, batch_size=7, epochs=3, max_steps=4, save_to=tmp_path)
    assert distance(here(cut(DATA, 4, 12), TEN, resume=tmp_path)[0], solo(DATA, TEN)[0]) < BAR


def test_checkpoints_are_written_when_it_was_said(tmp_path):
    here(cut(DATA, 4), replace(TEN, save_to=tmp_path, save_every=4, keep=None))
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000004", "step-00000008", "step-00000010"]


def test_a_run_does_not_go_on_with_another_optimizer(tmp_path):
    halfway(tmp_path, 4, 12)
    with pytest.raises(CheckpointError, match="was saved with optimizer Adam, this run has SGD"):
        here(cut(DATA, 10), TEN, partial(torch.optim.SGD, lr=0.1), resume=tmp_path)
