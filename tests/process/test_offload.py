"""Processes whose optimizer state or weights are on disk train as those that keep them, and leave no file."""

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


WEIGHTS = ("offload:params=disk", "offload:state=disk")


@pytest.mark.long(quick=["shm"])
@pytest.mark.parametrize("transport", ["shm", "gloo", "process_group"])
def test_losses_have_the_bits_of_those_with_weights_in_memory(transport, tmp_path):
    plans = [("zero(2, level=3)", 2), ("zero(2, level=3, reshard_after_forward=off)", 1)]
    for losses in run_forked(ranks.train_offloaded, ranks=2, args=[plans, transport, str(tmp_path), WEIGHTS]):
        assert isinstance(losses, list), losses
        assert losses[1::2] == losses[::2]
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("plan", "moved"), [(PLANS[0], "offload:state=disk"), (PLANS[1], "offload:params=disk")], ids=["state", "weights"]
)
def test_a_rank_without_room_ends_the_others_too(plan, moved, tmp_path):
    args = [[plan], str(tmp_path), moved]
    full, *others = run_forked(ranks.train_where_rank_1_has_no_room, ranks=2, args=args)[::-1]
    assert re.match(
        r"OffloadError: the offload file of rank 1 in .* \(File too large\); raise the limit of `ulimit -f`", full[0]
    )
    assert all("rank 1" in error for (error,) in others)
    assert not [*tmp_path.iterdir()]
