"""A program: what every rank does, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from counterpoint.program.instruction import (
    Backward,
    Collective,
    Compute,
    Forward,
    Free,
    Instruction,
    Recompute,
    Recv,
    Send,
    TensorRef,
)

Instructions: TypeAlias = tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class RankProgram:
    """What one rank does.

    Args:
        body: what is repeated; one training step in a synchronous program.
        prologue: what comes once before the body, to fill a stream.
        epilogue: what comes once after the last body, to drain it.
        slice_index: which slice of sliced blocks the rank holds.
        num_slices: of how many.
    """

    body: Instructions
    prologue: Instructions = ()
    epilogue: Instructions = ()
    tp_rank: int = 0
    tp_degree: int = 1


@dataclass(frozen=True, slots=True)
class Program:
    """One row of instructions per rank; ``rows[rank]`` is that rank's part.

    Microbatches are numbered over the whole global batch, so that a row says by itself which samples it reads.
    In a body the numbers count from the first microbatch of that repetition.

    Args:
        rows: what each rank does.
        folded: how many copies of these rows stand side by side, of which only the first is written down: enough to
            see how long a step takes, and nothing that can run. 0 where all rows are written down.
    """

    rank_programs: tuple[RankProgram, ...]
    num_identical_copies: int = 0

    @property
    def num_ranks(self) -> int:
        """How many ranks the program needs."""
        return len(self.rank_programs) * max(1, self.num_identical_copies)

    @property
    def is_async_pipeline(self) -> bool:
        """Whether anything stands before or after the body."""
        return any(row.prologue or row.epilogue for row in self.rank_programs)

    @property
    def micros(self) -> tuple[int, ...]:
        """The microbatches that one repetition of the body starts, in order: those that enter block 0."""
        started = (
            word.micro
            for row in self.rank_programs
            for word in row.body
            if isinstance(word, Forward) and word.block == 0
        )
        return tuple(sorted(set(started)))

    def unroll(self, times: int) -> tuple[Instructions, ...]:
        """Return one flat tuple of instructions per rank: the prologue, the body ``times`` times, the epilogue."""
        if times == 1 and not self.is_async_pipeline:
            return tuple(row.body for row in self.rank_programs)
        stride = len(self.micros)
        return tuple(
            row.prologue
            + tuple(shift_microbatch(word, k * stride) for k in range(times) for word in row.body)
            + tuple(shift_microbatch(word, times * stride) for word in row.epilogue)
            for row in self.rank_programs
        )

    def instructions(self) -> Iterator[tuple[int, Instruction]]:
        """Yield every rank and instruction as written, without repeating the body."""
        for rank, row in enumerate(self.rank_programs):
            for word in row.prologue + row.body + row.epilogue:
                yield rank, word


def shift_microbatch(word: Instruction, by: int) -> Instruction:
    """Return the instruction for the microbatch that comes ``by`` later."""
    if by == 0:
        return word
    match word:
        case Forward() | Recompute() | Backward():
            return replace(word, micro=word.micro + by)
        case Send(value) | Recv(value) | Free(value) | Collective(_, value):
            if value.micro is None:
                return word
            return replace(word, tensor=TensorRef(value.name, value.blocks, value.micro + by))
        case _:
            return word


def weight_versions_needed(words: Instructions) -> int:
    """Return how many versions of its weights a rank has to hold: the newest, and as many as it reads back.

    Example:
        >>> versions_held((Forward(0, 2), Backward(0, 0, version=-2)))
        3
    """
    return 1 - min((word.version for word in words if isinstance(word, Compute)), default=0)
