"""Where the rows of a table lie in a shard's memory, found by their numbers.

Memory for the rows of a table, which are read and written at places all over it.

Rows that nobody has written: what they are follows from (seed, key, row, column), whenever and wherever asked.
"""

from __future__ import annotations

import hashlib
import mmap
import sys
from collections.abc import Callable, Sequence
from ctypes import byref
from functools import lru_cache
from math import prod
from typing import Final, TypeAlias, assert_never

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.data.sampler import GOLDEN_GAMMA, WORD_MASK, Words, mix
from counterpoint.fabric.shm.native import DTYPES, EmbeddingBagArgs, native
from counterpoint.ps.row_pooling import RowPooling
from counterpoint.ps.update_rules import ConstantInit, Initializer, NormalInit, UniformInit

Int64Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

MAX_DENSE_ROWS = 1 << 26
"""Up to so many rows of a shard, a row is found by its number; beyond, in a dictionary."""


def make_row_index(num_rows: int, num_shards: int) -> DenseRowIndex | HashRowIndex:
    """Return places for one shard's rows of a table, none of which has one yet.

    Args:
        num_rows: of the whole table.
        num_shards: over which they are divided.
    """
    is_direct = num_rows <= MAX_DENSE_ROWS * num_shards
    return DenseRowIndex(-(-num_rows // num_shards), num_shards) if is_direct else HashRowIndex()


class DenseRowIndex:
    """Places of rows by their number."""

    def __init__(self, num_rows: int, num_shards: int) -> None:
        self.num_shards = num_shards
        self.slots = np.full(num_rows, -1, dtype=np.int32)

    def lookup(self, rows: Tensor) -> Int64Array:
        """Return the place of each row; -1 where it has none."""
        found: Int64Array = self.slots[self._local_rows(rows)].astype(np.int64)
        return found

    def _local_rows(self, rows: Tensor) -> Int64Array:
        numbers: Int64Array = rows.numpy()
        return numbers if self.num_shards == 1 else numbers // self.num_shards

    def add(self, rows: Tensor, slots: Int64Array) -> None:
        """The rows have these places."""
        self.slots[self._local_rows(rows)] = slots


class HashRowIndex:
    """Places of rows, whatever their numbers."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}

    def lookup(self, rows: Tensor) -> Int64Array:
        """Return the place of each row; -1 where it has none."""
        return np.array([self.slots.get(row, -1) for row in rows.tolist()], dtype=np.int64)

    def add(self, rows: Tensor, slots: Int64Array) -> None:
        """The rows have these places."""
        self.slots.update(zip(rows.tolist(), slots.tolist(), strict=True))


LARGE_BYTES: Final = 1 << 22
MAP_NORESERVE: Final = 0x4000 if sys.platform == "linux" else 0
"""Python has no name for it before 3.13."""
CACHE_LINE_BYTES: Final = 64
"""A row that begins with a line of the cache is in the fewest of them."""


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory; a large one in large pages if the kernel has some, none of which is taken before it is written to.

    Raises:
        MemoryError: there is not so much.
    """
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes < LARGE_BYTES:
        memory = np.empty(num_bytes + CACHE_LINE_BYTES, dtype=np.uint8)
    else:
        memory = np.frombuffer(_map_anonymous(num_bytes + CACHE_LINE_BYTES), dtype=np.uint8)
    start = -memory.ctypes.data % CACHE_LINE_BYTES
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)


def _map_anonymous(num_bytes: int) -> mmap.mmap:
    try:
        found = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes for the rows of a table") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        found.madvise(mmap.MADV_HUGEPAGE)
    return found


def grow(tensors: Sequence[Tensor], num_used: int, min_rows: int, preferred_rows: int) -> tuple[Tensor, ...]:
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
        found = tuple(allocate((max(min_rows, preferred_rows), *part.shape[1:]), part.dtype) for part in tensors)
    except MemoryError:
        found = tuple(allocate((min_rows, *part.shape[1:]), part.dtype) for part in tensors)
    for new, old in zip(found, tensors, strict=True):
        new[:num_used] = old[:num_used]
    return found


def gather_rows(rows: Tensor, slots: Tensor) -> Tensor:
    """Return the rows at places.

    Where torch can, as bags of one row: it fetches those that come next meanwhile, and takes half of the time.

    Example:
        >>> gathered(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0]))
        tensor([[3.],
                [1.]])
    """
    if rows.dtype != torch.float32:
        return rows.index_select(0, slots)
    return F.embedding_bag(slots, rows, torch.arange(len(slots)), mode="sum")


def gather_rows_or(rows: Tensor, slots: Int64Array, default: Callable[[Tensor], Tensor]) -> Tensor:
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
    is_there = slots >= 0
    if is_there.all():
        return rows.index_select(0, torch.from_numpy(slots))
    missing = torch.from_numpy(np.flatnonzero(~is_there))
    found = default(missing)
    if not is_there.any():
        return found
    both = torch.empty(len(slots), *rows.shape[1:], dtype=rows.dtype)
    scatter_rows(both, missing.numpy(), found)
    scatter_rows(both, np.flatnonzero(is_there), gather_rows(rows, torch.from_numpy(slots[is_there])))
    return both


def add_rows(rows: Tensor, slots: Int64Array, values: Tensor, pooling: RowPooling | None, factor: float) -> None:
    """The rows at places, each of which is named once, have got a factor times their values, or sums of values.

    Example:
        >>> part = torch.zeros(3, 1)
        >>> add_at(part, np.array([2, 0]), torch.tensor([[1.0], [2.0]]), None, -1.0)
        >>> part.tolist()
        [[-2.0], [0.0], [-1.0]]
    """
    library, lists = native().library, () if pooling is None else (pooling.indices, pooling.offsets)
    fits = rows.dtype in {torch.float32, torch.float64} and all(one.is_contiguous() for one in (values, *lists))
    if library is None or not fits:
        added = values if pooling is None else pooling.pool(values)
        scatter_rows(rows, slots, gather_rows(rows, torch.from_numpy(slots)).add_(added, alpha=factor))
        return
    request = EmbeddingBagArgs(
        dtype=DTYPES[rows.dtype],
        part=rows.data_ptr(),
        places=slots.ctypes.data,
        members=None if pooling is None else pooling.indices.data_ptr(),
        starts=None if pooling is None else pooling.offsets.data_ptr(),
        num_members=0 if pooling is None else len(pooling.indices),
        num_lists=len(slots),
        width=rows.shape[1],
        values=values.data_ptr(),
        factor=factor,
    )
    library.cp_add_sums(byref(request))


def scatter_rows(target: Tensor, slots: Int64Array, rows: Tensor) -> None:
    """The rows are at places, each of which is named once; as one value each, three times as fast as by their numbers.

    Example:
        >>> part = torch.zeros(3, 2)
        >>> scatter(part, np.array([2, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> part
        tensor([[3., 4.],
                [0., 0.],
                [1., 2.]])
    """
    _row_view(target)[slots] = _row_view(rows)


def _row_view(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    """Return each row as one value."""
    rows: np.ndarray[tuple[int, ...], np.dtype[np.void]]
    rows = tensor.view(torch.uint8).numpy().view(f"V{tensor.shape[1] * tensor.itemsize}").reshape(-1)
    return rows


def initialize_rows(initializer: Initializer, key: str, rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return how rows of a key begin, ``(len(rows), width)``.

    Args:
        start: how.
        key: the name of the table.
        rows: their numbers, int64.
        width: numbers of a row.
        dtype: of the result; the numbers are made in float64.

    Example:
        >>> rows = torch.tensor([3, 1_000_000_007])
        >>> both = begin(Uniform(-1, 1), "words", rows, 2, torch.float64)
        >>> torch.equal(both[1:], begin(Uniform(-1, 1), "words", rows[1:], 2, torch.float64))
        True
    """
    match initializer:
        case ConstantInit():
            return torch.full((len(rows), width), initializer.value, dtype=dtype)
        case UniformInit():
            even = _uniform(_random_bits(initializer.seed, key, rows, width))
            return torch.from_numpy(initializer.low + (initializer.high - initializer.low) * even).to(dtype)
        case NormalInit():
            words = _random_bits(initializer.seed, key, rows, 2 * width)
            first, second = 1 - _uniform(words[:, :width]), _uniform(words[:, width:])
            normal = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)
            return torch.from_numpy(initializer.mean + initializer.std * normal).to(dtype)
        case _:
            assert_never(initializer)


def _random_bits(seed: int, key: str, rows: Tensor, width: int) -> Words:
    """Return 64 random bits for every column of every row."""
    numbers = rows.numpy().astype(np.uint64)
    gamma = np.uint64(GOLDEN_GAMMA)
    of_row = mix(mix(numbers * gamma + np.uint64(_key_hash(key))) ^ np.uint64(seed & WORD_MASK))
    return mix(of_row[:, None] + np.arange(1, width + 1, dtype=np.uint64) * gamma)


def _uniform(words: Words) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return numbers evenly distributed from 0 to below 1."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


@lru_cache(maxsize=1024)
def _key_hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
