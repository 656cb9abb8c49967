"""Rewrites from which strategies are composed; each is a pure function from program to program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Forward,
    Group,
    Instruction,
    Pull,
    Push,
    Recv,
    Send,
    TensorRef,
    grad,
)
from counterpoint.program.program import Instructions, Program, RankProgram, shift_microbatch


def shift_ranks(instruction: Instruction, by: int) -> Instruction:
    """Return the instruction with ``by`` added to every rank that it names."""
    if by == 0:
        return instruction
    match instruction:
        case Send() | Recv() | Push() | Pull():
            return replace(instruction, peer=instruction.peer + by)
        case Collective():
            return replace(instruction, group=tuple(member + by for member in instruction.group))
        case Commit(group, own):
            return Commit(tuple(member + by for member in group), tuple(member + by for member in own))
        case ApplyPushes():
            return replace(instruction, workers=tuple(member + by for member in instruction.workers))
        case _:
            return instruction


def replicate(program: Program, times: int, *, same_samples: bool = False) -> Program:
    """Return the program with ``times`` replicas; replica ``c`` of rank ``r`` is rank ``c * num_ranks + r``.

    If the program gives only the first of several identical replicas, these are counted instead of written out.

    Args:
        program: the program to replicate.
        times: number of replicas.
        same_samples: whether all replicas read the same microbatches; else each reads its own.
    """
    if program.num_identical_copies:
        return replace(program, num_identical_copies=program.num_identical_copies * times)
    stride = 0 if same_samples else len(program.micros)
    return Program(
        tuple(
            map_parts(rank_program, partial(_shift_copy, by=(copy * program.num_ranks, copy * stride), seen={}))
            for copy in range(times)
            for rank_program in program.rank_programs
        )
    )


def _shift_copy(instructions: Instructions, by: tuple[int, int], seen: dict[int, Group]) -> Iterator[Instruction]:
    """Yield the instructions shifted by ranks and microbatches; groups stay shared as objects."""
    ranks, micros = by
    if ranks == 0:
        yield from (shift_microbatch(instruction, micros) for instruction in instructions)
        return
    for instruction in instructions:
        match instruction:
            case Forward(block, micro, version):
                yield Forward(block, micro + micros, version)
            case Backward(block, micro, version, part):
                yield Backward(block, micro + micros, version, part)
            case Collective(op, tensor, group, phase, codec):
                yield Collective(op, _shift_tensor(tensor, micros), _shift_group(group, ranks, seen), phase, codec)
            case Commit(group, own):
                yield Commit(_shift_group(group, ranks, seen), _shift_group(own, ranks, seen))
            case Send(tensor, peer, codec):
                yield Send(_shift_tensor(tensor, micros), peer + ranks, codec)
            case Recv(tensor, peer, codec):
                yield Recv(_shift_tensor(tensor, micros), peer + ranks, codec)
            case _:
                yield shift_microbatch(shift_ranks(instruction, ranks), micros)


def _shift_tensor(tensor: TensorRef, micros: int) -> TensorRef:
    return (
        tensor if tensor.micro is None or micros == 0 else TensorRef(tensor.name, tensor.blocks, tensor.micro + micros)
    )


def _shift_group(group: Group, ranks: int, seen: dict[int, Group]) -> Group:
    if id(group) not in seen:
        seen[id(group)] = tuple(member + ranks for member in group)
    return seen[id(group)]


def map_parts(rank_program: RankProgram, change: Callable[[Instructions], Iterable[Instruction]]) -> RankProgram:
    """Return the rank program with ``change`` applied to each of its three parts."""
    return replace(
        rank_program,
        prologue=tuple(change(rank_program.prologue)),
        body=tuple(change(rank_program.body)),
        epilogue=tuple(change(rank_program.epilogue)),
    )


def expand(program: Program, rule: Callable[[int, Instruction], Iterable[Instruction]]) -> Program:
    """Replace every instruction by the ones that ``rule(rank, instruction)`` returns."""

    def spread(instructions: Instructions, rank: int) -> Iterable[Instruction]:
        return (inserted for old in instructions for inserted in rule(rank, old))

    rank_programs = (
        map_parts(rank_program, partial(spread, rank=rank)) for rank, rank_program in enumerate(program.rank_programs)
    )
    return replace(program, rank_programs=tuple(rank_programs))


def split_at_commit(instructions: Instructions) -> tuple[Instructions, Instructions]:
    """Split instructions in front of the first commit; without a commit, the second part is empty."""
    commits = (index for index, instruction in enumerate(instructions) if isinstance(instruction, Commit))
    first = next(commits, len(instructions))
    return instructions[:first], instructions[first:]


def insert_before_commit(rank_program: RankProgram, inserted: Sequence[Instruction]) -> RankProgram:
    """Return the rank program with instructions before the first commit of its body; unchanged without a commit."""
    compute, update = split_at_commit(rank_program.body)
    return replace(rank_program, body=(*compute, *inserted, *update)) if inserted and update else rank_program


def widen_commits(program: Program, times: int) -> Program:
    """Let the ``times`` replicas of a program commit together."""
    stride = program.num_ranks // times
    by_identity: dict[int, tuple[Group, Commit]] = {}
    by_members: dict[Group, Commit] = {}

    def widened(instruction: Instruction) -> Instruction:
        if not isinstance(instruction, Commit):
            return instruction
        if id(instruction.group) not in by_identity:
            inner = tuple(sorted(member % stride for member in instruction.group))
            if inner not in by_members:
                by_members[inner] = Commit(
                    tuple(sorted(member + copy * stride for copy in range(times) for member in inner))
                )
            by_identity[id(instruction.group)] = (instruction.group, by_members[inner])
        return by_identity[id(instruction.group)][1]

    return replace(
        program,
        rank_programs=tuple(map_parts(rank_program, partial(map, widened)) for rank_program in program.rank_programs),
    )


def order_by_grad_completion(rank_program: RankProgram, units: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the units in the order in which the body completes their gradients."""
    last = {
        instruction.block: i for i, instruction in enumerate(rank_program.body) if isinstance(instruction, Backward)
    }
    return sorted(units, key=lambda unit: (max((last.get(block, -1) for block in unit), default=-1), unit))


