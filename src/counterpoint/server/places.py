"""Where the rows of a table lie in a shard's memory, found by their numbers."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from torch import Tensor

Numbers: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

DIRECT_ROWS = 1 << 26
"""Up to so many rows of a shard, a row is found by its number; beyond, in a dictionary."""


def places_of(num_rows: int, num_shards: int) -> Direct | Dictionary:
    """Return places for one shard's rows of a table, none of which has one yet.

    Args:
        num_rows: of the whole table.
        num_shards: over which they are divided.
    """
    is_direct = num_rows <= DIRECT_ROWS * num_shards
    return Direct(-(-num_rows // num_shards), num_shards) if is_direct else Dictionary()


class Direct:
    """Places of rows by their number."""

    def __init__(self, num_rows: int, num_shards: int) -> None:
        self.num_shards = num_shards
        self.places = np.full(num_rows, -1, dtype=np.int32)

    def of(self, rows: Tensor) -> Numbers:
        """Return the place of each row; -1 where it has none."""
        found: Numbers = self.places[self._numbers(rows)].astype(np.int64)
        return found

    def _numbers(self, rows: Tensor) -> Numbers:
        numbers: Numbers = rows.numpy()
        return numbers if self.num_shards == 1 else numbers // self.num_shards

    def add(self, rows: Tensor, places: Numbers) -> None:
        """The rows have these places."""
        self.places[self._numbers(rows)] = places


class Dictionary:
    """Places of rows, whatever their numbers."""

    def __init__(self) -> None:
        self.places: dict[int, int] = {}

    def of(self, rows: Tensor) -> Numbers:
        """Return the place of each row; -1 where it has none."""
        return np.array([self.places.get(row, -1) for row in rows.tolist()], dtype=np.int64)

    def add(self, rows: Tensor, places: Numbers) -> None:
        """The rows have these places."""
        self.places.update(zip(rows.tolist(), places.tolist(), strict=True))
