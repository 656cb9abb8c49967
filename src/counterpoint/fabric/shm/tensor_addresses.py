"""Where tensors are in memory, as the native library reads it, and what copies them from there."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from ctypes import c_uint64, c_void_p
from typing import Any, TypeAlias

from torch import Tensor

from counterpoint.fabric.shm.native import native

Addresses: TypeAlias = Any
"""A ctypes array of the addresses of tensors."""

Counts: TypeAlias = Any
"""A ctypes array of their numbers of elements."""


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
        >>> import torch
        >>> first, second, into = torch.ones(2), torch.full((1, 1), 2.0), torch.zeros(3)
        >>> copy_at(read_addresses([first, second]), make_counts([2, 1]), make_counts([1, 0]), into)
        >>> into
        tensor([2., 1., 1.])
    """
    library = native().library
    assert library is not None, "there are addresses only where it is available"
    num_tensors, num_bytes = c_uint64(len(counts)), c_uint64(into.element_size())
    library.cp_copy_tensors(addresses, counts, starts, num_tensors, num_bytes, c_void_p(into.data_ptr()))
