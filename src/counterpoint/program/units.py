"""Which units a program names, and which blocks use them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from counterpoint.program.instruction import (
    OF_UNITS,
    Backward,
    Collective,
    Commit,
    Forward,
    Group,
    Instruction,
    Pull,
    Push,
    Recompute,
    Recv,
    Release,
    Send,
    Serve,
    Swap,
    Update,
    Value,
)
from counterpoint.program.program import Words

Unit: TypeAlias = tuple[int, ...]
"""The blocks that use a set of parameters: ``(3,)`` for block 3 alone, ``(0, 4)`` for a tied weight."""
_UNITLESS = {Forward, Recompute, Backward, Commit}


def units_by_block(rows: Sequence[Words]) -> defaultdict[int, list[Unit]]:
    """Return for each block the units it uses, read off the words that name units."""
    units: set[Unit] = set()
    for row in rows:
        for word in row:
            if type(word) not in _UNITLESS:
                units.update(units_named(word))
    users: defaultdict[int, list[Unit]] = defaultdict(list)
    for unit in sorted(units):
        for block in unit:
            users[block].append(unit)
    return users


def units_named(word: Instruction) -> tuple[Unit, ...]:
    """Return the units that an instruction updates, moves or releases."""
    match word:
        case Update(unit) | Swap(unit):
            return (unit,)
        case Serve(units):
            return units
        case Push(value) | Pull(value) | Send(value) | Recv(value) | Release(value) | Collective(_, value):
            return (value.blocks,) if value.name in OF_UNITS else ()
        case Forward() | Recompute() | Backward() | Commit():
            return ()


def first_gathered(row: Words, users: Mapping[int, Sequence[Unit]]) -> Iterator[tuple[Unit, Group]]:
    """Yield each unit that a row gathers before it reads it, and with whom: it keeps only its share between steps."""
    seen: set[Unit] = set()
    for word in row:
        match word:
            case Collective("all_gather", Value("weight", unit), group) if unit not in seen:
                seen.add(unit)
                yield unit, group
            case Forward(block):
                seen.update(users[block])
            case _:
                pass
