"""Row storage of a table: id-to-slot index, allocation, gather and scatter, and deterministic initial values."""

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

from counterpoint.data.sampler import GOLDEN_GAMMA, WORD_MASK, UInt64s, mix
from counterpoint.fabric.shm.native import DTYPES, EmbeddingBagArgs, native
from counterpoint.ps.row_pooling import RowPooling
from counterpoint.ps.update_rules import ConstantInit, Initializer, NormalInit, UniformInit

Int64Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

MAX_DENSE_ROWS = 1 << 26
"""Row ids per shard up to which the index is an array; beyond, it is a hash table."""


def make_row_index(num_rows: int, num_shards: int) -> DenseRowIndex | HashRowIndex:
    """Return an empty index for one shard's rows of a table.

    Args:
        num_rows: of the whole table.
        num_shards: over which they are distributed.
    """
    is_direct = num_rows <= MAX_DENSE_ROWS * num_shards
    return DenseRowIndex(-(-num_rows // num_shards), num_shards) if is_direct else HashRowIndex()


class DenseRowIndex:
    """Slots in an array indexed by row id."""

    def __init__(self, num_rows: int, num_shards: int) -> None:
        self.num_shards = num_shards
        self.slots = np.full(num_rows, -1, dtype=np.int32)

    def lookup(self, rows: Tensor) -> Int64Array:
        """Return the slot of each row; -1 if it has none."""
        slots: Int64Array = self.slots[self._local_rows(rows)].astype(np.int64)
        return slots

    def _local_rows(self, rows: Tensor) -> Int64Array:
        row_ids: Int64Array = rows.numpy()
        return row_ids if self.num_shards == 1 else row_ids // self.num_shards

    def add(self, rows: Tensor, slots: Int64Array) -> None:
        """Assign slots to rows."""
        self.slots[self._local_rows(rows)] = slots


class HashRowIndex:
    """Slots in a dictionary keyed by row id."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}

    def lookup(self, rows: Tensor) -> Int64Array:
        """Return the slot of each row; -1 if it has none."""
        return np.array([self.slots.get(row, -1) for row in rows.tolist()], dtype=np.int64)

    def add(self, rows: Tensor, slots: Int64Array) -> None:
        """Assign slots to rows."""
        self.slots.update(zip(rows.tolist(), slots.tolist(), strict=True))


LARGE_BYTES: Final = 1 << 22
MAP_NORESERVE: Final = 0x4000 if sys.platform == "linux" else 0
"""Python defines no name for it before 3.13."""
CACHE_LINE_BYTES: Final = 64
"""Alignment of the first row, so that rows span as few cache lines as possible."""


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return uninitialized memory; large blocks use huge pages if available, and pages are committed on first write.

    Raises:
        MemoryError: there is not enough.
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
        mapping = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot allocate {num_bytes} bytes for the rows of a table") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def grow(tensors: Sequence[Tensor], num_used: int, min_rows: int, preferred_rows: int) -> tuple[Tensor, ...]:
    """Return larger tensors whose first rows are copies of the used ones.

    Args:
        tensors: with rows in dim 0.
        num_used: rows to copy.
        min_rows: rows required.
        preferred_rows: rows to allocate if there is enough memory; untouched pages are not committed.

    Example:
        >>> grow([torch.tensor([[1.0], [2.0]])], 2, 3, 8)[0][:2]
        tensor([[1.],
                [2.]])
    """
    try:
        grown = tuple(allocate((max(min_rows, preferred_rows), *part.shape[1:]), part.dtype) for part in tensors)
    except MemoryError:
        grown = tuple(allocate((min_rows, *part.shape[1:]), part.dtype) for part in tensors)
    for new, old in zip(grown, tensors, strict=True):
        new[:num_used] = old[:num_used]
    return grown


def gather_rows(rows: Tensor, slots: Tensor) -> Tensor:
    """Return the rows at the given slots.

    For float32 as embedding bags of one row, which prefetch the next rows and take half the time of ``index_select``.

    Example:
        >>> gather_rows(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0]))
        tensor([[3.],
                [1.]])
    """
    if rows.dtype != torch.float32:
        return rows.index_select(0, slots)
    return F.embedding_bag(slots, rows, torch.arange(len(slots)), mode="sum")


def gather_rows_or(rows: Tensor, slots: Int64Array, default: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the rows at the given slots, and default rows for negative slots.

    Args:
        rows: storage.
        slots: of the requested rows.
        default: called with the positions of the negative slots, ascending; returns their rows.

    Example:
        >>> gather_rows_or(torch.tensor([[1.0], [2.0]]), np.array([1, -1]), lambda which: 10.0 * which[:, None])
        tensor([[ 2.],
                [10.]])
    """
    has_slot = slots >= 0
    if has_slot.all():
        return rows.index_select(0, torch.from_numpy(slots))
    missing = torch.from_numpy(np.flatnonzero(~has_slot))
    default_rows = default(missing)
    if not has_slot.any():
        return default_rows
    result = torch.empty(len(slots), *rows.shape[1:], dtype=rows.dtype)
    scatter_rows(result, missing.numpy(), default_rows)
    scatter_rows(result, np.flatnonzero(has_slot), gather_rows(rows, torch.from_numpy(slots[has_slot])))
    return result


