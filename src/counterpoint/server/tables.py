"""A key's numbers on a shard: a range of a tensor, or the rows of a table that have been pushed, with their rule's."""

from __future__ import annotations

import weakref
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from counterpoint.server.beginnings import begin
from counterpoint.server.choices import require, unmeant
from counterpoint.server.lending import is_any_held, lent_out
from counterpoint.server.messages import DTYPES, Spec
from counterpoint.server.placement import shard_of_row
from counterpoint.server.places import Numbers, places_of
from counterpoint.server.room import add_at, gathered, longer, rows_or, scatter
from counterpoint.server.rules import PIECE, added_factor, first_parts, num_parts, update_range, update_rows
from counterpoint.server.snapshots import Earlier, Snapshot
from counterpoint.server.sums import Sums

GROWTH, ROOM_BYTES = 8, 1 << 30
"""A table has room for all of its rows, if they are no more than this, and gets room for so many times those that it
has when it is full. Memory that nobody has written to is not taken."""


class Range:
    """A range of a key.

    Args:
        spec: which.
        parts: its numbers, and what its rule keeps; made, where only the numbers are given.
        keeps_earlier: whether the numbers before the last update are kept.
        earlier: these, if there are any yet.
    """

    def __init__(
        self, spec: Spec, parts: tuple[Tensor, ...], *, keeps_earlier: bool = False, earlier: Earlier | None = None
    ) -> None:
        self.spec, self.keeps_earlier = spec, keeps_earlier
        value = parts[0].clone()
        self.parts = (value, *(part.clone() for part in parts[1:] or first_parts(spec.rule, value)))
        _require_parts(spec, self.parts, (spec.high - spec.low,))
        self.earlier = None if earlier is None else Earlier(earlier.values.clone())
        if earlier is not None:
            _require_part(spec, earlier.values, (spec.high - spec.low,))
        self._lent: list[weakref.ref[Any]] = []
        self._lent_earlier: list[weakref.ref[Any]] = []
        self._lent_rest: list[weakref.ref[Any]] = []

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, or will with its first update."""
        return sum(part.nbytes for part in self.parts) + self.keeps_earlier * self.parts[0].nbytes

    def check(self, values: Tensor, rows: Tensor | None, sums: Sums | None = None) -> None:
        """Check that a push fits; a ProtocolError where it does not."""
        key, shape = self.spec.key, (self.spec.high - self.spec.low,)
        if rows is not None or sums is not None:
            raise unmeant(f"rows pushed to {key}, which has none")
        if tuple(values.shape) != shape:
            raise unmeant(f"{tuple(values.shape)} pushed to {key}, which is {shape} here")
        _require_numbers(self.spec, values)

    def more_bytes(self, rows: Tensor | None) -> int:
        """Return how much more memory a push would take."""
        return 0

    most_bytes = more_bytes

    def check_rows(self, rows: Tensor | None) -> None:
        """Check that a pull fits; a ProtocolError where it does not."""
        if rows is not None:
            raise unmeant(f"rows pulled of {self.spec.key}, which has none")

    def update(self, step: int, values: Tensor, rows: Tensor | None, sums: Sums | None = None) -> None:
        """The numbers are as after one step more."""
        if self.keeps_earlier:
            self._keep()
        elif is_any_held(self._lent):
            self.parts = (self.parts[0].clone(), *self.parts[1:])
        self._lent.clear()
        if is_any_held(self._lent_rest):
            self.parts = (self.parts[0], *(part.clone() for part in self.parts[1:]))
        self._lent_rest.clear()
        update_range(self.spec.rule, step, self.parts[0], self.parts[1:], values)

    def _keep(self) -> None:
        """The numbers are the earlier ones, and a copy of them is what will be changed."""
        value, spare = self.parts[0], self.earlier
        is_free = spare is not None and not is_any_held(self._lent_earlier)
        copy = spare.values.copy_(value) if spare is not None and is_free else value.clone()
        self.parts, self.earlier = (copy, *self.parts[1:]), Earlier(value)
        self._lent_earlier = self._lent.copy()

    def read(self, rows: Tensor | None) -> Tensor:
        """Return the numbers; what was read does not change with them."""
        return lent_out(self.parts[0], self._lent)

    def read_earlier(self, rows: Tensor | None) -> Tensor:
        """Return the numbers before the last update, where they are kept."""
        return self.read(rows) if self.earlier is None else lent_out(self.earlier.values, self._lent_earlier)

    def snapshot(self) -> Snapshot:
        """Return its numbers as they are now; later updates do not change what was returned."""
        value, *rest = self.parts
        parts = (lent_out(value, self._lent), *(lent_out(part, self._lent_rest) for part in rest))
        earlier = None if self.earlier is None else Earlier(lent_out(self.earlier.values, self._lent_earlier))
        return Snapshot(parts, None, earlier)


class Rows:
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
        spec: Spec,
        shard: int,
        num_shards: int,
        rows: Tensor | None = None,
        parts: tuple[Tensor, ...] = (),
        *,
        keeps_earlier: bool = False,
        earlier: Earlier | None = None,
    ) -> None:
        self.spec, self.shard, self.num_shards = spec, shard, num_shards
        self.keeps_earlier, self.earlier = keeps_earlier, earlier
        if earlier is not None:
            num_rows = 0 if earlier.rows is None else len(earlier.rows)
            _require_part(spec, earlier.values, (num_rows, spec.width))
        self._dtype = DTYPES[spec.dtype]
        self._known = self._room = 0
        self._numbers = torch.empty(0, dtype=torch.int64)
        self._storage = tuple(torch.empty(0, spec.width, dtype=self._dtype) for _ in range(1 + num_parts(spec.rule)))
        self._places = places_of(spec.high, num_shards)
        self._row_bytes = spec.width * self._dtype.itemsize * len(self._storage)
        self._lent: list[weakref.ref[Any]] = []
        if rows is not None:
            _require_parts(spec, parts, (len(rows), spec.width))
            self._begin(rows)
            for own, part in zip(self._storage, parts, strict=True):
                own[: len(rows)] = part

    def _begin(self, rows: Tensor) -> None:
        """These rows have places; a ProtocolError where they cannot all have one."""
        spec = self.spec
        fits = not rows.numel() or (int(rows.min()) >= 0 and int(rows.max()) < spec.high)
        require(fits, f"rows of {spec.key}, which has {spec.high}, that are no such rows")
        places = self._grow(rows)
        require(bool((self._places.of(rows) == places).all()), f"rows of {spec.key} that are there twice")

    @property
    def rows(self) -> Tensor:
        """Numbers of the rows that have been pushed, ascending."""
        return self._numbers[: self._known].sort().values

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Their numbers and what the rule keeps, in the order of the rows."""
        order = self._numbers[: self._known].argsort()
        return tuple(part[order] for part in self._storage)

    @property
    def num_bytes(self) -> int:
        """Memory that its rows take."""
        return self._known * self._row_bytes

    def check_rows(self, rows: Tensor | None) -> None:
        """Check that the rows are of this shard; a ProtocolError where they are not."""
        key = self.spec.key
        if rows is None:
            raise unmeant(f"all rows of {key} at once; name those that are wanted")
        numbers = rows.numpy()
        if not numbers.size:
            return
        if numbers[-1] >= self.spec.high:
            raise unmeant(f"row {numbers[-1]} of {key}, which has {self.spec.high}")
        if self.num_shards > 1 and not (shard_of_row(numbers, self.num_shards) == self.shard).all():
            raise unmeant(f"rows of {key} that shard {self.shard} of {self.num_shards} does not keep")

    def check(self, values: Tensor, rows: Tensor | None, sums: Sums | None = None) -> None:
        """Check that a push fits; a ProtocolError where it does not."""
        if rows is None:
            raise unmeant(f"a range pushed to {self.spec.key}, which has rows")
        self.check_rows(rows)
        if values.shape[1:] != (self.spec.width,):
            found = f"rows of {tuple(values.shape[1:])} pushed to {self.spec.key}"
            raise unmeant(f"{found}, whose rows have {self.spec.width}")
        _require_numbers(self.spec, values)
        if sums is not None and not is_summable(values, len(sums.members)):
            _require_numbers(self.spec, sums.of(values))

    def more_bytes(self, rows: Tensor | None) -> int:
        """Return how much more memory a push would take."""
        new = 0 if rows is None else int((self._places.of(rows) < 0).sum())
        return new * self._row_bytes

    def most_bytes(self, rows: Tensor | None) -> int:
        """Return how much more it would take if all rows were new, which nobody has to look for."""
        return 0 if rows is None else len(rows) * self._row_bytes

    def update(self, step: int, values: Tensor, rows: Tensor | None, sums: Sums | None = None) -> None:
        """The rows are as after the key's next step, each with its value, or with its sum of values."""
        if rows is None or not rows.numel():
            self.earlier = None
            return
        places = self._places.of(rows)
        is_new = places < 0
        if is_new.any():
            places[is_new] = self._begun(torch.from_numpy(rows.numpy()[is_new]))
        if is_any_held(self._lent):
            self._storage = longer(self._storage, self._known, self._room, self._room)
        self._lent.clear()
        factor = added_factor(self.spec.rule)
        if factor is not None and not self.keeps_earlier:
            add_at(self._storage[0], places, values, sums, factor)
            return
        values = values if sums is None else sums.of(values)
        self.earlier = (
            Earlier(gathered(self._storage[0], torch.from_numpy(places)), rows) if self.keeps_earlier else None
        )
        for chosen, is_first in ((is_new, True), (~is_new, False)):
            own = values if chosen.all() else values[torch.from_numpy(chosen)]
            self._step(step, places[chosen], own, is_first=is_first)

    def _step(self, step: int, places: Numbers, values: Tensor, *, is_first: bool) -> None:
        """The rows at places are as after the key's next step: so many at a time that they stay in the cache.

        Rows that are new lie behind one another, and are changed where they are.
        """
        num_rows = max(1, PIECE // self.spec.width)
        for low in range(0, len(places), num_rows):
            own = places[low : low + num_rows]
            there = torch.from_numpy(own)
            if is_first:
                rows = [part[own[0] : own[-1] + 1] for part in self._storage]
            else:
                rows = [gathered(part, there) for part in self._storage]
            few, firsts = values[low : low + num_rows], torch.tensor([[is_first]])
            update_rows(self.spec.rule, step, rows[0], tuple(rows[1:]), few, is_first=firsts)
            if not is_first:
                for part, changed in zip(self._storage, rows, strict=True):
                    scatter(part, own, changed)

    def read(self, rows: Tensor | None) -> Tensor:
        """Return rows; one that has never been pushed as it begins."""
        if rows is None or not rows.numel():
            return torch.empty(0, self.spec.width, dtype=self._dtype)
        if not self._known:
            return begin_of(self.spec, rows)
        return rows_or(self._storage[0], self._places.of(rows), lambda which: begin_of(self.spec, rows[which]))

    def read_sums(self, rows: Tensor | None, sums: Sums) -> Tensor:
        """Return sums of rows, without a copy of these where all of them have been pushed."""
        if rows is not None and rows.numel() and self._known:
            places = self._places.of(rows)
            if not (places < 0).any():
                members = torch.from_numpy(places[sums.members.numpy()])
                return Sums(members, sums.starts.long()).of(self._storage[0])
        return sums.of(self.read(rows))

    def read_earlier(self, rows: Tensor | None) -> Tensor:
        """Return rows as they were before the last update, where they are kept."""
        found = self.read(rows)
        if self.earlier is not None and self.earlier.rows is not None and rows is not None:
            changed, wanted = self.earlier.rows.numpy(), rows.numpy()
            places = changed.searchsorted(wanted).clip(max=len(changed) - 1)
            is_changed = changed[places] == wanted
            found[torch.from_numpy(is_changed)] = self.earlier.values[torch.from_numpy(places[is_changed])]
        return found

    def snapshot(self) -> Snapshot:
        """Return its rows as they are now, in the order in which they came; see :meth:`Range.snapshot`."""
        numbers, *parts = (lent_out(one[: self._known], self._lent) for one in (self._numbers, *self._storage))
        return Snapshot(tuple(parts), numbers, self.earlier)

    def _begun(self, rows: Tensor) -> Numbers:
        """Return places for rows that have none yet, where they are as they begin."""
        places, first = self._grow(rows), begin_of(self.spec, rows)
        for own, part in zip(self._storage, (first, *first_parts(self.spec.rule, first)), strict=True):
            own[places[0] : places[-1] + 1] = part
        return places

    def _grow(self, rows: Tensor) -> Numbers:
        """Return places for rows that have none yet."""
        first, self._known = self._known, self._known + rows.numel()
        if self._known > self._room:
            many = max(GROWTH * first, ROOM_BYTES // (self.spec.width * self._dtype.itemsize))
            wanted = min(many, -(-self.spec.high // self.num_shards))
            self._numbers, *storage = longer((self._numbers, *self._storage), first, self._known, wanted)
            self._storage, self._room = tuple(storage), len(self._numbers)
        self._numbers[first : self._known] = rows
        places = np.arange(first, self._known)
        self._places.add(rows, places)
        return places


def begin_of(spec: Spec, rows: Tensor) -> Tensor:
    """Return how rows of a table begin."""
    if spec.start is None:
        return torch.empty(0, spec.width)
    return begin(spec.start, spec.key, rows, spec.width, DTYPES[spec.dtype])


def _require_parts(spec: Spec, parts: tuple[Tensor, ...], shape: tuple[int, ...]) -> None:
    expected = 1 + num_parts(spec.rule)
    require(len(parts) == expected, f"{len(parts)} parts of {spec.key}, whose rule keeps {expected}")
    for part in parts:
        _require_part(spec, part, shape)


def _require_part(spec: Spec, part: Tensor, shape: tuple[int, ...]) -> None:
    fits = tuple(part.shape) == shape and part.dtype == DTYPES[spec.dtype]
    require(fits, f"a part of {spec.key} of {part.dtype} {tuple(part.shape)} where {spec.dtype} {shape} belongs")


def is_summable(values: Tensor, count: int) -> bool:
    """Tell whether so many values have a finite sum, whichever they are; it may have one where this says no."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    return largest * count < torch.finfo(values.dtype).max


def _require_numbers(spec: Spec, values: Tensor) -> None:
    """They have the key's dtype and are finite."""
    if values.dtype != DTYPES[spec.dtype]:
        raise unmeant(f"{values.dtype} pushed to {spec.key}, which is {spec.dtype}")
    if not isfinite(values.sum()) and not bool(values.isfinite().all()):
        raise unmeant(f"numbers that are not finite pushed to {spec.key}")
