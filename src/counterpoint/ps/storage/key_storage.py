"""Numbers that others look at without a copy, and whether anybody still does.

The numbers of a key as they were: before its last step, or at a moment that is looked at later.

A key's numbers on a shard: a range of a tensor, or the rows of a table that have been pushed, with their rule's.
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
    """Return the same numbers; as long as somebody has them, so it is said among those that are lent."""
    if not values.numel():
        return values.new_empty(values.shape)
    raw = values.view(torch.uint8).numpy()  # lives as long as a tensor that is made of it, or a view of one
    borrowed.append(weakref.ref(raw))
    return torch.from_numpy(raw).view(values.dtype)


def has_borrowers(borrowed: list[weakref.ref[Any]]) -> bool:
    """Tell whether somebody still has what was lent."""
    return any(one() is not None for one in borrowed)


@dataclass(frozen=True, slots=True)
class PreviousVersion:
    """The numbers of a key before its last step, for whoever has to compute a portion of that step once more.

    Of a portion whose worker died, some keys may have counted its push, and gone on to the next step with it. Whoever
    repeats the portion reads all keys as they were before.

    Args:
        values: of a range all of them, of a table those of the rows that the step changed.
        rows: which these are; None for a range.
    """

    values: Tensor
    rows: Tensor | None = None


@dataclass(frozen=True, slots=True)
class KeySnapshot:
    """A key's numbers at one moment, without a copy of them: a table that is to change them copies them before.

    Args:
        parts: its numbers, and those of its rule.
        rows: of a table, in the order of the parts; None for a range.
        earlier: the numbers before the last step, where they are kept.
    """

    tensors: tuple[Tensor, ...]
    rows: Tensor | None
    previous: PreviousVersion | None


GROWTH_FACTOR, PREALLOCATED_BYTES = 8, 1 << 30
"""A table has room for all of its rows, if they are no more than this, and gets room for so many times those that it
has when it is full. Memory that nobody has written to is not taken."""


class DenseStorage:
    """A range of a key.

    Args:
        spec: which.
        parts: its numbers, and what its rule keeps; made, where only the numbers are given.
        keeps_earlier: whether the numbers before the last update are kept.
        earlier: these, if there are any yet.
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
        self.previous = None if previous is None else PreviousVersion(previous.values.clone())
        if previous is not None:
            _validate_tensor(spec, previous.values, (spec.high - spec.low,))
        self._borrowed: list[weakref.ref[Any]] = []
        self._borrowed_previous: list[weakref.ref[Any]] = []
        self._borrowed_state: list[weakref.ref[Any]] = []

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, or will with its first update."""
        return sum(part.nbytes for part in self.tensors) + self.keeps_previous * self.tensors[0].nbytes

    def validate_push(self, values: Tensor, rows: Tensor | None, pooling: RowPooling | None = None) -> None:
        """Check that a push fits; a ProtocolError where it does not."""
        key, shape = self.spec.key, (self.spec.high - self.spec.low,)
        if rows is not None or pooling is not None:
            raise invalid_request(f"rows pushed to {key}, which has none")
        if tuple(values.shape) != shape:
            raise invalid_request(f"{tuple(values.shape)} pushed to {key}, which is {shape} here")
        _validate_values(self.spec, values)

    def growth_bytes(self, rows: Tensor | None) -> int:
        """Return how much more memory a push would take."""
        return 0

    max_growth_bytes = growth_bytes

    def validate_pull(self, rows: Tensor | None) -> None:
        """Check that a pull fits; a ProtocolError where it does not."""
        if rows is not None:
            raise invalid_request(f"rows pulled of {self.spec.key}, which has none")

    def update(self, step: int, values: Tensor, rows: Tensor | None, pooling: RowPooling | None = None) -> None:
        """The numbers are as after one step more."""
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
        """The numbers are the earlier ones, and a copy of them is what will be changed."""
        value, spare = self.tensors[0], self.previous
        is_free = spare is not None and not has_borrowers(self._borrowed_previous)
        copy = spare.values.copy_(value) if spare is not None and is_free else value.clone()
        self.tensors, self.previous = (copy, *self.tensors[1:]), PreviousVersion(value)
        self._borrowed_previous = self._borrowed.copy()

    def read(self, rows: Tensor | None) -> Tensor:
        """Return the numbers; what was read does not change with them."""
        return borrow(self.tensors[0], self._borrowed)

    def read_previous(self, rows: Tensor | None) -> Tensor:
        """Return the numbers before the last update, where they are kept."""
        return self.read(rows) if self.previous is None else borrow(self.previous.values, self._borrowed_previous)

    def snapshot(self) -> KeySnapshot:
        """Return its numbers as they are now; later updates do not change what was returned."""
        value, *rest = self.tensors
        parts = (borrow(value, self._borrowed), *(borrow(part, self._borrowed_state) for part in rest))
        earlier = (
            None if self.previous is None else PreviousVersion(borrow(self.previous.values, self._borrowed_previous))
        )
        return KeySnapshot(parts, None, earlier)


class SparseRowStorage:
    """The rows of a table on one shard.

    Args:
        spec: which table.
        shard: which shard.
        num_shards: of how many; a row is here if `shard_of_row` says so.
        rows: numbers of the rows that have been pushed, each once; none, if not given.
        parts: their numbers, and what the rule keeps.
        keeps_earlier: whether the rows that the last update changed are kept as they were before it.
        earlier: these, if there are any yet.
    """

    def __init__(  # noqa: PLR0913 - what a table is, and where it stands
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
            for own, part in zip(self._storage, tensors, strict=True):
                own[: len(rows)] = part

    def _load_rows(self, rows: Tensor) -> None:
        """These rows have places; a ProtocolError where they cannot all have one."""
        spec = self.spec
        fits = not rows.numel() or (int(rows.min()) >= 0 and int(rows.max()) < spec.high)
        check_request(fits, f"rows of {spec.key}, which has {spec.high}, that are no such rows")
        places = self._allocate_slots(rows)
        check_request(bool((self._index.lookup(rows) == places).all()), f"rows of {spec.key} that are there twice")

    @property
    def rows(self) -> Tensor:
        """Numbers of the rows that have been pushed, ascending."""
        return self._row_ids[: self._num_rows].sort().values

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Their numbers and what the rule keeps, in the order of the rows."""
        order = self._row_ids[: self._num_rows].argsort()
        return tuple(part[order] for part in self._storage)

    @property
    def num_bytes(self) -> int:
        """Memory that its rows take."""
        return self._num_rows * self._row_bytes

    def validate_pull(self, rows: Tensor | None) -> None:
        """Check that the rows are of this shard; a ProtocolError where they are not."""
        key = self.spec.key
        if rows is None:
            raise invalid_request(f"all rows of {key} at once; name those that are wanted")
        numbers = rows.numpy()
        if not numbers.size:
            return
        if numbers[-1] >= self.spec.high:
            raise invalid_request(f"row {numbers[-1]} of {key}, which has {self.spec.high}")
        if self.num_shards > 1 and not (shard_of_row(numbers, self.num_shards) == self.shard).all():
            raise invalid_request(f"rows of {key} that shard {self.shard} of {self.num_shards} does not keep")

    def validate_push(self, values: Tensor, rows: Tensor | None, pooling: RowPooling | None = None) -> None:
        """Check that a push fits; a ProtocolError where it does not."""
        if rows is None:
            raise invalid_request(f"a range pushed to {self.spec.key}, which has rows")
        self.validate_pull(rows)
        if values.shape[1:] != (self.spec.width,):
            found = f"rows of {tuple(values.shape[1:])} pushed to {self.spec.key}"
            raise invalid_request(f"{found}, whose rows have {self.spec.width}")
        _validate_values(self.spec, values)
        if pooling is not None and not has_finite_sum(values, len(pooling.indices)):
            _validate_values(self.spec, pooling.pool(values))

    def growth_bytes(self, rows: Tensor | None) -> int:
        """Return how much more memory a push would take."""
        new = 0 if rows is None else int((self._index.lookup(rows) < 0).sum())
        return new * self._row_bytes

    def max_growth_bytes(self, rows: Tensor | None) -> int:
        """Return how much more it would take if all rows were new, which nobody has to look for."""
        return 0 if rows is None else len(rows) * self._row_bytes

    def update(self, step: int, values: Tensor, rows: Tensor | None, pooling: RowPooling | None = None) -> None:
        """The rows are as after the key's next step, each with its value, or with its sum of values."""
        if rows is None or not rows.numel():
            self.previous = None
            return
        places = self._index.lookup(rows)
        is_new = places < 0
        if is_new.any():
            places[is_new] = self._insert_rows(torch.from_numpy(rows.numpy()[is_new]))
        if has_borrowers(self._borrowed):
            self._storage = grow(self._storage, self._num_rows, self._capacity, self._capacity)
        self._borrowed.clear()
        factor = sgd_factor(self.spec.rule)
        if factor is not None and not self.keeps_previous:
            add_rows(self._storage[0], places, values, pooling, factor)
            return
        values = values if pooling is None else pooling.pool(values)
        self.previous = (
            PreviousVersion(gather_rows(self._storage[0], torch.from_numpy(places)), rows)
            if self.keeps_previous
            else None
        )
        for chosen, is_first in ((is_new, True), (~is_new, False)):
            own = values if chosen.all() else values[torch.from_numpy(chosen)]
            self._update_in_chunks(step, places[chosen], own, is_first=is_first)

    def _update_in_chunks(self, step: int, slots: Int64Array, values: Tensor, *, is_first: bool) -> None:
        """The rows at places are as after the key's next step: so many at a time that they stay in the cache.

        Rows that are new lie behind one another, and are changed where they are.
        """
        num_rows = max(1, CHUNK_NUMEL // self.spec.width)
        for low in range(0, len(slots), num_rows):
            own = slots[low : low + num_rows]
            there = torch.from_numpy(own)
            if is_first:
                rows = [part[own[0] : own[-1] + 1] for part in self._storage]
            else:
                rows = [gather_rows(part, there) for part in self._storage]
            few, firsts = values[low : low + num_rows], torch.tensor([[is_first]])
            update_rows(self.spec.rule, step, rows[0], tuple(rows[1:]), few, is_first=firsts)
            if not is_first:
                for part, changed in zip(self._storage, rows, strict=True):
                    scatter_rows(part, own, changed)

    def read(self, rows: Tensor | None) -> Tensor:
        """Return rows; one that has never been pushed as it begins."""
        if rows is None or not rows.numel():
            return torch.empty(0, self.spec.width, dtype=self._dtype)
        if not self._num_rows:
            return initial_rows(self.spec, rows)
        return gather_rows_or(
            self._storage[0], self._index.lookup(rows), lambda which: initial_rows(self.spec, rows[which])
        )

    def read_pooled(self, rows: Tensor | None, pooling: RowPooling) -> Tensor:
        """Return sums of rows, without a copy of these where all of them have been pushed."""
        if rows is not None and rows.numel() and self._num_rows:
            places = self._index.lookup(rows)
            if not (places < 0).any():
                members = torch.from_numpy(places[pooling.indices.numpy()])
                return RowPooling(members, pooling.offsets.long()).pool(self._storage[0])
        return pooling.pool(self.read(rows))

    def read_previous(self, rows: Tensor | None) -> Tensor:
        """Return rows as they were before the last update, where they are kept."""
        found = self.read(rows)
        if self.previous is not None and self.previous.rows is not None and rows is not None:
            changed, wanted = self.previous.rows.numpy(), rows.numpy()
            places = changed.searchsorted(wanted).clip(max=len(changed) - 1)
            is_changed = changed[places] == wanted
            found[torch.from_numpy(is_changed)] = self.previous.values[torch.from_numpy(places[is_changed])]
        return found

    def snapshot(self) -> KeySnapshot:
        """Return its rows as they are now, in the order in which they came; see :meth:`Range.snapshot`."""
        numbers, *parts = (borrow(one[: self._num_rows], self._borrowed) for one in (self._row_ids, *self._storage))
        return KeySnapshot(tuple(parts), numbers, self.previous)

    def _insert_rows(self, rows: Tensor) -> Int64Array:
        """Return places for rows that have none yet, where they are as they begin."""
        places, first = self._allocate_slots(rows), initial_rows(self.spec, rows)
        for own, part in zip(self._storage, (first, *initial_state(self.spec.rule, first)), strict=True):
            own[places[0] : places[-1] + 1] = part
        return places

    def _allocate_slots(self, rows: Tensor) -> Int64Array:
        """Return places for rows that have none yet."""
        first, self._num_rows = self._num_rows, self._num_rows + rows.numel()
        if self._num_rows > self._capacity:
            many = max(GROWTH_FACTOR * first, PREALLOCATED_BYTES // (self.spec.width * self._dtype.itemsize))
            wanted = min(many, -(-self.spec.high // self.num_shards))
            self._row_ids, *storage = grow((self._row_ids, *self._storage), first, self._num_rows, wanted)
            self._storage, self._capacity = tuple(storage), len(self._row_ids)
        self._row_ids[first : self._num_rows] = rows
        places = np.arange(first, self._num_rows)
        self._index.add(rows, places)
        return places


def initial_rows(spec: KeySpec, rows: Tensor) -> Tensor:
    """Return how rows of a table begin."""
    if spec.initializer is None:
        return torch.empty(0, spec.width)
    return initialize_rows(spec.initializer, spec.key, rows, spec.width, DTYPES[spec.dtype])


def _validate_tensors(spec: KeySpec, tensors: tuple[Tensor, ...], shape: tuple[int, ...]) -> None:
    expected = 1 + num_state_slots(spec.rule)
    check_request(len(tensors) == expected, f"{len(tensors)} parts of {spec.key}, whose rule keeps {expected}")
    for part in tensors:
        _validate_tensor(spec, part, shape)


def _validate_tensor(spec: KeySpec, tensor: Tensor, shape: tuple[int, ...]) -> None:
    fits = tuple(tensor.shape) == shape and tensor.dtype == DTYPES[spec.dtype]
    check_request(
        fits, f"a part of {spec.key} of {tensor.dtype} {tuple(tensor.shape)} where {spec.dtype} {shape} belongs"
    )


def has_finite_sum(values: Tensor, count: int) -> bool:
    """Tell whether so many values have a finite sum, whichever they are; it may have one where this says no."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    return largest * count < torch.finfo(values.dtype).max


def _validate_values(spec: KeySpec, values: Tensor) -> None:
    """They have the key's dtype and are finite."""
    if values.dtype != DTYPES[spec.dtype]:
        raise invalid_request(f"{values.dtype} pushed to {spec.key}, which is {spec.dtype}")
    if not isfinite(values.sum()) and not bool(values.isfinite().all()):
        raise invalid_request(f"numbers that are not finite pushed to {spec.key}")
