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
        >>> row = "reduce_scatter(grad0)@0,1 U0 all_gather(weight0)@0,1 reduce_scatter(grad1)@0,1 free(grad1) U1 all_gather(weight1)@0,1"
        >>> groups_with_one_copy(map(parse_instruction, row.split()))
        {(0,): (0, 1)}
    """
    moved: dict[tuple[int, ...], list[tuple[str, Group]]] = {}
    released: set[tuple[int, ...]] = set()
    for word in words:
        if isinstance(word, Release):
            released.add(word.value.blocks)
        elif isinstance(word, Collective) and word.value.name in OF_UNITS and word.phase != "wait":
            moved.setdefault(word.value.blocks, []).append((word.verb, word.group))
    return {
        unit: found[0][1]
        for unit, found in moved.items()
        if unit not in released
        and [verb for verb, _ in found] == ["reduce_scatter", "all_gather"]
        and found[0][1] == found[1][1]
    }
