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
    Instruction,
    Recompute,
    Recv,
    Release,
    Send,
    Value,
)

Words: TypeAlias = tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank does.

    Args:
        body: what is repeated; one training step in a synchronous program.
        prologue: what comes once before the body, to fill a stream.
        epilogue: what comes once after the last body, to drain it.
        slice_index: which slice of sliced blocks the rank holds.
        num_slices: of how many.
    """

    body: Words
    prologue: Words = ()
    epilogue: Words = ()
    slice_index: int = 0
    num_slices: int = 1


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

    rows: tuple[Row, ...]
    folded: int = 0

    @property
    def num_ranks(self) -> int:
        """How many ranks the program needs."""
        return len(self.rows) * max(1, self.folded)

    @property
    def is_stream(self) -> bool:
        """Whether anything stands before or after the body."""
        return any(row.prologue or row.epilogue for row in self.rows)

    @property
    def micros(self) -> tuple[int, ...]:
        """The microbatches that one repetition of the body starts, in order: those that enter block 0."""
        started = (
            word.micro for row in self.rows for word in row.body if isinstance(word, Forward) and word.block == 0
        )
        return tuple(sorted(set(started)))

    def unroll(self, times: int) -> tuple[Words, ...]:
        """Return one flat tuple of instructions per rank: the prologue, the body ``times`` times, the epilogue."""
        if times == 1 and not self.is_stream:
            return tuple(row.body for row in self.rows)
        stride = len(self.micros)
        return tuple(
            row.prologue
            + tuple(moved(word, k * stride) for k in range(times) for word in row.body)
            + tuple(moved(word, times * stride) for word in row.epilogue)
            for row in self.rows
        )

    def words(self) -> Iterator[tuple[int, Instruction]]:
        """Yield every rank and instruction as written, without repeating the body."""
        for rank, row in enumerate(self.rows):
            for word in row.prologue + row.body + row.epilogue:
                yield rank, word


def moved(word: Instruction, by: int) -> Instruction:
    """Return the instruction for the microbatch that comes ``by`` later."""
    if by == 0:
        return word
    match word:
        case Forward() | Recompute() | Backward():
            return replace(word, micro=word.micro + by)
        case Send(value) | Recv(value) | Release(value) | Collective(_, value):
            if value.micro is None:
                return word
            return replace(word, value=Value(value.name, value.blocks, value.micro + by))
        case _:
            return word


def versions_held(words: Words) -> int:
    """Return how many versions of its weights a rank has to hold: the newest, and as many as it reads back.

    Example:
        >>> versions_held((Forward(0, 2), Backward(0, 0, version=-2)))
        3
    """
    return 1 - min((word.version for word in words if isinstance(word, Compute)), default=0)
