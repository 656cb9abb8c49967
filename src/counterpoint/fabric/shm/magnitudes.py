"""Largest magnitudes of tensors: whether their elements are finite, and how near to the largest number they are."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_uint64, c_void_p
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from counterpoint.fabric.shm.native import DTYPES, native

LAYOUT_OF, DTYPE_OF, IS_CPU = attrgetter("layout"), attrgetter("dtype"), attrgetter("is_cpu")
FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


def find_magnitudes(tensors: Sequence[Tensor]) -> Sequence[float]:
    """Return the largest magnitude of each tensor of one dtype: 0 without elements, nan or inf if one is not finite.

    Example:
        >>> tensors = [torch.tensor([1.0, -2.0]), torch.tensor([]), torch.tensor([torch.inf])]
        >>> [float(magnitude) for magnitude in find_magnitudes(tensors)]
        [2.0, 0.0, inf]
    """
    library = native().library
    dtypes = {*map(DTYPE_OF, tensors)}
    if (
        library is None
        or len(dtypes) != 1
        or not dtypes <= FLOATS
        or not all(map(IS_CPU, tensors))
        or {*map(LAYOUT_OF, tensors)} != {torch.strided}
        or not all(map(Tensor.is_contiguous, tensors))
    ):
        return [float(magnitude_tensor(tensor)) for tensor in tensors]
    count = len(tensors)
    largest = np.empty(count)
    library.cp_find_magnitudes(
        (c_void_p * count)(*map(Tensor.data_ptr, tensors)),
        (c_uint64 * count)(*map(Tensor.numel, tensors)),
        c_uint64(count),
        DTYPES[dtypes.pop()],
        torch.get_num_threads(),
        c_void_p(largest.ctypes.data),
    )
    return largest  # type: ignore[return-value]


def magnitude_tensor(tensor: Tensor) -> Tensor:
    """Return the largest magnitude of a tensor, of any layout and on any device, as a scalar tensor."""
    values = tensor._values() if tensor.is_sparse else tensor  # noqa: SLF001 - uncoalesced ones have no public name
    return values.detach().abs().amax() if values.numel() else values.new_zeros(())
