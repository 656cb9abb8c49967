"""Largest magnitudes of tensors: whether their elements are finite, and how near to the largest number they are."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_double, c_uint64, c_void_p
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from counterpoint.fabric.shm.native import DTYPES, native
from counterpoint.fabric.shm.tensor_addresses import Addresses, AddressReader, Counts, make_counts
from counterpoint.tensor_bytes import is_resolved

DTYPE_OF, IS_CPU = attrgetter("dtype"), attrgetter("is_cpu")
FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


def find_magnitudes(tensors: Sequence[Tensor]) -> npt.NDArray[np.float64]:
    """Return the largest magnitude of each tensor of one dtype: 0 without elements, nan or inf if one is not finite.

    Example:
        >>> tensors = [torch.tensor([1.0, -2.0]), torch.tensor([]), torch.tensor([torch.inf])]
        >>> [float(magnitude) for magnitude in find_magnitudes(tensors)]
        [2.0, 0.0, inf]
    """
    return MagnitudeReader(tensors).read(tensors)


class MagnitudeReader:
    """Reads the largest magnitudes of tensors again and again; what does not change is found out once.

    A call between two matrix products runs from a cold cache, where each further Python call takes some microseconds.

    Args:
        examples: their dtypes, devices and shapes are those of all that is read, as those of parameters are those of
            their gradients.

    Attributes:
        counts: the numbers of elements.
        largest_number: of the dtype.
        largest: of each tensor of the last reading the largest magnitude.
    """

    def __init__(self, examples: Sequence[Tensor]) -> None:
        dtypes, library = {*map(DTYPE_OF, examples)}, native().library
        self.is_native = library is not None and len(dtypes) == 1 and dtypes <= FLOATS and all(map(IS_CPU, examples))
        self.dtype = next(iter(dtypes)) if self.is_native else torch.float32
        self._call: Any = getattr(library, "cp_find_magnitudes", None)
        self.largest_number = torch.finfo(self.dtype).max
        self.largest: npt.NDArray[np.float64] = np.empty(len(examples))
        self._addresses = AddressReader(examples, self.dtype)
        self.counts: Counts = self._addresses.counts
        self._rest = (
            self.counts,
            c_uint64(len(examples)),
            DTYPES[self.dtype],
            torch.get_num_threads(),
            c_void_p(self.largest.ctypes.data),
        )

    def collect(self, tensors: Sequence[Tensor], objects: Addresses | None = None) -> Addresses | None:
        """Return where contiguous tensors are; None if one is not contiguous, or cannot be read by the library.

        Args:
            tensors: to read.
            objects: what :func:`find_objects` returns for them, if it is at hand.
        """
        return self._addresses.read(tensors, objects) if self.is_native else None

    def read_at(self, addresses: Addresses) -> float:
        """Return the largest magnitude of all that is at addresses; ``largest`` has that of each tensor."""
        return float(self._call(addresses, *self._rest))

    def read(self, tensors: Sequence[Tensor]) -> npt.NDArray[np.float64]:
        """Return the largest magnitude of each tensor; valid until the next call."""
        addresses = self.collect(tensors)
        if addresses is None:
            return np.array([float(magnitude_tensor(tensor)) for tensor in tensors])
        self.read_at(addresses)
        return self.largest

    def read_one(self, tensor: Tensor) -> float:
        """Return the largest magnitude of a tensor like the only example."""
        if not self.is_native or not is_resolved(tensor):
            return float(magnitude_tensor(tensor))
        return float(self._call(byref(c_void_p(tensor.data_ptr())), *self._rest))


class FactorReader:
    """Reads the largest magnitudes of the two factors of products, in one call.

    Args:
        dtype: of the factors, which are on the host.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        library = native().library if dtype in FLOATS else None
        self._call: Any = getattr(library, "cp_find_magnitudes", None)
        self._addresses, self._counts, self._largest = (c_void_p * 2)(), (c_uint64 * 2)(), (c_double * 2)()
        self._rest = c_uint64(2), DTYPES.get(dtype, 0), torch.get_num_threads(), self._largest

    def read_product(self, first: Tensor, second: Tensor) -> float:
        """Return the product of the largest magnitudes of the two."""
        if self._call is None or not is_resolved(first) or not is_resolved(second):
            return float(magnitude_tensor(first)) * float(magnitude_tensor(second))
        self._addresses[:] = [first.data_ptr(), second.data_ptr()]
        self._counts[:] = [first.numel(), second.numel()]
        self._call(self._addresses, self._counts, *self._rest)
        return self._largest[0] * self._largest[1]


def find_magnitude(tensor: Tensor) -> float:
    """Return the largest magnitude of one tensor; see :func:`find_magnitudes`."""
    library = native().library
    if library is None or tensor.dtype not in FLOATS or not tensor.is_cpu or not is_resolved(tensor):
        return float(magnitude_tensor(tensor))
    address, count, largest = c_void_p(tensor.data_ptr()), c_uint64(tensor.numel()), c_double()
    one, dtype, num_threads = c_uint64(1), DTYPES[tensor.dtype], torch.get_num_threads()
    return float(library.cp_find_magnitudes(byref(address), byref(count), one, dtype, num_threads, byref(largest)))


def find_edge_magnitudes(matrices: Sequence[Tensor], num_rows: Sequence[int]) -> Sequence[float]:
    """Return the largest magnitude in the first row and the first column of each matrix on the host.

    Args:
        matrices: to read.
        num_rows: of how many rows the first column is read, of each.

    Example:
        >>> matrix = torch.tensor([[1.0, -2.0], [3.0, torch.inf]])
        >>> find_edge_magnitudes([matrix, matrix], [2, 1])
        [3.0, 2.0]
    """
    return EdgeReader(matrices, num_rows).read(matrices)


class EdgeReader:
    """Reads the largest magnitudes in the first rows and columns of matrices again and again.

    Args:
        examples: their dtypes, devices and shapes are those of all that is read.
        num_rows: of how many rows the first column is read, of each.
    """

    def __init__(self, examples: Sequence[Tensor], num_rows: Sequence[int]) -> None:
        dtypes, library = {*map(DTYPE_OF, examples)}, native().library
        self._num_rows = num_rows
        self._largest = (c_double * len(examples))()
        self._addresses: AddressReader | None = None
        if library is not None and len(dtypes) == 1 and dtypes <= FLOATS and all(map(IS_CPU, examples)):
            dtype = dtypes.pop()
            self._addresses = AddressReader(examples, dtype)
            counts = make_counts(num_rows), make_counts(example.shape[1] for example in examples)
            call: Any = library.cp_find_edge_magnitudes
            self._rest = (*counts, c_uint64(len(examples)), DTYPES[dtype], self._largest)
            self._call = call

    def read(self, matrices: Sequence[Tensor]) -> Sequence[float]:
        """Return the largest magnitude at the edges of each matrix."""
        addresses = None if self._addresses is None else self._addresses.read(matrices)
        if addresses is None:
            edges = zip(matrices, self._num_rows, strict=True)
            return [float(magnitude_tensor(torch.cat([matrix[0], matrix[:rows, 0]]))) for matrix, rows in edges]
        self._call(addresses, *self._rest)
        return self._largest[:]


def magnitude_tensor(tensor: Tensor) -> Tensor:
    """Return the largest magnitude of a tensor, of any layout and on any device, as a scalar tensor."""
    values = tensor._values() if tensor.is_sparse else tensor  # noqa: SLF001 - uncoalesced ones have no public name
    return values.detach().abs().amax() if values.numel() else values.new_zeros(())
