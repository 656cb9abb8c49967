"""Who speaks for whom where only the first of many copies and slices is written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.planner.search.known import KnownRow
from counterpoint.program.partners import Contacts, pair
from counterpoint.program.program import Words
from counterpoint.program.symmetry import refined
from counterpoint.simulator.simulate import Cast

_NOBODY = Contacts((), (), (), ())
_UNWRITTEN = -1


@dataclass(frozen=True, slots=True)
class Fold:
    """Rows that ranks have in common: rank ``(copy * num_seats + seat) * num_slices + slice`` has that of its seat.

    Args:
        rows: of each seat of the first copy, as its first slice has it.
        num_slices: how many ranks are slices of one seat.
        num_ranks: how many ranks there are.
    """

    rows: Sequence[KnownRow]
    num_slices: int
    num_ranks: int

    def row(self, rank: int) -> KnownRow:
        """Return the row of a rank, but for the numbers of ranks and microbatches that it names."""
        return self.rows[rank // self.num_slices % len(self.rows)]

    @property
    def words(self) -> list[Words]:
        """The words of every rank, but for those numbers."""
        return [self.row(rank).words for rank in range(self.num_ranks)]

    def cast(self) -> Cast:
        """Return who meets whom among the ranks that are written down, and who speaks for each of all.

        Copies and slices do the same things at the same times, on ranks that are alike wherever they stand: each meets
        what is at the same place of its own copy and slice, or what is alike.
        """
        contacts = [_NOBODY] * (len(self.rows) * self.num_slices)
        outlines = [_UNWRITTEN] * len(contacts)
        for seat, row in enumerate(self.rows):
            contacts[seat * self.num_slices], outlines[seat * self.num_slices] = row.contacts, row.outline
        partners = pair(contacts)
        first = {rank: group[0] for group in refined(outlines, partners) for rank in group}
        copy = [first[rank - rank % self.num_slices] for rank in range(len(contacts))]
        return Cast(partners, copy * (self.num_ranks // len(copy)))