def add_rows(rows: Tensor, slots: Int64Array, values: Tensor, pooling: RowPooling | None, factor: float) -> None:
    """Add scaled values, or scaled pooled values, to the rows at unique slots, in place.

    Example:
        >>> part = torch.zeros(3, 1)
        >>> add_rows(part, np.array([2, 0]), torch.tensor([[1.0], [2.0]]), None, -1.0)
        >>> part.tolist()
        [[-2.0], [0.0], [-1.0]]
    """
    library, lists = native().library, () if pooling is None else (pooling.indices, pooling.offsets)
    fits = rows.dtype in {torch.float32, torch.float64} and all(tensor.is_contiguous() for tensor in (values, *lists))
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
    library.cp_add_embedding_bags(byref(request))


def scatter_rows(target: Tensor, slots: Int64Array, rows: Tensor) -> None:
    """Write rows to unique slots, in place; each row is moved as one value, three times as fast as element by element.

    Example:
        >>> part = torch.zeros(3, 2)
        >>> scatter_rows(part, np.array([2, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> part
        tensor([[3., 4.],
                [0., 0.],
                [1., 2.]])
    """
    _row_view(target)[slots] = _row_view(rows)


def _row_view(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    """Return a view in which each row is one void element."""
    rows: np.ndarray[tuple[int, ...], np.dtype[np.void]]
    rows = tensor.view(torch.uint8).numpy().view(f"V{tensor.shape[1] * tensor.itemsize}").reshape(-1)
    return rows


def initialize_rows(initializer: Initializer, key: str, rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return the initial values of rows, ``(len(rows), width)``, a function of seed, key, row and column only.

    Args:
        initializer: distribution and seed.
        key: name of the table.
        rows: row ids, int64.
        width: elements per row.
        dtype: of the result; values are computed in float64.

    Example:
        >>> rows = torch.tensor([3, 1_000_000_007])
        >>> both = initialize_rows(UniformInit(-1, 1), "words", rows, 2, torch.float64)
        >>> torch.equal(both[1:], initialize_rows(UniformInit(-1, 1), "words", rows[1:], 2, torch.float64))
        True
    """
    match initializer:
        case ConstantInit():
            return torch.full((len(rows), width), initializer.value, dtype=dtype)
        case UniformInit():
            uniform = _uniform(_random_bits(initializer.seed, key, rows, width))
            return torch.from_numpy(initializer.low + (initializer.high - initializer.low) * uniform).to(dtype)
        case NormalInit():
            bits = _random_bits(initializer.seed, key, rows, 2 * width)
            first, second = 1 - _uniform(bits[:, :width]), _uniform(bits[:, width:])
            normal = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)
            return torch.from_numpy(initializer.mean + initializer.std * normal).to(dtype)
        case _:
            assert_never(initializer)


def _random_bits(seed: int, key: str, rows: Tensor, width: int) -> UInt64s:
    """Return 64 random bits per column of each row."""
    row_ids = rows.numpy().astype(np.uint64)
    gamma = np.uint64(GOLDEN_GAMMA)
    row_bits = mix(mix(row_ids * gamma + np.uint64(_key_hash(key))) ^ np.uint64(seed & WORD_MASK))
    return mix(row_bits[:, None] + np.arange(1, width + 1, dtype=np.uint64) * gamma)


def _uniform(bits: UInt64s) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return float64 numbers uniform in [0, 1)."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@lru_cache(maxsize=1024)
def _key_hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
