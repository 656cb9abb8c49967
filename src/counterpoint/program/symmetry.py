"""Which ranks do the same things at the same times, so that one of them speaks for all.

Two ranks are of one class when their words are equal but for a shift of ranks and microbatches, and every word
meets words at the same places of ranks of the same classes. Whatever a word does then depends on equal things in
both rows, so that by induction along any order in which the program can run, both go through the same times.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Forward,
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
from counterpoint.program.partners import Partners, edges, find_partners
from counterpoint.program.program import Program, Row, Words


def classes(program: Program, rows: Sequence[Words] | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the ranks in classes, each in ascending order, by their first rank.

    Args:
        program: a program that keeps the laws.
        rows: its flat rows, when they are at hand.

    Example:
        >>> from counterpoint.program.text import parse_program
        >>> text = ["F0.0 x1.0>1 B0.0", "x1.0<0 F1.0", "F0.1 x1.1>3 B0.1", "x1.1<2 F1.1"]
        >>> classes(parse_program(chr(10).join(text)))
        ((0, 2), (1, 3))
    """
    flat = program.unroll(1) if rows is None else rows
    return refine(program, flat, find_partners(flat))


def refine(program: Program, rows: Sequence[Words], partners: Partners) -> tuple[tuple[int, ...], ...]:
    """Return the classes of rows whose partners are known; see :func:`classes`."""
    colours = _numbered([_outline(row, words) for row, words in zip(program.rows, rows, strict=True)])
    meetings = edges(partners, len(rows))
    while True:
        calls = _numbered([frozenset((colours[rank], index) for rank, index in call) for call in partners.members])
        finer = _numbered([(colours[rank], _surroundings(own, colours, calls)) for rank, own in enumerate(meetings)])
        if max(finer, default=0) == max(colours, default=0):
            break
        colours = finer
    together: dict[int, list[int]] = {}
    for rank, colour in enumerate(colours):
        together.setdefault(colour, []).append(rank)
    return tuple(map(tuple, together.values()))


def _numbered(things: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(thing, len(numbers)) for thing in things]


def _surroundings(
    own: Sequence[tuple[int, tuple[int, int] | int, int]], colours: Sequence[int], calls: Sequence[int]
) -> tuple[tuple[int, int, int, int], ...]:
    """Say whom each word meets, and where: the class instead of the rank."""
    return tuple(
        (index, calls[other], -1, seat) if isinstance(other, int) else (index, colours[other[0]], other[1], seat)
        for index, other, seat in own
    )


def _outline(row: Row, words: Words) -> Hashable:
    """Return a row without its ranks, and with microbatches counted from its first one."""
    first = next((word.micro for word in words if type(word) is Forward), 0)
    return row.num_slices, tuple(_plain(word, first) for word in words)


def _plain(word: Instruction, first: int) -> Hashable:  # noqa: PLR0911 - one case each
    match word:
        case Forward(block, micro, version):
            return "F", block, micro - first, version
        case Backward(block, micro, version, part):
            return "B", block, micro - first, version, part
        case Recompute(block, micro, version):
            return "R", block, micro - first, version
        case Send(value) | Recv(value) | Push(value) | Pull(value) | Release(value):
            return type(word), _value(value, first)
        case Collective(_, value, group, phase):
            return word.name, _value(value, first), len(group), phase
        case Commit(group, own):
            return "commit", len(group), len(own)
        case Update(unit):
            return "U", unit
        case Swap(unit):
            return "swap", unit
        case Serve(units, workers):
            return "serve", units, len(workers)


def _value(value: Value, first: int) -> Hashable:
    return value.name, value.blocks, None if value.micro is None else value.micro - first
