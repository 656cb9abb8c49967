"""Which units replicas may have in common: one copy of their weights, instead of one for each."""

from __future__ import annotations

from collections.abc import Iterable

from counterpoint.program.instruction import OF_UNITS, Collective, Group, Instruction, Release


def groups_with_one_copy(words: Iterable[Instruction]) -> dict[tuple[int, ...], Group]:
    """Return the units whose gradient a row shares out once and whose weights it joins once, among the same ranks.

    Nothing of them may be released: then each of these ranks updates its part of what all of them read.

    Args:
        words: a row.

    Example:
        >>> from counterpoint.program.text import parse_instruction
        >>> row = "share(grad0)@0,1 U0 join(weight0)@0,1 share(grad1)@0,1 release(grad1) U1 join(weight1)@0,1"
        >>> groups_with_one_copy(map(parse_instruction, row.split()))
        {(0,): (0, 1)}
    """
    moved: dict[tuple[int, ...], list[tuple[str, Group]]] = {}
    released: set[tuple[int, ...]] = set()
    for word in words:
        if isinstance(word, Release):
            released.add(word.value.blocks)
        elif isinstance(word, Collective) and word.value.name in OF_UNITS and word.phase != "-":
            moved.setdefault(word.value.blocks, []).append((word.verb, word.group))
    return {
        unit: found[0][1]
        for unit, found in moved.items()
        if unit not in released and [verb for verb, _ in found] == ["share", "join"] and found[0][1] == found[1][1]
    }
