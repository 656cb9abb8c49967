"""Which units a program names, and which blocks use them.

Which units replicas may have in common: one copy of their weights, instead of one for each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from counterpoint.program.instruction import (
    UNIT_TENSORS,
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Forward,
    Free,
    Group,
    Instruction,
    Pull,
    Push,
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    TensorRef,
    Update,
)
from counterpoint.program.program import Instructions

Unit: TypeAlias = tuple[int, ...]
"""The blocks that use a set of parameters: ``(3,)`` for block 3 alone, ``(0, 4)`` for a tied weight."""
_WITHOUT_UNITS = {Forward, Recompute, Backward, Commit}


def units_by_block(rows: Sequence[Instructions]) -> defaultdict[int, list[Unit]]:
    """Return for each block the units it uses, read off the words that name units."""
    units: set[Unit] = set()
    for row in rows:
        for word in row:
            if type(word) not in _WITHOUT_UNITS:
                units.update(named_units(word))
    users: defaultdict[int, list[Unit]] = defaultdict(list)
    for unit in sorted(units):
        for block in unit:
            users[block].append(unit)
    return users


def named_units(word: Instruction) -> tuple[Unit, ...]:
    """Return the units that an instruction updates, moves or releases."""
    match word:
        case Update(unit) | SwapGradBuffers(unit):
            return (unit,)
        case ApplyPushes(units):
            return units
        case Push(value) | Pull(value) | Send(value) | Recv(value) | Free(value) | Collective(_, value):
            return (value.blocks,) if value.name in UNIT_TENSORS else ()
        case Forward() | Recompute() | Backward() | Commit():
            return ()


def sharded_units(row: Instructions, units_of: Mapping[int, Sequence[Unit]]) -> Iterator[tuple[Unit, Group]]:
    """Yield each unit that a row gathers before it reads it, and with whom: it keeps only its share between steps."""
    seen: set[Unit] = set()
    for word in row:
        match word:
            case Collective("all_gather", TensorRef("weight", unit), group) if unit not in seen:
                seen.add(unit)
                yield unit, group
            case Forward(block):
                seen.update(units_of[block])
            case _:
                pass


def host_shareable_units(words: Iterable[Instruction]) -> dict[tuple[int, ...], Group]:
    """Return the units whose gradient a row shares out once and whose weights it joins once, among the same ranks.

    Nothing of them may be released: then each of these ranks updates its part of what all of them read.

    Args:
        words: a row.

    Example:
        >>> from counterpoint.program.text import parse_instruction
        >>> row = "reduce_scatter(grad0)@0,1 U0 all_gather(weight0)@0,1 reduce_scatter(grad1)@0,1 free(grad1) U1 all_gather(weight1)@0,1"
        >>> groups_with_one_copy(map(parse_instruction, row.split()))
        {(0,): (0, 1)}
    """
    moved: dict[tuple[int, ...], list[tuple[str, Group]]] = {}
    released: set[tuple[int, ...]] = set()
    for word in words:
        if isinstance(word, Free):
            released.add(word.tensor.blocks)
        elif isinstance(word, Collective) and word.tensor.name in UNIT_TENSORS and word.phase != "wait":
            moved.setdefault(word.tensor.blocks, []).append((word.op, word.group))
    return {
        unit: found[0][1]
        for unit, found in moved.items()
        if unit not in released
        and [verb for verb, _ in found] == ["reduce_scatter", "all_gather"]
        and found[0][1] == found[1][1]
    }
