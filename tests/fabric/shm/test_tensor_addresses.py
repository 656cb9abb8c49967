"""Many tensors are copied into one, in a single call of the native library."""

import pytest
import torch

from counterpoint.fabric.shm.tensor_addresses import copy_at, make_counts, read_addresses


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_each_tensor_is_copied_to_its_start_and_nothing_else_is_written(dtype):
    tensors = [torch.arange(1, 7, dtype=dtype).view(2, 3), torch.ones(0, dtype=dtype), torch.full((2,), 9, dtype=dtype)]
    into = torch.full((10,), -1, dtype=dtype)
    copy_at(read_addresses(tensors), make_counts(map(torch.Tensor.numel, tensors)), make_counts([4, 0, 1]), into)
    assert into.tolist() == [-1, 9, 9, -1, 1, 2, 3, 4, 5, 6]
