"""Storage of one key on a shard: a dense range or a table's pushed rows, with optimizer state and the previous version.

Reads and snapshots share memory with the storage: `borrow` hands out a tensor without a copy, and an update copies
first if somebody still holds one (copy on write).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from counterpoint.ps.messages import DTYPES, KeySpec
from counterpoint.ps.placement import shard_of_row
from counterpoint.ps.row_pooling import RowPooling
from counterpoint.ps.storage.optimizer_kernels import (
    CHUNK_NUMEL,
    initial_state,
    num_state_slots,
    sgd_factor,
    update_range,
    update_rows,
)
from counterpoint.ps.storage.row_storage import (
    Int64Array,
    add_rows,
    gather_rows,
    gather_rows_or,
    grow,
    initialize_rows,
    make_row_index,
    scatter_rows,
)
from counterpoint.ps.update_rules import check_request, invalid_request


def borrow(values: Tensor, borrowed: list[weakref.ref[Any]]) -> Tensor:
    """Return a tensor on the same memory; a weak reference to it is recorded for `has_borrowers`."""
    if not values.numel():
        return values.new_empty(values.shape)
    raw = values.view(torch.uint8).numpy()  # kept alive by every tensor made of it, and their views
    borrowed.append(weakref.ref(raw))
    return torch.from_numpy(raw).view(values.dtype)


def has_borrowers(borrowed: list[weakref.ref[Any]]) -> bool:
    """Tell whether somebody still holds a borrowed tensor."""
    return any(reference() is not None for reference in borrowed)


@dataclass(frozen=True, slots=True)
class PreviousVersion:
    """Values of a key before its last update, for recomputing a data slice of that step.

    If a worker dies between its pushes of one slice, some keys may have completed the step and others not. The worker
    that repeats the slice reads all keys as of before the step.

    Args:
        values: all of a dense key; of a table, the rows that the update changed.
        rows: ids of these rows; None for a dense key.
    """

    values: Tensor
    rows: Tensor | None = None


@dataclass(frozen=True, slots=True)
class KeySnapshot:
    """State of a key at one moment, sharing memory with the storage (copy on write).

    Args:
        tensors: values and optimizer state.
        rows: row ids, in the order of the tensors; None for a dense key.
        previous: values before the last update, if kept.
    """

    tensors: tuple[Tensor, ...]
    rows: Tensor | None
    previous: PreviousVersion | None


IS_FIRST, IS_LATER = torch.tensor([[True]]), torch.tensor([[False]])
"""Whether the rows of an update have never been pushed before."""
GROWTH_FACTOR, PREALLOCATED_BYTES = 8, 1 << 30
"""A table preallocates all of its rows if they fit `PREALLOCATED_BYTES`; otherwise its capacity grows by this factor.

