"""Programs: the instructions of every rank, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from counterpoint.program.instruction import (
    Backward,
    Collective,
    Compute,
    Fetch,
    Forward,
    Free,
    Instruction,
    Offload,
    Recompute,
    Recv,
    Send,
    TensorRef,
)

Instructions: TypeAlias = tuple[Instruction, ...]
"""A sequence of instructions of one rank."""


@dataclass(frozen=True, slots=True)
class RankProgram:
    """The instructions of one rank.

    Args:
        body: what is repeated; one training step in a synchronous program.
        prologue: what runs once before the first body, to fill an asynchronous pipeline.
        epilogue: what runs once after the last body, to drain it.
        tp_rank: index of the shard of tensor-parallel blocks that the rank holds.
        tp_degree: number of these shards.
    """

    body: Instructions
    prologue: Instructions = ()
    epilogue: Instructions = ()
    tp_rank: int = 0
    tp_degree: int = 1


@dataclass(frozen=True, slots=True)
class Program:
    """One :class:`RankProgram` per rank; ``rank_programs[rank]`` belongs to that rank.

    Microbatches are numbered over the whole global batch, so that a rank program alone says which samples it reads. In
    a body the numbers count from the first microbatch of that repetition.

    Args:
        rank_programs: the instructions of every rank.
        num_identical_copies: if positive, ``rank_programs`` is only the first of this many identical replicas: enough
            to predict the time of a step, but not to run. 0 if the rank programs of all ranks are given.
    """

    rank_programs: tuple[RankProgram, ...]
    num_identical_copies: int = 0

    @property
    def num_ranks(self) -> int:
        """Number of ranks that the program needs."""
        return len(self.rank_programs) * max(1, self.num_identical_copies)

    @property
    def is_async_pipeline(self) -> bool:
        """Whether any rank has a prologue or an epilogue."""
        return any(rank_program.prologue or rank_program.epilogue for rank_program in self.rank_programs)

    @property
    def micros(self) -> tuple[int, ...]:
        """Indices of the microbatches that one repetition of the body starts, in order: those that enter block 0."""
        started = (
            instruction.micro
            for rank_program in self.rank_programs
            for instruction in rank_program.body
            if isinstance(instruction, Forward) and instruction.block == 0
        )
        return tuple(sorted(set(started)))

    def unroll(self, times: int) -> tuple[Instructions, ...]:
        """Return each rank's instructions as a flat sequence: prologue, ``times`` repetitions of the body, epilogue."""
        if times == 1 and not self.is_async_pipeline:
            return tuple(rank_program.body for rank_program in self.rank_programs)
        stride = len(self.micros)
        return tuple(
            rank_program.prologue
            + tuple(
                shift_microbatch(instruction, k * stride) for k in range(times) for instruction in rank_program.body
            )
            + tuple(shift_microbatch(instruction, times * stride) for instruction in rank_program.epilogue)
            for rank_program in self.rank_programs
        )

    def instructions(self) -> Iterator[tuple[int, Instruction]]:
        """Yield ``(rank, instruction)`` for all instructions as written, without repeating the body."""
        for rank, rank_program in enumerate(self.rank_programs):
            for instruction in rank_program.prologue + rank_program.body + rank_program.epilogue:
                yield rank, instruction


def shift_microbatch(instruction: Instruction, by: int) -> Instruction:
    """Return the instruction with its microbatch index increased by ``by``."""
    if by == 0:
        return instruction
    match instruction:
        case Forward() | Recompute() | Backward():
            return replace(instruction, micro=instruction.micro + by)
        case Send(tensor) | Recv(tensor) | Free(tensor) | Fetch(tensor) | Offload(tensor) | Collective(_, tensor):
            if tensor.micro is None:
                return instruction
            return replace(instruction, tensor=TensorRef(tensor.name, tensor.blocks, tensor.micro + by))
        case _:
            return instruction


def weight_versions_needed(instructions: Instructions) -> int:
    """Return how many weight versions a rank must hold: the newest, and as many older ones as it reads.

    Example:
        >>> weight_versions_needed((Forward(0, 2), Backward(0, 0, version=-2)))
        3
    """
    return 1 - min((instruction.version for instruction in instructions if isinstance(instruction, Compute)), default=0)
