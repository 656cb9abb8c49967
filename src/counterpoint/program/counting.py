"""Law 6: every gradient enters every update of its parameters exactly once, and copies update alike."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from counterpoint.errors import ProgramError
from counterpoint.program.accounts import Entry, Mark
from counterpoint.program.instruction import Backward, Group
from counterpoint.program.ledger import Ledger
from counterpoint.program.program import Program, Words
from counterpoint.program.text import format_unit
from counterpoint.program.units import Unit
from counterpoint.program.walk import show_places


def law_6_every_gradient_counts_once(
    program: Program, rows: Sequence[Words], ledger: Ledger, units: Iterable[Unit]
) -> None:
    """Prove that each mark enters exactly one update of each part of its unit, and that copies update alike.

    Replicas that update apart are judged one by one: the marks of each enter its own updates, and no others do. What
    the end of a stream drops, as its strategy promises, enters no update.
    """
    expected = _marks_of(program, rows, range(len(rows)))
    by_unit: defaultdict[Unit, list[Entry]] = defaultdict(list)
    for entry in ledger.entries:
        by_unit[entry.unit].append(entry)
    units = list(units)
    slices = sorted({row.slice_index for row in program.rows})
    apart: dict[Group, defaultdict[int, set[Mark]]] = {}
    for foreign in by_unit.keys() - set(units):
        place = {by_unit[foreign][0].rank: by_unit[foreign][0].index}
        raise ProgramError(
            f"unit {format_unit(foreign)} is updated, but is none of the model's\n{show_places(rows, place, 'here')}",
            law=6,
        )
    for unit in units:
        marks = {mark for block in unit for mark in expected[block]} - ledger.dropped.get(unit, set())
        for replica in sorted({entry.replica for entry in by_unit[unit]}):
            if replica and replica not in apart:
                apart[replica] = _marks_of(program, rows, replica)
            own = {mark for block in unit for mark in apart[replica][block]} if replica else marks
            made = [entry for entry in by_unit[unit] if entry.replica == replica]
            for at in slices:
                mine = [entry for entry in made if program.rows[entry.rank].slice_index == at]
                _judge_unit(rows, unit, mine, {mark for mark in own if mark[2] == at})
            marks = marks - own
        if marks or not by_unit[unit]:  # of somebody who updates nothing
            _judge_unit(rows, unit, [], marks)


def _marks_of(program: Program, rows: Sequence[Words], ranks: Iterable[int]) -> defaultdict[int, set[Mark]]:
    """Return the marks that the backwards of ranks leave, by block."""
    found: defaultdict[int, set[Mark]] = defaultdict(set)
    for rank in ranks:
        for word in rows[rank]:
            if isinstance(word, Backward):
                found[word.block].add((word.block, word.micro, program.rows[rank].slice_index))
    return found


def _judge_unit(rows: Sequence[Words], unit: Unit, entries: Sequence[Entry], expected: set[Mark]) -> None:
    text = format_unit(unit)
    by_rank: defaultdict[int, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_rank[entry.rank].append(entry)
    histories: dict[tuple[Fraction, Fraction], tuple[int, list[Counter[Mark]]]] = {}
    judged: set[tuple[int, ...]] = set()
    for rank, own in by_rank.items():
        history = [entry.marks for entry in own]
        first, known = histories.setdefault(own[0].span, (rank, history))
        place = {rank: own[-1].index}
        if known is not history and known != history:
            raise ProgramError(
                f"ranks {first} and {rank} update unit {text} with different gradients; copies of the same "
                f"parameters must see the same\n{show_places(rows, place, 'here')}",
                law=6,
            )
        if first != rank or tuple(map(id, history)) in judged:
            continue
        judged.add(tuple(map(id, history)))  # ranks share the very objects where they share the gradient
        total = history[0] if len(history) == 1 else sum(history, Counter())
        _judge_marks(rows, text, place, (total, expected))
        if not all(history):
            raise ProgramError(
                f"rank {rank} updates unit {text} without a gradient that has come since the update before\n"
                f"{show_places(rows, place, 'here')}",
                law=6,
            )
    _judge_cover(text, sorted(histories))


def _judge_marks(
    rows: Sequence[Words], unit: str, place: Mapping[int, int], marks: tuple[Counter[Mark], set[Mark]]
) -> None:
    total, expected = marks
    if total.keys() == expected and all(count == 1 for count in total.values()):
        return
    doubled = sorted(mark for mark, count in total.items() if count > 1)
    missing = sorted(expected - total.keys())
    foreign = sorted(total.keys() - expected)
    parts = [
        f"{word} {', '.join(f'B{b}.{m}' for b, m, _ in found[:4])}{' and others' if len(found) > 4 else ''}"
        for word, found in (("twice", doubled), ("never", missing), ("wrongly", foreign))
        if found
    ]
    rank = next(iter(place))
    raise ProgramError(
        f"rank {rank} updates unit {unit} with gradients counted {'; '.join(parts)}; every gradient enters every "
        f"update exactly once\n{show_places(rows, place, 'here')}",
        law=6,
    )


def _judge_cover(unit: str, spans: Sequence[tuple[Fraction, Fraction]]) -> None:
    reached = Fraction(0)
    for low, high in spans:
        if low != reached:
            break
        reached = high
    if reached != 1:
        held = ", ".join(f"{low} to {high}" for low, high in spans) or "nothing"
        raise ProgramError(f"unit {unit} is updated only in part: {held}; all of it must be updated", law=6)
