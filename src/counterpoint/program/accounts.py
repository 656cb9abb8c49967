"""What the ledger writes down: marks, what a rank holds of a unit, commits, updates."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias

from counterpoint.program.instruction import Group
from counterpoint.program.units import Unit

Mark: TypeAlias = tuple[int, int, int]
"""Block, microbatch and slice of one backward."""
Marks: TypeAlias = "Counter[Mark]"
Span: TypeAlias = tuple[Fraction, Fraction]
"""Which part of a unit: from, to, as fractions of the whole."""

WHOLE: Span = (Fraction(0), Fraction(1))
NOTHING: Marks = Counter()


@dataclass(slots=True)
class UnitState:
    """What one rank holds of one unit.

    Args:
        home: the part whose weights it keeps when nothing is gathered.
        span: the part whose weights it holds now.
        versions: every version it has held, oldest first.
        whole: marks in the gradient of the whole unit.
        has_buffer: whether the gradient of the whole unit takes memory, be it shared out already.
        part: the part and marks of a gradient that was shared out.
    """

    home: Span = WHOLE
    span: Span = WHOLE
    versions: list[int] = field(default_factory=lambda: [0])
    whole: Marks = field(default_factory=Counter)
    has_buffer: bool = False
    part: tuple[Span, Marks] | None = None


@dataclass(slots=True)
class Decision:
    """One commit: who decides, and about which microbatches.

    Args:
        group: who takes part.
        micros: the microbatches that its members have gone backward on since the commit before.
    """

    group: Group
    micros: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Entry:
    """One update.

    Args:
        rank: by whom.
        index: with which word of its row.
        unit: of what.
        span: of which part of it.
        marks: with which gradients.
        staleness: how many updates old the oldest of them was.
        decision: the last commit of the rank that updates or, under a server, of the worker that pushed.
    """

    rank: int
    index: int
    unit: Unit
    span: Span
    marks: Marks
    staleness: int
    decision: Decision | None


def with_mark(marks: Marks, mark: Mark) -> Marks:
    """Return the marks and one more, leaving the given ones as they are: other ranks may share them."""
    more: Marks = Counter()
    dict.update(more, marks)  # a Counter counts one by one when it is copied
    more[mark] += 1
    return more
