"""Which bodies of a stream are played, and which of them say how long a step of it takes.

A body of a stream begins before the one before it has come to its end, because links go on: in the long run a step
takes less than a body from its first word to its last. Where links are slow, microbatches come one right behind the
other, and then none for long, so that several bodies count, as many as are under way at one time.
"""

from __future__ import annotations

from dataclasses import dataclass

from counterpoint.program.turn import Turn

WARM_UP = 3
"""So many times as many bodies as count are played before them, which are then like all later ones."""


@dataclass(frozen=True, slots=True)
class Bodies:
    """The bodies of one kind of step that are played; a step that is no stream has one.

    Args:
        turn: the kind of step.
        num_counted: how many of them count, the last ones.
    """

    turn: Turn
    num_counted: int

    @staticmethod
    def of(turn: Turn) -> Bodies:
        """Return as many as say how long a step takes."""
        return Bodies(turn, 1 + turn.ahead)

    @property
    def num_played(self) -> int:
        """How many there are."""
        return self.num_counted if self.turn.stream is None else (1 + WARM_UP) * self.num_counted

    def counted(self, rank: int) -> range:
        """Return the places of the words in a rank's flat row that count."""
        return self._places(rank, self.num_counted)

    def earlier(self, rank: int) -> range:
        """Return the places of as many words before them."""
        counted = self.counted(rank)
        return range(max(0, counted.start - len(counted)), counted.start)

    def last(self, rank: int) -> range:
        """Return the places of the words of the last body."""
        return self._places(rank, 1)

    def _places(self, rank: int, count: int) -> range:
        row = self.turn.playable.rows[rank]
        stop = len(row.prologue) + self.num_played * len(row.body)
        return range(stop - count * len(row.body), stop)
