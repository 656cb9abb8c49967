"""What replicas of one host have shown of a gradient, as a sum: ranges of each of them, or rows of tables.

The own memory for the gradient of a table is zeros in the own share, as long as there are only rows: these are added
where they belong when somebody asks for the sum as a tensor, and set to zero again afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoint.fabric.encounter import reduce_in_order
from counterpoint.runtime.board import Board
from counterpoint.runtime.layout import Slot
from counterpoint.runtime.rows import Piece, add_rows, clear_rows


class Stretch(NamedTuple):
    """A range of an arena, and what adds up to its gradient: tensors of its length, or rows of a table.

    Args:
        start: its first element.
        stop: one past its last.
        parts: to be added up in this order.
        pieces: rows to be added up, where there are no parts.
        low: where the range begins in its table.
    """

    start: int
    stop: int
    parts: list[Tensor]
    pieces: Sequence[Piece] = ()
    low: int = 0


class Tables:
    """The gradients of all replicas, shown in memory in common.

    Args:
        rows: the flat gradient of each replica; that of a table is up to date where the board says so.
        own: this replica's.
        board: where rows of tables are shown.
    """

    def __init__(self, rows: Sequence[Tensor], own: Tensor, board: Board) -> None:
        self.rows = rows
        self.own = own
        self.board = board
        self.stained: set[str] = set()  # the tables whose own memory may hold something
        self._added: dict[str, tuple[int, int]] = {}

    def begin(self) -> None:
        """Start a step."""
        self.clear()
        self.board.begin()

    def clear(self) -> None:
        """What rows have been added are zeros again."""
        for name, (start, stop) in self._added.items():
            low = start - self.board.tables[name].start
            clear_rows(self.own[start:stop], low, self.board.pieces(name))
        self._added.clear()

    def stain(self) -> None:
        """Something else is going to be written to the own memory."""
        self.stained.update(self.board.tables)
        self._added.clear()

    def absorb(self, dense: Collection[str]) -> None:
        """Add the own rows of tables of which there is a gradient of the table's size, too, to that."""
        for name in [name for name in self.board.own if name in dense]:
            slot = self.board.tables[name]
            add_rows(self.own[slot.start : slot.stop], 0, self.board.own.pop(name), 1.0)
            self.stained.add(name)

    def stretches(self, start: int, stop: int, *, as_rows: bool) -> Iterator[Stretch]:
        """Yield what adds up to a range of the own share, in order.

        Args:
            start: its first element.
            stop: one past its last.
            as_rows: whether rows may stay rows; else they are added up.
        """
        begun = start
        for slot in self.board.tables.values():  # in the order of the layout
            low, high = max(start, slot.start), min(stop, slot.stop)
            if low >= high or len(self.board.dense_places(slot.name)) == len(self.rows):
                continue
            if begun < low:
                yield self._of_all(begun, low)
            begun = high
            yield self._of_table(slot, low, high, as_rows=as_rows)
        if begun < stop:
            yield self._of_all(begun, stop)

    def _of_all(self, start: int, stop: int) -> Stretch:
        return Stretch(start, stop, [row[start:stop] for row in self.rows])

    def _of_table(self, slot: Slot, start: int, stop: int, *, as_rows: bool) -> Stretch:
        pieces, low = self.board.pieces(slot.name), start - slot.start
        dense = [self.rows[place][start:stop] for place in self.board.dense_places(slot.name)]
        mine = self.own[start:stop]
        if not dense and as_rows:
            return Stretch(start, stop, [], pieces, low)
        if dense and not pieces:
            return Stretch(start, stop, dense)
        if dense:
            mine.copy_(reduce_in_order(dense, "sum") if len(dense) > 1 else dense[0])
            self.stained.add(slot.name)
        else:
            if slot.name in self.stained:
                mine.zero_()
                self.stained.discard(slot.name)
            self._added[slot.name] = (start, stop)
        add_rows(mine, low, pieces, 1.0)
        return Stretch(start, stop, [mine])

    def as_pieces(self) -> dict[str, list[Piece]]:
        """Return what has been shown of every table as rows, that of a gradient of the table's size, too."""
        found = {}
        for name, slot in self.board.tables.items():
            dense = [self.rows[place][slot.start : slot.stop] for place in self.board.dense_places(name)]
            whole = [Piece(torch.arange(slot.shape[0]), gradient.view(slot.shape)) for gradient in dense]
            found[name] = [*self.board.pieces(name), *whole]
        return found
