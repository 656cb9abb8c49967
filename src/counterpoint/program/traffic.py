"""Count the bytes that a program's words move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

from counterpoint.program.instruction import Collective, Group, Instruction, Push, Send, Serve, Value, weight
from counterpoint.program.program import Program, Words


def sent_bytes(program: Program, size_of: Callable[[Value], int]) -> tuple[Fraction, ...]:
    """Return the bytes that each rank sends in one repetition of the body.

    Collectives count what a ring sends: ``2 (n-1)/n`` of the value for a sum, ``(n-1)/n`` for a share or a join;
    a copy counts ``n-1`` values at its root. Commits carry a few dozen bytes and count nothing.

    Args:
        program: what is counted.
        size_of: bytes of a whole value on one rank.
    """
    return tuple(
        Fraction(sum(moved for _, moved in row_traffic(rank, row.body, size_of)))
        for rank, row in enumerate(program.rows)
    )


def row_traffic(
    rank: int, words: Words, size_of: Callable[[Value], int]
) -> Iterator[tuple[Instruction, Fraction | int]]:
    """Yield every word with the bytes that the rank sends because of it."""
    parts: dict[tuple[int, ...], Fraction] = {}
    for word in words:
        match word:
            case Collective(phase="-"):
                yield word, 0
            case Collective(verb, value, group):
                held = parts.get(value.blocks, Fraction(1)) if value.name == "grad" and verb == "sum" else Fraction(1)
                if verb == "share":
                    parts[value.blocks] = Fraction(1, len(group))
                yield word, _collective(verb, rank, group) * held * size_of(value)
            case Send(value) | Push(value):
                yield word, size_of(value)
            case Serve(units, workers):
                yield word, len(workers) * sum(size_of(weight(unit)) for unit in units)
            case _:
                yield word, 0


def _collective(verb: str, rank: int, group: Group) -> Fraction:
    if verb == "copy":
        return Fraction(len(group) - 1 if rank == group[0] else 0)
    trip = Fraction(len(group) - 1, len(group))
    return 2 * trip if verb == "sum" else trip
