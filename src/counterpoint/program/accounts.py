"""What the ledger writes down: marks, what a rank holds of a unit, commits, updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import TypeAlias

from counterpoint.program.instruction import Group
from counterpoint.program.units import Unit

Mark: TypeAlias = tuple[int, int, int]
"""Block, microbatch and slice of one backward."""
Marks: TypeAlias = "Counter[Mark]"
Brought: TypeAlias = dict[tuple[Group, Unit], tuple[tuple[int, ...], ...]]
"""For a group and a unit the microbatches whose gradients each member brings into a sum with a code."""
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
        late: marks in the gradient that was set aside.
        has_late: whether that one takes memory.
        decided: the commit that decided on a gradient which has come back from being set aside.
        drift: the replicas whose updates of their own are in its weights; none where all copies are alike.
    """

    home: Span = WHOLE
    span: Span = WHOLE
    versions: list[int] = field(default_factory=lambda: [0])
    whole: Marks = field(default_factory=Counter)
    has_buffer: bool = False
    part: tuple[Span, Marks] | None = None
    late: Marks = field(default_factory=Counter)
    has_late: bool = False
    decided: Decision | None = None
    drift: frozenset[Group] = frozenset()


@dataclass(slots=True)
class Decision:
    """One commit: who decides, and about which microbatches.

    Args:
        group: who takes part.
        micros: the microbatches that its members have gone backward on since the commit before.
        micros_of: the same by member.
        own: by member, whose samples share one mean with its own; only where that is not the whole group.
    """

    group: Group
    micros: set[int] = field(default_factory=set)
    micros_of: dict[int, set[int]] = field(default_factory=dict)
    own: dict[int, Group] = field(default_factory=dict)

    def counted_by(self, rank: int) -> set[int]:
        """Return the microbatches whose samples share one mean with those of a member."""
        if rank not in self.own:
            return self.micros
        return {micro for member in self.own[rank] for micro in self.micros_of.get(member, ())}


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

    @property
    def replica(self) -> Group:
        """The ranks that make this update alike, apart from others; empty where all ranks make it."""
        return self.decision.own.get(self.rank, ()) if self.decision is not None else ()


def with_mark(marks: Marks, mark: Mark) -> Marks:
    """Return the marks and one more, leaving the given ones as they are: other ranks may share them."""
    more: Marks = Counter()
    dict.update(more, marks)  # a Counter counts one by one when it is copied
    more[mark] += 1
    return more


def average(states: Sequence[UnitState]) -> str:
    """The weights of replicas are their mean, in which each replica counts alike; return what is wrong, if anything."""
    if any(state.span != WHOLE for state in states) or len({state.versions[-1] for state in states}) > 1:
        return "only whole weights after equally many updates are averaged"
    together = frozenset[Group]().union(*(state.drift for state in states))
    if len({len(state.drift) for state in states}) > 1 or len(together) != sum(len(state.drift) for state in states):
        return "a mean is over the weights of different replicas, each counted once"
    for state in states:
        state.drift = together
    return ""


def gathered(states: Sequence[UnitState]) -> tuple[int, str]:
    """Each member has the weights of which all keep parts; return the law and what is wrong, if anything."""
    if any(state.span == WHOLE != state.home for state in states):
        return 7, "these weights are gathered already"
    spans = sorted({state.span for state in states})
    tiles = all(before[1] == after[0] for before, after in pairwise(spans))
    versions = {state.versions[-1] for state in states}
    if len({state.drift for state in states}) > 1:
        return 6, "the members hold parts of weights that have been updated apart"
    if not tiles or len(versions) > 1 or len(spans) != len(states):
        held = ", ".join(f"{low} to {high}" for low, high in spans)
        return 6, f"the members hold {held} in versions {sorted(versions)}"
    for state in states:
        state.span = (spans[0][0], spans[-1][1])
    return 0, ""


def share_out(states: Sequence[UnitState]) -> str:
    """Each member has the sum of its own part of a gradient; return what is wrong, if anything."""
    total: Marks = Counter()
    for state in states:
        total.update(state.whole)
    summed: dict[int, Marks] = {}  # members that hold the same marks already go on sharing them
    for at, state in enumerate(states):
        span = (Fraction(at, len(states)), Fraction(at + 1, len(states)))
        if state.part is not None and state.part[0] != span:
            return "this gradient was shared out in other parts before"
        before = state.part[1] if state.part is not None else NOTHING
        if id(before) not in summed:
            summed[id(before)] = before + total
        state.part, state.whole, state.has_buffer = (span, summed[id(before)]), Counter(), True
    return ""


def released(state: UnitState, name: str, *, is_end: bool) -> str:
    """What was gathered, or a gradient, is forgotten; return what is wrong, if anything.

    Args:
        state: of the rank and the unit.
        name: ``late``, ``grad`` or ``weight``.
        is_end: whether the stream is at its end.
    """
    if name == "delayed_grad":
        if not state.has_late or not is_end:
            return "only the end of a stream drops a gradient that was set aside"
        state.late, state.has_late = Counter(), False
    elif name == "grad":
        if not state.has_buffer:
            return "no gradient is there that could be released"
        state.whole, state.has_buffer = Counter(), False
    else:
        if state.span == state.home:
            return "nothing was gathered that could be released"
        state.span = state.home
    return ""


def add_up(states: Sequence[UnitState]) -> None:
    """Every member has the sum of the gradients of all, or of the part that all of them have."""
    total: Marks = Counter()
    for state in states:
        total.update(state.part[1] if state.part is not None else state.whole)
    for state in states:
        if state.part is not None:
            state.part = (state.part[0], total)
        else:
            state.whole, state.has_buffer = total, True


def add_late(states: Sequence[UnitState]) -> None:
    """Every member has the sum of the gradients that were set aside."""
    late: Marks = Counter()
    for state in states:
        late.update(state.late)
    for state in states:
        state.late, state.has_late = late, True


def brought_by(states: Sequence[UnitState]) -> tuple[tuple[int, ...], ...]:
    """Return the microbatches whose gradients each member brings into a sum."""
    return tuple(tuple(sorted({micro for _, micro, _ in state.whole})) for state in states)
