"""Plans whose steps are not all alike: the kinds of steps they take, each a program of one step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from counterpoint.program.instruction import Backward, Forward, Group, Serve
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
        stream: the program whose body it is, where messages go from one body to the next; None for any other.
    """

    name: str
    program: Program
    ledger: Ledger
    sent_bytes: tuple[Fraction, ...]
    share: Fraction = Fraction(1)
    stream: Program | None = None

    @property
    def playable(self) -> Program:
        """The program that can be walked from its beginning to its end: that of the step, or its whole stream."""
        return self.stream or self.program

    @property
    def ahead(self) -> int:
        """How many batches behind its own one the step begins; microbatches of batch k are ``k * stride`` and so on."""
        if self.stream is None:
            return 0
        micros = [word.micro for _, word in self.program.words() if isinstance(word, Forward)]
        return max(micros) // self.stride

    @property
    def center(self) -> Group:
        """The ranks whose weights are the model's, to which those of others are drawn; none in most programs."""
        draws = (rank for rank, word in self.program.words() if isinstance(word, Serve) and not word.updates)
        return tuple(sorted(set(draws)))

    @property
    def stride(self) -> int:
        """How many microbatches a batch has."""
        return len(self.program.micros)


def beginning(program: Program) -> Program:
    """Return the prologue of a stream as a step of its own."""
    return Program(tuple(replace(row, prologue=(), body=row.prologue, epilogue=()) for row in program.rows))


def steady(program: Program) -> Program:
    """Return the body of a stream as a step of its own, its microbatches counted from the first that goes backward."""
    first = min((word.micro for row in program.rows for word in row.body if isinstance(word, Backward)), default=0)
    return Program(
        tuple(
            replace(row, prologue=(), body=tuple(moved(word, -first) for word in row.body), epilogue=())
            for row in program.rows
        )
    )
