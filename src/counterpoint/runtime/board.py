"""Where replicas of one host show each other rows of gradients: numbers and values in memory that all of them read.

A note for each table says how many rows there are and where they begin. What does not fit is only noted; when all have
met, all see that, get larger memory together, and write there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.runtime.layout import Slot
from counterpoint.runtime.rows import Piece, joined

NOTHING, ROWS, DENSE = 0, 1, 2
"""What a replica has for a table: no gradient, one of rows, or one of the table's size."""


class Note(NamedTuple):
    """What a replica says of its gradient of one table; offsets count from where its own numbers begin."""

    state: int
    is_sparse: int
    num_rows: int
    has_places: int
    each: int
    first_number: int
    num_values: int
    first_value: int


FIELDS = len(Note._fields)
NEEDS = 2  # before the notes: how many numbers, and how many elements of values


def note_elements(num_tables: int) -> int:
    """Return how many numbers the notes of one replica are, so that the next ones begin with a cache line."""
    return -(-(NEEDS + FIELDS * num_tables) // 8) * 8


class Board:
    """The rows of all replicas, as one of them sees them.

    Args:
        notes: the same memory on all members: one row of :func:`note_elements` for each.
        tables: those of which there may be rows.
        dtype: of their values.
        place: the own one among the replicas.
    """

    def __init__(self, notes: Tensor, tables: Sequence[Slot], dtype: torch.dtype, place: int) -> None:
        self.notes = notes
        self.tables = {slot.name: slot for slot in tables}
        self.place = place
        self.numbers = torch.empty(len(notes), 0, dtype=torch.int64)
        self.values = torch.empty(len(notes), 0, dtype=dtype)
        self.own: dict[str, list[Piece]] = {}
        self.shown: dict[str, list[tuple[int, Piece | None]]] = {}
        self._written: list[tuple[str, Piece]] = []

    def begin(self) -> None:
        """Start a step: nobody has shown anything."""
        self.own.clear()
        self.shown.clear()
        self._written.clear()

    def add(self, name: str, piece: Piece) -> None:
        """The own gradient of a table has these rows, too."""
        self.own.setdefault(name, []).append(piece)

    def publish(self, dense: Collection[str]) -> None:
        """Write what this replica has, for the others to see after they have met.

        Args:
            dense: the tables of which there is a gradient of the table's size, which has its rows in it.
        """
        self._written = [(name, joined(pieces)) for name, pieces in self.own.items() if name not in dense]
        if not self.tables:
            return
        own, notes = dict(self._written), []
        first_number = first_value = 0
        for name in self.tables:
            piece = own.get(name)
            if piece is None:
                notes.append(Note(DENSE if name in dense else NOTHING, 0, 0, 0, 1, 0, 0, 0))
                continue
            count, has_places = len(piece.rows), piece.at is not None
            notes.append(
                Note(ROWS, piece.is_sparse, count, has_places, piece.each, first_number, len(piece.values), first_value)
            )
            first_number += count * (1 + has_places)
            first_value += piece.values.numel()
        flat = [first_number, first_value, *(number for note in notes for number in note)]
        self.notes[self.place, : len(flat)] = torch.tensor(flat)
        if first_number <= self.numbers.shape[1] and first_value <= self.values.shape[1]:
            self._write()

    def _write(self) -> None:
        numbers, values = self.numbers[self.place], self.values[self.place]
        first_number = first_value = 0
        for _, piece in self._written:
            for column in (piece.rows, piece.at):
                if column is not None:
                    numbers[first_number : first_number + len(column)] = column
                    first_number += len(column)
            count = piece.values.numel()
            values[first_value : first_value + count] = piece.values.reshape(-1)
            first_value += count

    def settle(self, fabric: Fabric, group: Group, label: str) -> None:
        """Read what all have shown; where it does not fit, get larger memory first. All members come here together."""
        found = self.notes.tolist()
        most_numbers, most_values = (max(row[at] for row in found) for at in range(NEEDS))
        if most_numbers > self.numbers.shape[1] or most_values > self.values.shape[1]:
            self.numbers = self._larger(self.numbers, most_numbers, fabric, group, f"rows of {label}")
            self.values = self._larger(self.values, most_values, fabric, group, f"values of {label}")
            self._write()
            fabric.meet(f"rows of {label}", group).wait()
        for index, (name, slot) in enumerate(self.tables.items()):
            start = NEEDS + index * FIELDS
            notes = [Note(*row[start : start + FIELDS]) for row in found]
            self.shown[name] = [(note.state, self._piece(at, note, slot)) for at, note in enumerate(notes)]

    def _larger(self, old: Tensor, needed: int, fabric: Fabric, group: Group, label: str) -> Tensor:
        if needed <= old.shape[1]:
            return old
        capacity = -(-needed * 3 // 2 // 64) * 64
        memory = fabric.shared(label, len(group) * capacity, old.dtype, group)
        assert memory is not None, "these ranks have memory in common"
        return memory.view(len(group), capacity)

    def _piece(self, place: int, note: Note, slot: Slot) -> Piece | None:
        if note.state != ROWS:
            return None
        numbers, width = self.numbers[place][note.first_number :], slot.shape[1]
        values = self.values[place][note.first_value : note.first_value + note.num_values * width]
        return Piece(
            numbers[: note.num_rows],
            values.view(note.num_values, width),
            numbers[note.num_rows : 2 * note.num_rows] if note.has_places else None,
            note.each,
            bool(note.is_sparse),
        )

    def pieces(self, name: str) -> list[Piece]:
        """Return the rows of a table that replicas have shown, in their order."""
        return [piece for _, piece in self.shown.get(name, []) if piece is not None]

    def dense_places(self, name: str) -> list[int]:
        """Return the replicas that have a gradient of the table's size."""
        return [place for place, (state, _) in enumerate(self.shown.get(name, [])) if state == DENSE]