def grad_completion_index(instructions: Instructions, unit: tuple[int, ...]) -> int | None:
    """Return the index of the last instruction that adds to a unit's gradient; None if there is none."""
    found = None
    for index, instruction in enumerate(instructions):
        match instruction:
            case Backward(block) if block in unit:
                found = index
            case Recv(tensor) | Collective(_, tensor) if tensor == grad(unit):
                found = index
            case _:
                pass
    return found


def forward_blocks(rank_program: RankProgram) -> set[int]:
    """Return the blocks whose forward a rank runs."""
    return {
        instruction.block
        for instruction in rank_program.prologue + rank_program.body
        if isinstance(instruction, Forward)
    }


def backward_runs(rank_program: RankProgram) -> tuple[range, ...]:
    """Return the blocks of a rank in runs whose backwards always follow each other directly."""
    computes = [
        instruction
        for instruction in rank_program.prologue + rank_program.body + rank_program.epilogue
        if isinstance(instruction, Forward | Backward)
    ]
    if not computes:
        return ()
    run_starts: set[int] = set()
    for instruction, following in zip(computes, [*computes[1:], None], strict=True):
        if (
            isinstance(instruction, Backward)
            and instruction.computes_weight_grad
            and replace(instruction, block=instruction.block - 1) != following
        ):
            run_starts.add(instruction.block)
    blocks = sorted({instruction.block for instruction in computes})
    starts = [
        index
        for index, block in enumerate(blocks)
        if block in run_starts or block - 1 != blocks[index - 1] or index == 0
    ]
    return tuple(range(blocks[a], blocks[b - 1] + 1) for a, b in pairwise([*starts, len(blocks)]))
