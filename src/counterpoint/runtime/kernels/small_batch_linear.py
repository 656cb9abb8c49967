"""Linear layer for few samples, as a rank has them that computes a part of a batch.

Matrix libraries repack both operands before they multiply. For few samples that takes longer than the product itself;
the native kernel reads the weights once, in their memory layout.
"""

from __future__ import annotations

from ctypes import byref

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.fabric.shm.native import LinearArgs, native
from counterpoint.tensor_bytes import is_resolved

MAX_SAMPLES = 64
"""With more samples, repacking is faster."""


def small_batch_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias`` up to rounding, without an autograd graph.

    Args:
        x: (..., inputs).
        weight: (outputs, inputs).
        bias: (outputs), if there is one.
    """
    library = native().library
    tensors = [x, weight] if bias is None else [x, weight, bias]
    num_samples = x.numel() // max(weight.shape[-1], 1)
    if (
        library is None
        or x.shape[-1:] != weight.shape[1:]
        or (bias is not None and bias.shape != weight.shape[:1])
        or not 0 < num_samples <= MAX_SAMPLES
        or torch.get_num_threads() > 1
        or not all(dtype_and_device(tensor) == (torch.float32, "cpu") and is_resolved(tensor) for tensor in tensors)
    ):
        return F.linear(x, weight, bias)
    output = x.new_empty((*x.shape[:-1], weight.shape[0]))
    args = LinearArgs(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        y=output.data_ptr(),
        rows=num_samples,
        inputs=weight.shape[1],
        outputs=weight.shape[0],
    )
    return output if library.cp_linear(byref(args)) else F.linear(x, weight, bias)


def dtype_and_device(tensor: Tensor) -> tuple[torch.dtype, str]:
    """Return the dtype of a tensor and the type of its device."""
    return tensor.dtype, tensor.device.type
