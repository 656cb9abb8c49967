"""Memory for the rows of a table, which are read and written at places all over it."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from ctypes import byref
from math import prod
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.fabric.shm.native import DTYPES, Bags, native
from counterpoint.server.places import Numbers
from counterpoint.server.sums import Sums

LARGE_BYTES: Final = 1 << 22
MAP_NORESERVE: Final = 0x4000 if sys.platform == "linux" else 0
"""Python has no name for it before 3.13."""
LINE_BYTES: Final = 64
"""A row that begins with a line of the cache is in the fewest of them."""


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory; a large one in large pages if the kernel has some, none of which is taken before it is written to.

    Raises:
        MemoryError: there is not so much.
    """
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < LARGE_BYTES:
        memory = np.empty(num_bytes + LINE_BYTES, dtype=np.uint8)
    else:
        memory = np.frombuffer(_mapped(num_bytes + LINE_BYTES), dtype=np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)


def _mapped(num_bytes: int) -> mmap.mmap:
    try:
        found = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes for the rows of a table") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        found.madvise(mmap.MADV_HUGEPAGE)
    return found


def longer(parts: Sequence[Tensor], used: int, least: int, wanted: int) -> tuple[Tensor, ...]:
    """Return memory for more rows of each part, the first of which are those that are used.

    Args:
        parts: of the rows.
        used: rows.
        least: rows that there must be room for.
        wanted: rows that there is to be room for, if there is memory: what nobody writes to is not taken.

    Example:
        >>> longer([torch.tensor([[1.0], [2.0]])], 2, 3, 8)[0][:2]
        tensor([[1.],
                [2.]])
    """
    try:
        found = tuple(empty((max(least, wanted), *part.shape[1:]), part.dtype) for part in parts)
    except MemoryError:
        found = tuple(empty((least, *part.shape[1:]), part.dtype) for part in parts)
    for new, old in zip(found, parts, strict=True):
        new[:used] = old[:used]
    return found


def gathered(part: Tensor, places: Tensor) -> Tensor:
    """Return the rows at places.

    Where torch can, as bags of one row: it fetches those that come next meanwhile, and takes half of the time.

    Example:
        >>> gathered(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0]))
        tensor([[3.],
                [1.]])
    """
    if part.dtype != torch.float32:
        return part.index_select(0, places)
    return F.embedding_bag(places, part, torch.arange(len(places)), mode="sum")


def rows_or(part: Tensor, places: Numbers, other: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the rows at places, and others where a place is below zero.

    Args:
        part: memory of rows.
        places: of those that are wanted.
        other: called with which of them have no place, ascending; returns these rows.

    Example:
        >>> rows_or(torch.tensor([[1.0], [2.0]]), np.array([1, -1]), lambda which: 10.0 * which[:, None])
        tensor([[ 2.],
                [10.]])
    """
    is_there = places >= 0
    if is_there.all():
        return part.index_select(0, torch.from_numpy(places))
    missing = torch.from_numpy(np.flatnonzero(~is_there))
    found = other(missing)
    if not is_there.any():
        return found
    both = torch.empty(len(places), *part.shape[1:], dtype=part.dtype)
    scatter(both, missing.numpy(), found)
    scatter(both, np.flatnonzero(is_there), gathered(part, torch.from_numpy(places[is_there])))
    return both


def add_at(part: Tensor, places: Numbers, values: Tensor, sums: Sums | None, factor: float) -> None:
    """The rows at places, each of which is named once, have got a factor times their values, or sums of values.

    Example:
        >>> part = torch.zeros(3, 1)
        >>> add_at(part, np.array([2, 0]), torch.tensor([[1.0], [2.0]]), None, -1.0)
        >>> part.tolist()
        [[-2.0], [0.0], [-1.0]]
    """
    library, lists = native().library, () if sums is None else (sums.members, sums.starts)
    fits = part.dtype in {torch.float32, torch.float64} and all(one.is_contiguous() for one in (values, *lists))
    if library is None or not fits:
        added = values if sums is None else sums.of(values)
        scatter(part, places, gathered(part, torch.from_numpy(places)).add_(added, alpha=factor))
        return
    request = Bags(
        dtype=DTYPES[part.dtype],
        part=part.data_ptr(),
        places=places.ctypes.data,
        members=None if sums is None else sums.members.data_ptr(),
        starts=None if sums is None else sums.starts.data_ptr(),
        num_members=0 if sums is None else len(sums.members),
        num_lists=len(places),
        width=part.shape[1],
        values=values.data_ptr(),
        factor=factor,
    )
    library.cp_add_sums(byref(request))


def scatter(part: Tensor, places: Numbers, rows: Tensor) -> None:
    """The rows are at places, each of which is named once; as one value each, three times as fast as by their numbers.

    Example:
        >>> part = torch.zeros(3, 2)
        >>> scatter(part, np.array([2, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> part
        tensor([[3., 4.],
                [0., 0.],
                [1., 2.]])
    """
    _values(part)[places] = _values(rows)


def _values(part: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    """Return each row as one value."""
    rows: np.ndarray[tuple[int, ...], np.dtype[np.void]]
    rows = part.view(torch.uint8).numpy().view(f"V{part.shape[1] * part.itemsize}").reshape(-1)
    return rows
