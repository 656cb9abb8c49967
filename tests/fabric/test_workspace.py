"""What one collective has worked in the next one takes, and there is never more of it than was in use at once."""

import pytest
import torch

from counterpoint.fabric.workspace import LARGE_BYTES, Desk, Workspace

MANY = LARGE_BYTES // 4


def test_what_was_cleared_is_taken_again():
    workspace = Workspace()
    desk = Desk(workspace)
    first = desk.empty(MANY, torch.float32)
    desk.clear()
    assert Desk(workspace).empty(MANY, torch.float32).data_ptr() == first.data_ptr()


def test_what_is_in_use_is_nobody_elses():
    workspace = Workspace()
    first, second = (Desk(workspace).empty(MANY, torch.float32) for _ in range(2))
    assert first.fill_(1.0).data_ptr() != second.fill_(2.0).data_ptr()
    assert first.unique().tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8])
def test_a_tensor_has_the_numbers_and_the_dtype_that_are_asked_for(dtype):
    desk = Desk(Workspace())
    for count in (0, 1, LARGE_BYTES, LARGE_BYTES + 1):
        tensor = desk.empty(count, dtype)
        assert (tensor.shape, tensor.dtype) == ((count,), dtype)


def test_the_smallest_that_is_large_enough_is_taken_and_none_that_is_much_too_large():
    workspace = Workspace()
    rooms = [workspace.take(size * LARGE_BYTES) for size in (2, 3, 8)]
    workspace.give_back(rooms)
    assert workspace.take(2 * LARGE_BYTES + 1).data_ptr() == rooms[1].data_ptr()
    assert workspace.take(LARGE_BYTES).data_ptr() == rooms[0].data_ptr()
    assert workspace.take(LARGE_BYTES).numel() == LARGE_BYTES


def test_no_more_is_kept_than_was_in_use_at_once():
    workspace = Workspace()
    for size in (4, 40, 9, 80):
        desk = Desk(workspace)
        desk.empty(size * LARGE_BYTES, torch.uint8)
        desk.clear()
    assert workspace.num_bytes == 80 * LARGE_BYTES


def test_small_memory_is_not_kept():
    workspace = Workspace()
    desk = Desk(workspace)
    desk.empty(LARGE_BYTES - 1, torch.uint8)
    desk.clear()
    assert workspace.num_bytes == 0