Untouched memory is not committed.
"""


class DenseStorage:
    """A range of a dense key.

    Args:
        spec: definition of the key.
        tensors: values and optimizer state; the latter is initialized if only the values are given.
        keeps_previous: whether to keep the values before the last update.
        previous: these values, if there are any yet.

    Attributes:
        num_bytes: memory in use, including that of the first update.
    """

    def __init__(
        self,
        spec: KeySpec,
        tensors: tuple[Tensor, ...],
        *,
        keeps_previous: bool = False,
        previous: PreviousVersion | None = None,
    ) -> None:
        self.spec, self.keeps_previous = spec, keeps_previous
        value = tensors[0].clone()
        self.tensors = (value, *(part.clone() for part in tensors[1:] or initial_state(spec.rule, value)))
        _validate_tensors(spec, self.tensors, (spec.high - spec.low,))
        self.num_bytes = sum(part.nbytes for part in self.tensors) + keeps_previous * value.nbytes
        self.previous = None if previous is None else PreviousVersion(previous.values.clone())
        if previous is not None:
            _validate_tensor(spec, previous.values, (spec.high - spec.low,))
        self._borrowed: list[weakref.ref[Any]] = []
        self._borrowed_previous: list[weakref.ref[Any]] = []
        self._borrowed_state: list[weakref.ref[Any]] = []

    def validate_push(self, values: Tensor, rows: Tensor | None, pooling: RowPooling | None = None) -> None:
        """Raise ProtocolError unless a push fits."""
        key, shape = self.spec.key, (self.spec.high - self.spec.low,)
        if rows is not None or pooling is not None:
            raise invalid_request(f"rows pushed to {key}, which is a dense key")
        if tuple(values.shape) != shape:
            raise invalid_request(f"{tuple(values.shape)} pushed to {key}, which is {shape} here")
        _validate_values(self.spec, values)

    def growth_bytes(self, rows: Tensor | None) -> int:
        """Return how much more memory a push needs."""
        return 0

    max_growth_bytes = growth_bytes

    def validate_pull(self, rows: Tensor | None) -> None:
        """Raise ProtocolError unless a pull fits."""
        if rows is not None:
            raise invalid_request(f"rows pulled from {self.spec.key}, which is a dense key")

    def update(self, step: int, values: Tensor, rows: Tensor | None, pooling: RowPooling | None = None) -> None:
        """Apply the gradient of one step."""
        if self.keeps_previous:
            self._rotate_previous()
        elif has_borrowers(self._borrowed):
            self.tensors = (self.tensors[0].clone(), *self.tensors[1:])
        self._borrowed.clear()
        if has_borrowers(self._borrowed_state):
            self.tensors = (self.tensors[0], *(part.clone() for part in self.tensors[1:]))
        self._borrowed_state.clear()
        update_range(self.spec.rule, step, self.tensors[0], self.tensors[1:], values)

    def _rotate_previous(self) -> None:
        """Make the values the previous version, and continue on a copy."""
        value, buffer = self.tensors[0], self.previous
        is_free = buffer is not None and not has_borrowers(self._borrowed_previous)
        copy = buffer.values.copy_(value) if buffer is not None and is_free else value.clone()
        self.tensors, self.previous = (copy, *self.tensors[1:]), PreviousVersion(value)
        self._borrowed_previous = self._borrowed.copy()

    def read(self, rows: Tensor | None) -> Tensor:
        """Return the values; later updates do not change the result."""
        return borrow(self.tensors[0], self._borrowed)

    def read_previous(self, rows: Tensor | None) -> Tensor:
        """Return the values before the last update, if kept."""
        return self.read(rows) if self.previous is None else borrow(self.previous.values, self._borrowed_previous)

    def snapshot(self) -> KeySnapshot:
        """Return the current state; later updates do not change the result."""
        value, *rest = self.tensors
        parts = (borrow(value, self._borrowed), *(borrow(part, self._borrowed_state) for part in rest))
        earlier = (
            None if self.previous is None else PreviousVersion(borrow(self.previous.values, self._borrowed_previous))
        )
        return KeySnapshot(parts, None, earlier)


class SparseRowStorage:
    """The rows of a table on one shard, stored once they are pushed.

    Args:
        spec: definition of the table.
        shard: index of the shard.
        num_shards: number of shards; `shard_of_row` says which rows belong here.
        rows: ids of rows to start with, unique; none if not given.
        tensors: their values and optimizer state.
        keeps_previous: whether to keep the rows that the last update changed.
        previous: these rows, if there are any yet.
    """

    def __init__(  # noqa: PLR0913 - definition, position and state of a table
        self,
        spec: KeySpec,
        shard: int,
        num_shards: int,
        rows: Tensor | None = None,
        tensors: tuple[Tensor, ...] = (),
        *,
        keeps_previous: bool = False,
        previous: PreviousVersion | None = None,
    ) -> None:
        self.spec, self.shard, self.num_shards = spec, shard, num_shards
        self.keeps_previous, self.previous = keeps_previous, previous
        if previous is not None:
            num_rows = 0 if previous.rows is None else len(previous.rows)
            _validate_tensor(spec, previous.values, (num_rows, spec.width))
        self._dtype = DTYPES[spec.dtype]
        self._num_rows = self._capacity = 0
        self._row_ids = torch.empty(0, dtype=torch.int64)
        self._storage = tuple(
            torch.empty(0, spec.width, dtype=self._dtype) for _ in range(1 + num_state_slots(spec.rule))
        )
        self._index = make_row_index(spec.high, num_shards)
        self._row_bytes = spec.width * self._dtype.itemsize * len(self._storage)
        self._borrowed: list[weakref.ref[Any]] = []
        if rows is not None:
            _validate_tensors(spec, tensors, (len(rows), spec.width))
            self._load_rows(rows)
            for storage, tensor in zip(self._storage, tensors, strict=True):
                storage[: len(rows)] = tensor

    def _load_rows(self, rows: Tensor) -> None:
        """Allocate slots for the initial rows; raise ProtocolError if they are invalid or repeated."""
        spec = self.spec
        are_valid = not rows.numel() or (int(rows.min()) >= 0 and int(rows.max()) < spec.high)
        check_request(are_valid, f"rows of {spec.key}, which has {spec.high}, that are out of range")
        slots = self._allocate_slots(rows)
        check_request(bool((self._index.lookup(rows) == slots).all()), f"rows of {spec.key} that occur twice")

    @property
    def rows(self) -> Tensor:
        """Ids of the stored rows, ascending."""
        return self._row_ids[: self._num_rows].sort().values

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Their values and optimizer state, in the order of the rows."""
        order = self._row_ids[: self._num_rows].argsort()
        return tuple(part[order] for part in self._storage)

    @property
    def num_bytes(self) -> int:
        """Memory of the stored rows."""
        return self._num_rows * self._row_bytes

    def validate_pull(self, rows: Tensor | None) -> None:
        """Raise ProtocolError unless the rows belong to this shard."""
        key = self.spec.key
        if rows is None:
            raise invalid_request(f"a pull of {key} without row ids")
        row_ids = rows.numpy()
        if not row_ids.size:
            return
        if row_ids[-1] >= self.spec.high:
            raise invalid_request(f"row {row_ids[-1]} of {key}, which has {self.spec.high}")
        if self.num_shards > 1 and not (shard_of_row(row_ids, self.num_shards) == self.shard).all():
            raise invalid_request(f"rows of {key} that do not belong to shard {self.shard} of {self.num_shards}")

    def validate_push(self, values: Tensor, rows: Tensor | None, pooling: RowPooling | None = None) -> None:
        """Raise ProtocolError unless a push fits."""
        if rows is None:
            raise invalid_request(f"a push to table {self.spec.key} without row ids")
        self.validate_pull(rows)
        if values.shape[1:] != (self.spec.width,):
            message = f"rows of {tuple(values.shape[1:])} pushed to {self.spec.key}"
            raise invalid_request(f"{message}, whose rows have {self.spec.width}")
        _validate_values(self.spec, values)
        if pooling is not None and not has_finite_sum(values, len(pooling.indices)):
            _validate_values(self.spec, pooling.pool(values))

    def growth_bytes(self, rows: Tensor | None) -> int:
        """Return how much more memory a push needs."""
        new = 0 if rows is None else int((self._index.lookup(rows) < 0).sum())
        return new * self._row_bytes

    def max_growth_bytes(self, rows: Tensor | None) -> int:
        """Return an upper bound of :meth:`growth_bytes` that needs no lookup: all rows are new."""
        return 0 if rows is None else len(rows) * self._row_bytes

    def update(self, step: int, values: Tensor, rows: Tensor | None, pooling: RowPooling | None = None) -> None:
        """Apply one step to rows, with one gradient or pooled gradients per row."""
        if rows is None or not rows.numel():
            self.previous = None
            return
        slots = self._index.lookup(rows)
        is_new = slots < 0
        num_new = int(np.count_nonzero(is_new))
        if num_new:
            slots[is_new] = self._insert_rows(torch.from_numpy(rows.numpy()[is_new]))
        if has_borrowers(self._borrowed):
            self._storage = grow(self._storage, self._num_rows, self._capacity, self._capacity)
        self._borrowed.clear()
        factor = sgd_factor(self.spec.rule)
        if factor is not None and not self.keeps_previous:
            add_rows(self._storage[0], slots, values, pooling, factor)
            return
        values = values if pooling is None else pooling.pool(values)
        self.previous = (
            PreviousVersion(gather_rows(self._storage[0], torch.from_numpy(slots)), rows)
            if self.keeps_previous
            else None
        )
        if num_new in {0, len(slots)}:
            self._update_in_chunks(step, slots, values, is_first=num_new > 0)
            return
        for selected, is_first in ((is_new, True), (~is_new, False)):
            self._update_in_chunks(step, slots[selected], values[torch.from_numpy(selected)], is_first=is_first)

    def _update_in_chunks(self, step: int, slots: Int64Array, values: Tensor, *, is_first: bool) -> None:
        """Update the rows at these slots in chunks that fit the cache.

        New rows are contiguous and are updated in place; others are gathered, updated and scattered.
        """
        num_rows = max(1, CHUNK_NUMEL // self.spec.width)
        for low in range(0, len(slots), num_rows):
            chunk_slots = slots[low : low + num_rows]
            chunk_index = torch.from_numpy(chunk_slots)
            if is_first:
                rows = [part[chunk_slots[0] : chunk_slots[-1] + 1] for part in self._storage]
            else:
                rows = [gather_rows(part, chunk_index) for part in self._storage]
            gradients, is_first_row = values[low : low + num_rows], IS_FIRST if is_first else IS_LATER
            update_rows(self.spec.rule, step, rows[0], tuple(rows[1:]), gradients, is_first=is_first_row)
            if not is_first:
                for part, changed in zip(self._storage, rows, strict=True):
                    scatter_rows(part, chunk_slots, changed)

    def read(self, rows: Tensor | None) -> Tensor:
        """Return rows; initial values for rows that were never pushed."""
        if rows is None or not rows.numel():
            return torch.empty(0, self.spec.width, dtype=self._dtype)
        if not self._num_rows:
            return initial_rows(self.spec, rows)
        return gather_rows_or(
            self._storage[0], self._index.lookup(rows), lambda which: initial_rows(self.spec, rows[which])
        )

    def read_pooled(self, rows: Tensor | None, pooling: RowPooling) -> Tensor:
        """Return pooled rows, without a copy of the rows if all of them are stored."""
        if rows is not None and rows.numel() and self._num_rows:
            slots = self._index.lookup(rows)
            if not (slots < 0).any():
                indices = torch.from_numpy(slots[pooling.indices.numpy()])
                return RowPooling(indices, pooling.offsets.long()).pool(self._storage[0])
        return pooling.pool(self.read(rows))

    def read_previous(self, rows: Tensor | None) -> Tensor:
        """Return rows as of before the last update, if kept."""
        rows_read = self.read(rows)
        if self.previous is not None and self.previous.rows is not None and rows is not None:
            changed_ids, row_ids = self.previous.rows.numpy(), rows.numpy()
            positions = changed_ids.searchsorted(row_ids).clip(max=len(changed_ids) - 1)
            is_changed = changed_ids[positions] == row_ids
            rows_read[torch.from_numpy(is_changed)] = self.previous.values[torch.from_numpy(positions[is_changed])]
        return rows_read

    def snapshot(self) -> KeySnapshot:
        """Return the current rows, in storage order; see :meth:`DenseStorage.snapshot`."""
        row_ids, *tensors = (
            borrow(tensor[: self._num_rows], self._borrowed) for tensor in (self._row_ids, *self._storage)
        )
        return KeySnapshot(tuple(tensors), row_ids, self.previous)

    def _insert_rows(self, rows: Tensor) -> Int64Array:
        """Return slots for new rows, which are set to their initial values."""
        slots, values = self._allocate_slots(rows), initial_rows(self.spec, rows)
        for storage, initial in zip(self._storage, (values, *initial_state(self.spec.rule, values)), strict=True):
            storage[slots[0] : slots[-1] + 1] = initial
        return slots

    def _allocate_slots(self, rows: Tensor) -> Int64Array:
        """Return slots for new rows."""
        first, self._num_rows = self._num_rows, self._num_rows + rows.numel()
        if self._num_rows > self._capacity:
            preferred = max(GROWTH_FACTOR * first, PREALLOCATED_BYTES // (self.spec.width * self._dtype.itemsize))
            num_slots = min(preferred, -(-self.spec.high // self.num_shards))
            self._row_ids, *storage = grow((self._row_ids, *self._storage), first, self._num_rows, num_slots)
            self._storage, self._capacity = tuple(storage), len(self._row_ids)
        self._row_ids[first : self._num_rows] = rows
        slots = np.arange(first, self._num_rows)
        self._index.add(rows, slots)
        return slots


def initial_rows(spec: KeySpec, rows: Tensor) -> Tensor:
    """Return the initial values of rows of a table."""
    if spec.initializer is None:
        return torch.empty(0, spec.width)
    return initialize_rows(spec.initializer, spec.key, rows, spec.width, DTYPES[spec.dtype])


def _validate_tensors(spec: KeySpec, tensors: tuple[Tensor, ...], shape: tuple[int, ...]) -> None:
    expected = 1 + num_state_slots(spec.rule)
    check_request(len(tensors) == expected, f"{len(tensors)} parts of {spec.key}, expected {expected}")
    for part in tensors:
        _validate_tensor(spec, part, shape)


def _validate_tensor(spec: KeySpec, tensor: Tensor, shape: tuple[int, ...]) -> None:
    fits = tuple(tensor.shape) == shape and tensor.dtype == DTYPES[spec.dtype]
    check_request(fits, f"a part of {spec.key} of {tensor.dtype} {tuple(tensor.shape)} expected {spec.dtype} {shape}")


def has_finite_sum(values: Tensor, count: int) -> bool:
    """Tell whether any ``count`` of the values have a finite sum; False does not imply that some have none."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    return largest * count < torch.finfo(values.dtype).max


def _validate_values(spec: KeySpec, values: Tensor) -> None:
    """Raise ProtocolError unless the values have the key's dtype and are finite."""
    if values.dtype != DTYPES[spec.dtype]:
        raise invalid_request(f"{values.dtype} pushed to {spec.key}, which is {spec.dtype}")
    if not isfinite(values.sum()) and not bool(values.isfinite().all()):
        raise invalid_request(f"values that are not finite pushed to {spec.key}")
