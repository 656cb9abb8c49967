"""Whether checkpoints can be written is found out before the first step."""

from pathlib import Path

import pytest

import counterpoint as cp
from counterpoint.training.checkpointing.checkpoint_dir import require_space
from tests.training.trainers import dataset, make_trainer


class NeverSteps(cp.Callback):
    def on_step(self, event):
        raise AssertionError("a step was taken")


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step():
    with (
        make_trainer("data(2)", callbacks=[NeverSteps()]) as one,
        pytest.raises(
            cp.CheckpointError, match=r"^the folder /proc/self for checkpoints cannot be written: .*; choose an"
        ),
    ):
        one.fit(dataset(), batch_size=12, checkpoint_dir="/proc/self")


def test_a_folder_without_space_for_the_model_is_refused():
    require_space(Path("there"), 100, free_bytes=100)
    with pytest.raises(
        cp.CheckpointError, match=r"^the model has 100 bytes, but there has only 99 free, so no checkpoint"
    ):
        require_space(Path("there"), 100, free_bytes=99)
