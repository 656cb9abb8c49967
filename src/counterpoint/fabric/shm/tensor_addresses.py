"""Where tensors are in memory, as the native library reads it, and what copies them from there."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from ctypes import PYFUNCTYPE, c_char_p, c_uint32, c_uint64, c_void_p, py_object, pythonapi
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from counterpoint.fabric.shm.native import DTYPES, native

Addresses: TypeAlias = Any
"""A ctypes array of the addresses of tensors."""

Counts: TypeAlias = Any
"""A ctypes array of their numbers of elements."""


class AddressReader:
    """Reads where contiguous tensors on the host are, again and again; what does not change is found out once.

    Torch publishes DLPack's C exchange API, by which one call of the native library reads as many tensors as there are.
    From a cold cache, Python's own ``is_contiguous()`` and ``data_ptr()`` take 0.1 ms for 400 tensors.

    Args:
        examples: tensors with the numbers of elements of those that are read.
        dtype: of those that are read.
    """

    def __init__(self, examples: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.counts: Counts = make_counts(map(Tensor.numel, examples))
        # a view that is negated lazily has a stride of 2, with which only a single element is contiguous
        self._single = [index for index, example in enumerate(examples) if example.numel() == 1]
        self._call = _native_reader() if dtype in DTYPES else None
        self._num_tensors, self._dtype = c_uint64(len(examples)), c_uint32(DTYPES.get(dtype, 0))
        self._array_type = c_void_p * len(examples)

    def read(self, tensors: Sequence[Tensor], objects: Addresses | None = None) -> Addresses | None:
        """Return where tensors are; None if one is not contiguous, or negated lazily.

        Args:
            tensors: to read, in the order of the examples.
            objects: what :func:`find_objects` returns for them, if it is at hand.
        """
        if any(tensors[index].is_neg() for index in self._single):
            return None
        if self._call is None:
            return read_addresses(tensors) if all(map(Tensor.is_contiguous, tensors)) else None  # false for sparse ones
        objects, addresses = find_objects(tensors) if objects is None else objects, self._array_type()
        try:
            num_read = self._call(objects, self._num_tensors, self.counts, self._dtype, addresses)
        except RuntimeError:  # by torch: a tensor without memory of its own, as a sparse one
            self._call = None  # it would take longer, each time
            return self.read(tensors)
        return addresses if num_read == len(tensors) else None


def find_objects(tensors: Iterable[Tensor]) -> Addresses:
    """Return where the Python objects of tensors are, which must stay alive."""
    numbers = array("Q", [*map(id, tensors)])  # in CPython the address
    return (c_void_p * len(numbers)).from_buffer(numbers)


@cache
def _native_reader() -> Callable[..., int] | None:
    """Return the library's function that reads addresses; None if it, or what it needs of torch, is unavailable."""
    library, capsule = native().library, getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if library is None or capsule is None or sys.implementation.name != "cpython":
        return None
    open_capsule = PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", pythonapi))
    api = open_capsule(capsule, b"dlpack_exchange_api")
    if c_uint32.from_address(api).value != 1:  # another layout of the table
        return None
    with_python_lock: Any = PYFUNCTYPE(c_uint64)(("cp_read_addresses", library))
    with_python_lock.argtypes = None  # without argument types the call is faster
    return partial(with_python_lock, c_void_p(api))


def read_addresses(tensors: Sequence[Tensor]) -> Addresses:
    """Return where contiguous tensors are."""
    # ctypes converts numbers one by one, and takes longer for it than torch to tell them
    return (c_void_p * len(tensors)).from_buffer(array("Q", [*map(Tensor.data_ptr, tensors)]))


def make_counts(numbers: Iterable[int]) -> Counts:
    """Return numbers as the native library reads them."""
    numbers = array("Q", [*numbers])
    return (c_uint64 * len(numbers)).from_buffer(numbers)


def copy_at(addresses: Addresses, counts: Counts, starts: Counts, into: Tensor) -> None:
    """Copy tensors into a contiguous one on the host that has their dtype.

    Args:
        addresses: of the tensors, which are contiguous; the native library must be available.
        counts: their numbers of elements.
        starts: the element of ``into`` at which the copy of each tensor begins.
        into: where they are copied to.

    Example:
        >>> first, second, into = torch.ones(2), torch.full((1, 1), 2.0), torch.zeros(3)
        >>> copy_at(read_addresses([first, second]), make_counts([2, 1]), make_counts([1, 0]), into)
        >>> into
        tensor([2., 1., 1.])
    """
    library = native().library
    assert library is not None, "there are addresses only where it is available"
    num_tensors, num_bytes = c_uint64(len(counts)), c_uint64(into.element_size())
    library.cp_copy_tensors(addresses, counts, starts, num_tensors, num_bytes, c_void_p(into.data_ptr()))
