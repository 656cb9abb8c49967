"""Plans whose steps are not all alike: the kinds of steps they take, each a program of one step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from counterpoint.program.ledger import Ledger
from counterpoint.program.program import Program, moved


@dataclass(frozen=True, slots=True)
class Turn:
    """One kind of step.

    Args:
        name: ``step`` where there is only one kind; see :class:`counterpoint.strategies.rhythm.Rhythm`.
        program: what every rank does in it: a body alone.
        ledger: which gradients enter which update.
        sent_bytes: per rank, the bytes it sends in it, by the closed formulas.
        share: the part of all steps, in the long run, that are of this kind.
    """

    name: str
    program: Program
    ledger: Ledger
    sent_bytes: tuple[Fraction, ...]
    share: Fraction = Fraction(1)


def beginning(program: Program) -> Program:
    """Return the prologue of a stream as a step of its own."""
    return Program(tuple(replace(row, prologue=(), body=row.prologue, epilogue=()) for row in program.rows))


def steady(program: Program) -> Program:
    """Return the body of a stream as a step of its own, its microbatches counted from 0."""
    first = min(program.micros, default=0)
    return Program(
        tuple(
            replace(row, prologue=(), body=tuple(moved(word, -first) for word in row.body), epilogue=())
            for row in program.rows
        )
    )
