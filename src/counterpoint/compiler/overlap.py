"""The overlap pass: start reductions as soon as their gradients are complete, and wait for them at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from counterpoint.program.instruction import Backward, Collective, Commit, Group, Instruction, Recv, TensorRef
from counterpoint.program.program import Instructions, Program
from counterpoint.program.rewrite import map_parts


def overlap(program: Program) -> Program:
    """Split every reduction of a gradient before the commit into a start and a wait, and move the start up.

    The start is placed right after the last backward of its unit on the rank, or after the last message that adds to
    the gradient, but never before another collective that the same group calls first: members that complete their units
    in different orders still call in the same order. The wait stays where the collective was. Gradients with several
    collectives are left unchanged. Results cannot change, because nothing reads or writes the gradient in between::

        before   B1.0 B0.0 all_reduce(grad1)@0,1 all_reduce(grad0)@0,1 commit@0,1
        after    B1.0 all_reduce_start(grad1)@0,1 B0.0 all_reduce_start(grad0)@0,1
                 all_reduce_wait(grad1)@0,1 all_reduce_wait(grad0)@0,1 commit@0,1
    """
    return replace(
        program,
        rank_programs=tuple(map_parts(rank_program, _overlap_instructions) for rank_program in program.rank_programs),
    )


def _overlap_instructions(instructions: Instructions) -> list[Instruction]:
    commit_index = next((i for i, instruction in enumerate(instructions) if isinstance(instruction, Commit)), 0)
    grad_collectives = [
        instruction
        for instruction in instructions[:commit_index]
        if isinstance(instruction, Collective) and instruction.tensor.name == "grad"
    ]
    num_collectives = Counter(instruction.tensor for instruction in grad_collectives)
    starts: dict[int, list[Instruction]] = {}
    waits: dict[int, Instruction] = {}
    last_call: dict[Group, int] = {}
    producers: dict[int | TensorRef, int] = {}
    for index, instruction in enumerate(instructions[:commit_index]):
        if isinstance(instruction, Collective):
            target_index = index
            if instruction.tensor.name == "grad" and num_collectives[instruction.tensor] == 1:
                last_producer = max(
                    (
                        producers[producer]
                        for producer in (*instruction.tensor.blocks, instruction.tensor)
                        if producer in producers
                    ),
                    default=None,
                )
                if last_producer is not None:
                    target_index = max(last_producer, last_call.get(instruction.group, -1))
                    starts.setdefault(target_index, []).append(replace(instruction, phase="start"))
                    waits[index] = replace(instruction, phase="wait")
            last_call[instruction.group] = target_index
        producers |= dict.fromkeys(_grads_produced(instruction), index)
    rewritten: list[Instruction] = []
    for index, instruction in enumerate(instructions):
        rewritten.append(waits.get(index, instruction))
        rewritten += starts.get(index, [])
    return rewritten


def _grads_produced(instruction: Instruction) -> tuple[int | TensorRef, ...]:
    """Return the gradients that an instruction adds to: those of a block, or one that arrives from other ranks."""
    match instruction:
        case Backward(block):
            return (block,)
        case Recv(tensor) | Collective(_, tensor) if tensor.name == "grad":
            return (tensor,)
        case _:
            return ()
