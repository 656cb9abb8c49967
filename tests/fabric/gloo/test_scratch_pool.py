"""Scratch buffers are reused, and the pool never exceeds the peak of memory in use at once."""

import pytest
import torch

from counterpoint.fabric.gloo.ops import MIN_POOLED_BYTES, ScratchLease, ScratchPool

MANY = MIN_POOLED_BYTES // 4


def test_released_buffers_are_reused():
    workspace = ScratchPool()
    scratch_pool = ScratchLease(workspace)
    first = scratch_pool.empty(MANY, torch.float32)
    scratch_pool.clear()
    assert ScratchLease(workspace).empty(MANY, torch.float32).data_ptr() == first.data_ptr()


def test_buffers_in_use_are_distinct():
    workspace = ScratchPool()
    first, second = (ScratchLease(workspace).empty(MANY, torch.float32) for _ in range(2))
    assert first.fill_(1.0).data_ptr() != second.fill_(2.0).data_ptr()
    assert first.unique().tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8])
def test_a_tensor_has_the_numbers_and_the_dtype_that_are_asked_for(dtype):
    scratch_pool = ScratchLease(ScratchPool())
    for count in (0, 1, MIN_POOLED_BYTES, MIN_POOLED_BYTES + 1):
        tensor = scratch_pool.empty(count, dtype)
        assert (tensor.shape, tensor.dtype) == ((count,), dtype)


def test_the_smallest_buffer_that_fits_is_reused_unless_it_is_much_too_large():
    workspace = ScratchPool()
    buffers = [workspace.acquire(size * MIN_POOLED_BYTES) for size in (2, 3, 8)]
    workspace.release(buffers)
    assert workspace.acquire(2 * MIN_POOLED_BYTES + 1).data_ptr() == buffers[1].data_ptr()
    assert workspace.acquire(MIN_POOLED_BYTES).data_ptr() == buffers[0].data_ptr()
    assert workspace.acquire(MIN_POOLED_BYTES).numel() == MIN_POOLED_BYTES


def test_no_more_is_kept_than_was_in_use_at_once():
    workspace = ScratchPool()
    for size in (4, 40, 9, 80):
        scratch_pool = ScratchLease(workspace)
        scratch_pool.empty(size * MIN_POOLED_BYTES, torch.uint8)
        scratch_pool.clear()
    assert workspace.num_bytes == 80 * MIN_POOLED_BYTES


def test_small_memory_is_not_kept():
    workspace = ScratchPool()
    scratch_pool = ScratchLease(workspace)
    scratch_pool.empty(MIN_POOLED_BYTES - 1, torch.uint8)
    scratch_pool.clear()
    assert workspace.num_bytes == 0
