"""Largest magnitudes of tensors: whether their elements are finite, and how near to the largest number they are."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_double, c_uint64, c_void_p
from operator import attrgetter
from typing import Any

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
    return MagnitudeReader(tensors).read(tensors)


class MagnitudeReader:
    """Reads the largest magnitudes of tensors again and again; what does not change is found out once.

    Args:
        examples: their dtypes, devices and shapes are those of all that is read, as those of parameters are those of
            their gradients.
    """

    def __init__(self, examples: Sequence[Tensor]) -> None:
        dtypes = {*map(DTYPE_OF, examples)}
        self.is_native = (
            native().library is not None and len(dtypes) == 1 and dtypes <= FLOATS and all(map(IS_CPU, examples))
        )
        self.dtype = next(iter(dtypes)) if self.is_native else torch.float32
        self._pointers, self._counts = c_void_p * len(examples), _count_elements(examples)

    def read(self, tensors: Sequence[Tensor]) -> Sequence[float]:
        """Return the largest magnitude of each tensor."""
        library = native().library
        if (
            library is None
            or not self.is_native
            or {*map(LAYOUT_OF, tensors)} != {torch.strided}
            or not all(map(Tensor.is_contiguous, tensors))
        ):
            return [float(magnitude_tensor(tensor)) for tensor in tensors]
        largest = np.empty(len(tensors))
        library.cp_find_magnitudes(
            self._pointers(*map(Tensor.data_ptr, tensors)),
            self._counts,
            c_uint64(len(tensors)),
            DTYPES[self.dtype],
            torch.get_num_threads(),
            c_void_p(largest.ctypes.data),
        )
        return largest  # type: ignore[return-value]


def _count_elements(tensors: Sequence[Tensor]) -> Any:  # noqa: ANN401 - a ctypes array
    return (c_uint64 * len(tensors))(*map(Tensor.numel, tensors))


def find_magnitude(tensor: Tensor) -> float:
    """Return the largest magnitude of one tensor; see :func:`find_magnitudes`."""
    library = native().library
    if library is None or tensor.dtype not in FLOATS or not tensor.is_cpu or tensor.layout is not torch.strided:
        return float(magnitude_tensor(tensor))
    if not tensor.is_contiguous():
        return float(magnitude_tensor(tensor))
    largest = c_double()
    library.cp_find_magnitudes(
        byref(c_void_p(tensor.data_ptr())),
        byref(c_uint64(tensor.numel())),
        c_uint64(1),
        DTYPES[tensor.dtype],
        torch.get_num_threads(),
        byref(largest),
    )
    return largest.value


def magnitude_tensor(tensor: Tensor) -> Tensor:
    """Return the largest magnitude of a tensor, of any layout and on any device, as a scalar tensor."""
    values = tensor._values() if tensor.is_sparse else tensor  # noqa: SLF001 - uncoalesced ones have no public name
    return values.detach().abs().amax() if values.numel() else values.new_zeros(())
