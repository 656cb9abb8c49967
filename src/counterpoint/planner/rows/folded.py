"""Who speaks for whom where only the first of many copies and slices is written down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from counterpoint.planner.rows.known import KnownRow
from counterpoint.program.instruction import Collective, Commit, Group
from counterpoint.program.partners import Kinds, Partners, Place, by_kind, find_partners
from counterpoint.program.program import Words
from counterpoint.program.symmetry import Nearness, refined
from counterpoint.simulator.simulate import Cast

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

    @property
    def num_written(self) -> int:
        """How many ranks a copy has, of which the first slices are written down."""
        return len(self.rows) * self.num_slices

    @property
    def num_copies(self) -> int:
        """How many copies there are."""
        return self.num_ranks // self.num_written

    def row(self, rank: int) -> KnownRow:
        """Return the row of a rank, but for the numbers of ranks and microbatches that it names."""
        return self.rows[rank // self.num_slices % len(self.rows)]

    def words(self) -> list[Words]:
        """Return the words of every rank, but for those numbers."""
        return [self.row(rank).words for rank in range(self.num_ranks)]

    def cast(self, near: Nearness) -> Cast | None:
        """Return who meets whom, and who speaks for each rank; None where that is a rank that is not written down.

        Copies and slices do the same things at the same times where all ranks are alike: each meets what is at the same
        place of its own copy and slice, or is alike. Else it is looked at where every rank stands.
        """
        partners = self._partners()
        if not near.groups and len(set(near.kinds)) < 2:
            outlines = [_UNWRITTEN] * self.num_written
            outlines[:: self.num_slices] = [row.outline for row in self.rows]
            first = {rank: group[0] for group in refined(outlines, partners) for rank in group}
            copy = [first[rank - rank % self.num_slices] for rank in range(self.num_written)]
            return Cast(partners, copy * self.num_copies)
        everywhere = self._spread(partners)
        speaker = [0] * self.num_ranks
        for group in refined([self.row(rank).outline for rank in range(self.num_ranks)], everywhere, near):
            if group[0] >= self.num_written or group[0] % self.num_slices:
                return None
            for rank in group:
                speaker[rank] = group[0]
        return Cast(everywhere, speaker)

    def _partners(self) -> Partners:
        """Return who meets whom among those that are written down."""
        words: list[Words] = [()] * self.num_written
        kinds: list[Kinds] = [by_kind(())] * self.num_written
        words[:: self.num_slices] = [row.words for row in self.rows]
        kinds[:: self.num_slices] = [row.kinds for row in self.rows]
        return find_partners(words, kinds)

    def _spread(self, partners: Partners) -> Partners:
        """Return who meets whom among all ranks, given who does among those that are written down."""
        spread = Partners()
        for copy, at in product(range(self.num_copies), range(self.num_slices)):
            by = copy * self.num_written + at
            for (rank, index), (other, there) in partners.source.items():
                spread.source[rank + by, index] = (other + by, there)
        sets: dict[Group, list[tuple[Group, list[int]]]] = {}
        for members in partners.members:
            group, index_of = self._group(members[0]), dict(members)
            if group not in sets:
                sets[group] = list(self._alike(group))
            for ranks, written in sets[group]:
                places = list(zip(ranks, map(index_of.__getitem__, written), strict=True))
                spread.call.update(dict.fromkeys(places, len(spread.members)))
                spread.members.append(places)
        return spread

    def _alike(self, group: Group) -> Iterator[tuple[Group, list[int]]]:
        """Yield a group of ranks as each set of copies and slices has it, and who is written down for its ranks."""
        inside = {(rank // self.num_written, rank % self.num_slices) for rank in group}
        written = [self._written(rank) for rank in group]
        made: set[tuple[int, int]] = set()
        for copy, at in product(range(self.num_copies), range(self.num_slices)):
            if (copy, at) not in made:
                made |= {(one + copy, other + at) for one, other in inside}
                by = copy * self.num_written + at
                yield tuple(rank + by for rank in group), written

    def _group(self, place: Place) -> Group:
        word = self.row(place[0]).words[place[1]]
        assert isinstance(word, Collective | Commit), "it is a call"
        return word.group

    def _written(self, rank: int) -> int:
        """Return the rank that is written down for one."""
        inside = rank % self.num_written
        return inside - inside % self.num_slices
