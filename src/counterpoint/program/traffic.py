"""Count the bytes that a program's words move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import Protocol

from counterpoint.program.codes import sum_trips
from counterpoint.program.instruction import Collective, Instruction, Push, Send, Serve, Value, weight
from counterpoint.program.program import Program, Words


class Sizes(Protocol):
    """How large values are."""

    def __call__(self, value: Value, code: str = "") -> int:
        """Return the bytes of a whole value on one rank, as it is or written in a code."""
        ...


def sent_bytes(program: Program, size_of: Sizes) -> tuple[Fraction, ...]:
    """Return the bytes that each rank sends in one repetition of the body.

    Collectives count what a ring sends: ``2 (n-1)/n`` of the value for a sum or a mean, ``(n-1)/n`` for a share or a
    join; a copy counts ``n-1`` values at its root. A sum with a code counts encoded values, ``n-1`` of them where they
    are gathered. Commits carry a few dozen bytes and count nothing.

    Args:
        program: what is counted.
        size_of: bytes of a whole value on one rank.
    """
    return tuple(_row_bytes(rank, row.body, size_of) for rank, row in enumerate(program.rows))


def _row_bytes(rank: int, words: Words, size_of: Sizes) -> Fraction:
    sums: defaultdict[int, int] = defaultdict(int)  # by denominator: adding fractions one by one is slow
    for _, part, size in _moves(rank, words, size_of):
        sums[part.denominator] += part.numerator * size
    return sum((Fraction(total, denominator) for denominator, total in sums.items()), Fraction(0))


def row_traffic(rank: int, words: Words, size_of: Sizes) -> Iterator[tuple[Instruction, Fraction | int]]:
    """Yield every word with the bytes that the rank sends because of it."""
    for word, part, size in _moves(rank, words, size_of):
        yield word, part * size


def _moves(rank: int, words: Words, size_of: Sizes) -> Iterator[tuple[Instruction, Fraction | int, int]]:
    """Yield every word with what it sends: a part or a multiple, of how many bytes."""
    parts: dict[tuple[int, ...], Fraction] = {}
    for word in words:
        match word:
            case Collective(phase="wait"):
                yield word, 0, 0
            case Collective(_, value, group, code=code) if code:
                yield word, sum_trips(code, len(group)), size_of(value, code)
            case Collective(verb, value, group):
                sent = _collective(verb, len(group), is_root=rank == group[0])
                if value.name == "grad":
                    sent *= parts.get(value.blocks, 1) if verb == "all_reduce" else 1
                    if verb == "reduce_scatter":
                        parts[value.blocks] = Fraction(1, len(group))
                yield word, sent, size_of(value)
            case Send(value, code=code) | Push(value, code=code):
                yield word, 1, size_of(value, code)
            case Serve(units, workers) if word.answers:
                yield word, len(workers), sum(size_of(weight(unit)) for unit in units)
            case _:
                yield word, 0, 0


@cache
def _collective(verb: str, num_members: int, *, is_root: bool) -> Fraction:
    if verb == "broadcast":
        return Fraction(num_members - 1 if is_root else 0)
    return (
        sum_trips("", num_members)
        if verb in {"all_reduce", "all_reduce_mean"}
        else Fraction(num_members - 1, num_members)
    )
