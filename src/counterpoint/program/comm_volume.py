"""Count the bytes that a program's words move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import Protocol

from counterpoint.program.compression import ring_volume_factor
from counterpoint.program.instruction import ApplyPushes, Collective, Instruction, Push, Send, TensorRef, weight
from counterpoint.program.program import Instructions, Program


class SizeFn(Protocol):
    """How large values are."""

    def __call__(self, value: TensorRef, code: str = "") -> int:
        """Return the bytes of a whole value on one rank, as it is or written in a code."""
        ...


def sent_bytes(program: Program, size_of: SizeFn) -> tuple[Fraction, ...]:
    """Return the bytes that each rank sends in one repetition of the body.

    Collectives count what a ring sends: ``2 (n-1)/n`` of the value for a sum or a mean, ``(n-1)/n`` for a share or a
    join; a copy counts ``n-1`` values at its root. A sum with a code counts encoded values, ``n-1`` of them where they
    are gathered. Commits carry a few dozen bytes and count nothing.

    Args:
        program: what is counted.
        size_of: bytes of a whole value on one rank.
    """
    return tuple(_rank_bytes(rank, row.body, size_of) for rank, row in enumerate(program.rank_programs))


def _rank_bytes(rank: int, words: Instructions, size_of: SizeFn) -> Fraction:
    sums: defaultdict[int, int] = defaultdict(int)  # by denominator: adding fractions one by one is slow
    for _, part, size in _sends(rank, words, size_of):
        sums[part.denominator] += part.numerator * size
    return sum((Fraction(total, denominator) for denominator, total in sums.items()), Fraction(0))


def row_traffic(rank: int, words: Instructions, size_of: SizeFn) -> Iterator[tuple[Instruction, Fraction | int]]:
    """Yield every word with the bytes that the rank sends because of it."""
    for word, part, size in _sends(rank, words, size_of):
        yield word, part * size


def _sends(rank: int, words: Instructions, size_of: SizeFn) -> Iterator[tuple[Instruction, Fraction | int, int]]:
    """Yield every word with what it sends: a part or a multiple, of how many bytes."""
    parts: dict[tuple[int, ...], Fraction] = {}
    for word in words:
        match word:
            case Collective(phase="wait"):
                yield word, 0, 0
            case Collective(_, value, group, codec=code) if code:
                yield word, ring_volume_factor(code, len(group)), size_of(value, code)
            case Collective(verb, value, group):
                sent = _collective_volume(verb, len(group), is_root=rank == group[0])
                if value.name == "grad":
                    sent *= parts.get(value.blocks, 1) if verb == "all_reduce" else 1
                    if verb == "reduce_scatter":
                        parts[value.blocks] = Fraction(1, len(group))
                yield word, sent, size_of(value)
            case Send(value, codec=code) | Push(value, codec=code):
                yield word, 1, size_of(value, code)
            case ApplyPushes(units, workers) if word.replies:
                yield word, len(workers), sum(size_of(weight(unit)) for unit in units)
            case _:
                yield word, 0, 0


@cache
def _collective_volume(verb: str, num_members: int, *, is_root: bool) -> Fraction:
    if verb == "broadcast":
        return Fraction(num_members - 1 if is_root else 0)
    return (
        ring_volume_factor("", num_members)
        if verb in {"all_reduce", "all_reduce_mean"}
        else Fraction(num_members - 1, num_members)
    )
