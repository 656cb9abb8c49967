"""Processes whose optimizer state is on disk train as those that keep it, and leave no file."""

import re

import pytest

from tests.process import rank_functions as ranks
from tests.process.forked_ranks import run_forked

pytestmark = pytest.mark.process
PLANS = [("zero(2, level=1)", 1), ("zero(2, level=3)", 2), ("pipeline(2)", 4), ("data(2)", 1)]


@pytest.mark.long(quick=["shm"])
@pytest.mark.parametrize("transport", ["shm", "gloo", "process_group"])
def test_losses_have_the_bits_of_those_with_state_in_memory(transport, tmp_path):
    for losses in run_forked(ranks.train_offloaded, ranks=2, args=[PLANS, transport, str(tmp_path)]):
        assert isinstance(losses, list), losses
        assert losses[1::2] == losses[::2]
    assert not [*tmp_path.iterdir()]


def test_a_rank_without_room_ends_the_others_too(tmp_path):
    full, *others = run_forked(ranks.train_where_rank_1_has_no_room, ranks=2, args=[PLANS[:1], str(tmp_path)])[::-1]
    assert re.match(
        r"OffloadError: the offload file of rank 1 in .* \(File too large\); raise the limit of `ulimit -f`", full[0]
    )
    assert all("rank 1" in error for (error,) in others)
    assert not [*tmp_path.iterdir()]
