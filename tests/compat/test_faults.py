"""What goes wrong between ranks of torch programs is an error that names it, and leaves nothing behind."""

import re

import pytest

from tests.compat import fault_scenarios as faults
from tests.compat.process_groups import OVER_GLOO, on_ranks

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
BOTH = pytest.mark.parametrize("backend", ["counterpoint", OVER_GLOO])


@pytest.mark.long(quick=["other_operation-...", "other_shape_of_a_future-..."])
@BOTH
@pytest.mark.parametrize(
    ("scenario", "mine", "theirs"),
    [
        (faults.other_shape, "all_reduce sum of a tensor, float32 (4,)", "float32 (5,)"),
        (faults.other_operation, "broadcast of a tensor, float32 (4,), root 0", "all_reduce sum of a tensor"),
        (faults.other_reduction, "all_reduce sum of a tensor", "all_reduce max of a tensor"),
        (faults.other_shape_of_a_future, "all_reduce sum of a tensor, float32 (20,)", "float32 (19,)"),
    ],
)
def test_both_ranks_that_disagree_get_an_error_with_the_operation_of_each(scenario, mine, theirs, backend):
    first, second = on_ranks(scenario, 2, backend)
    assert first == second
    assert first.startswith("PeerError: ranks 0 and 1 disagree on collective ")
    assert first.index(mine) < first.index("; rank 1 starts ") < first.rindex(theirs)


@BOTH
def test_a_message_of_another_shape_is_refused_where_it_is_received(backend):
    sender, receiver = on_ranks(faults.other_message, 2, backend)
    text = "PeerError: rank 1 expects float32 (5,) from rank 0, but its next message is float32 (2, 2); compare"
    assert receiver.startswith(text)
    assert sender is None


@BOTH
def test_an_exchange_of_sizes_that_do_not_fit_is_refused_on_all_ranks(backend):
    first, second = on_ranks(faults.other_sizes, 2, backend)
    assert first == second
    assert first.startswith("PeerError: all_to_all: rank 1 sends 2 elements to rank 0, which expects 1; the two")


@pytest.mark.serial
def test_a_wait_with_a_deadline_ends_by_it():
    waiting, _ = on_ranks(faults.late, 2)
    assert re.search(
        r"waited \d\.\d s for all_reduce sum of a tensor with rank 1: the timeout of 0\.5 s has passed", waiting
    )


@BOTH
def test_a_rank_that_ends_is_named_at_once(backend):
    waiting, ended = on_ranks(faults.gone, 2, backend)
    assert "all_reduce sum of a tensor with rank 1: rank 1 has ended; look at the output of rank 1" in waiting
    assert ended is None


@BOTH
def test_an_aborted_group_is_an_error_of_the_others(backend):
    waiting, _ = on_ranks(faults.aborts, 2, backend)
    assert "stopped because of rank 1: rank 1 has aborted its process group" in waiting


def test_a_destroyed_group_leaves_no_thread_no_file_and_no_memory():
    for result in on_ranks(faults.comes_and_goes, 2):
        assert all(late <= early for early, late in zip(result[0], result[-1], strict=True))


def test_a_receive_without_a_send_does_not_outlive_its_group():
    assert on_ranks(faults.leaves_with_a_receive, 2) == [(True, 0)] * 2
