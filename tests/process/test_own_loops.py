"""Loops of one's own in real processes: every rank passes the same batch, and one that does not is told."""

import pytest

import counterpoint as cp
from counterpoint.launchers import launch
from tests.process import ranks

pytestmark = pytest.mark.process


def test_ranks_with_batches_of_different_sizes_do_not_train():
    """They did, each on a part of its own, and the losses looked well."""
    with pytest.raises(cp.LaunchError, match=r"^rank \d failed: DataError: rank \d was given a batch of \d+ samples, "):
        launch(ranks.shard_by_hand, ranks=2, args=[[12, 16]])


def test_a_batch_that_is_another_on_one_rank_later_ends_the_run():
    with pytest.raises(cp.LaunchError, match=r"^rank \d failed: DataError: rank \d counts 1\d samples in step 1, but "):
        launch(ranks.shard_by_hand, ranks=2, args=[[12, 12], [12, 16]])
