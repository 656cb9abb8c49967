"""Step variants: the different kinds of training steps of a plan, each a program of one step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from counterpoint.program.instruction import ApplyPushes, Backward, Forward, Group
from counterpoint.program.program import Program, shift_microbatch
from counterpoint.program.verify.symbolic import SymbolicResult


@dataclass(frozen=True, slots=True)
class StepVariant:
    """One kind of training step.

    Args:
        name: ``step`` if there is only one kind; see :class:`counterpoint.strategies.sync_schedule.SyncSchedule`.
        program: what every rank executes in it: a body only.
        symbolic: the symbolic execution of the program.
        sent_bytes: per rank, the bytes that it sends, according to the closed formulas.
        frequency: the fraction of all steps, in the long run, that are of this kind.
        async_pipeline: the program whose body it is, if messages pass from one body to the next; else None.
    """

    name: str
    program: Program
    symbolic: SymbolicResult
    sent_bytes: tuple[Fraction, ...]
    frequency: Fraction = Fraction(1)
    async_pipeline: Program | None = None

    @property
    def full_program(self) -> Program:
        """The program that can be executed from beginning to end: the step, or its whole asynchronous pipeline."""
        return self.async_pipeline or self.program

    @property
    def lookahead(self) -> int:
        """Number of batches ahead of its own one that the step starts.

        The microbatches of batch k begin at ``k * microbatches_per_batch``.
        """
        if self.async_pipeline is None:
            return 0
        micros = [
            instruction.micro for _, instruction in self.program.instructions() if isinstance(instruction, Forward)
        ]
        return max(micros) // self.microbatches_per_batch

    @property
    def server_ranks(self) -> Group:
        """The ranks that hold the center weights of elastic averaging, which are the model's; usually empty."""
        draws = (
            rank
            for rank, instruction in self.program.instructions()
            if isinstance(instruction, ApplyPushes) and not instruction.applies_gradients
        )
        return tuple(sorted(set(draws)))

    @property
    def microbatches_per_batch(self) -> int:
        """Number of microbatches of a batch."""
        return len(self.program.micros)


def prologue_as_step(program: Program) -> Program:
    """Return the prologue of an asynchronous pipeline as a step of its own."""
    return Program(
        tuple(
            replace(rank_program, prologue=(), body=rank_program.prologue, epilogue=())
            for rank_program in program.rank_programs
        )
    )


def body_as_step(program: Program) -> Program:
    """Return the body of an asynchronous pipeline as a step; microbatches count from the first that runs backward."""
    first = min(
        (
            instruction.micro
            for rank_program in program.rank_programs
            for instruction in rank_program.body
            if isinstance(instruction, Backward)
        ),
        default=0,
    )
    return Program(
        tuple(
            replace(
                rank_program,
                prologue=(),
                body=tuple(shift_microbatch(instruction, -first) for instruction in rank_program.body),
                epilogue=(),
            )
            for rank_program in program.rank_programs
        )
    )
