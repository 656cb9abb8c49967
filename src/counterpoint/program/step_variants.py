"""Plans whose steps are not all alike: the kinds of steps they take, each a program of one step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from counterpoint.program.instruction import ApplyPushes, Backward, Forward, Group
from counterpoint.program.program import Program, shift_microbatch
from counterpoint.program.verify.symbolic import SymbolicResult


@dataclass(frozen=True, slots=True)
class StepVariant:
    """One kind of step.

    Args:
        name: ``step`` where there is only one kind; see :class:`counterpoint.strategies.sync_schedule.SyncSchedule`.
        program: what every rank does in it: a body alone.
        ledger: which gradients enter which update.
        sent_bytes: per rank, the bytes it sends in it, by the closed formulas.
        share: the part of all steps, in the long run, that are of this kind.
        stream: the program whose body it is, where messages go from one body to the next; None for any other.
    """

    name: str
    program: Program
    symbolic: SymbolicResult
    sent_bytes: tuple[Fraction, ...]
    frequency: Fraction = Fraction(1)
    async_pipeline: Program | None = None

    @property
    def full_program(self) -> Program:
        """The program that can be walked from its beginning to its end: that of the step, or its whole stream."""
        return self.async_pipeline or self.program

    @property
    def lookahead(self) -> int:
        """How many batches behind its own one the step begins; microbatches of batch k are ``k * stride`` and so on."""
        if self.async_pipeline is None:
            return 0
        micros = [word.micro for _, word in self.program.instructions() if isinstance(word, Forward)]
        return max(micros) // self.microbatches_per_batch

    @property
    def server_ranks(self) -> Group:
        """The ranks whose weights are the model's, to which those of others are drawn; none in most programs."""
        draws = (
            rank
            for rank, word in self.program.instructions()
            if isinstance(word, ApplyPushes) and not word.applies_gradients
        )
        return tuple(sorted(set(draws)))

    @property
    def microbatches_per_batch(self) -> int:
        """How many microbatches a batch has."""
        return len(self.program.micros)


def prologue_as_step(program: Program) -> Program:
    """Return the prologue of a stream as a step of its own."""
    return Program(tuple(replace(row, prologue=(), body=row.prologue, epilogue=()) for row in program.rank_programs))


def body_as_step(program: Program) -> Program:
    """Return the body of a stream as a step of its own, its microbatches counted from the first that goes backward."""
    first = min(
        (word.micro for row in program.rank_programs for word in row.body if isinstance(word, Backward)), default=0
    )
    return Program(
        tuple(
            replace(row, prologue=(), body=tuple(shift_microbatch(word, -first) for word in row.body), epilogue=())
            for row in program.rank_programs
        )
    )
