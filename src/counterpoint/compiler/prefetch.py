"""The prefetch pass: gather weights some computations before they are needed, and await reductions one after."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TypeGuard

from counterpoint.program.instruction import (
    Backward,
    Collective,
    Forward,
    Free,
    Instruction,
    Recompute,
    Recv,
    Send,
    TensorRef,
)
from counterpoint.program.program import Instructions, Program
from counterpoint.program.rewrite import map_parts

_COMPUTATIONS = (Forward, Recompute, Backward)
_PASSED = (Free, Collective, Send, Recv)
"""What gathers of other weights may start before, in addition to computations."""
_BLOCKING_GATHER = ("all_gather", "weight", "")


def prefetch(program: Program, depth: int = 1) -> Program:
    """Let gathers of weights and reductions of gradients run during computations.

    Three changes, none of which can change results:

    1. Weights that would be freed and gathered again with at most ``depth`` computations in between are not freed.
    2. Other gathers start ``depth`` computations before their use, or as many as there are since the last update and
       since the same weights were freed. Computations are forwards, recomputations and backwards of one block.
    3. The wait for a gradient that is reduce-scattered and then freed comes after the next backward.

    ::

        before   gather(w0) F0 free(w0) gather(w1) F1 free(w1) gather(w1) B1 start(g1) wait(g1) free(g1) free(w1)
                 gather(w0) B0 ...
        depth 1  gather(w0) start(w1) F0 free(w0) wait(w1) F1 start(w0) B1 start(g1) free(w1) wait(w0) B0 start(g0)
                 wait(g1) free(g1) ...
        depth 2  gather(w0) start(w1) F0 wait(w1) F1 B1 start(g1) free(w1) B0 start(g0) wait(g1) free(g1) ...

    Args:
        program: of all ranks.
        depth: of the gathers, 0 or more; with 0 nothing is changed.

    Cost:
        the weights of ``depth + 1`` blocks at a time, and the whole gradients of two.

    Source:
        forward and backward prefetch of Zhao et al., PyTorch FSDP, VLDB 2023, section 3.3; several modules ahead as
        ``set_modules_to_forward_prefetch`` of torch's ``fully_shard``.
    """
    if depth == 0:
        return program
    return replace(
        program,
        rank_programs=tuple(
            map_parts(rank_program, lambda part: _prefetch_instructions(part, depth))
            for rank_program in program.rank_programs
        ),
    )


def _prefetch_instructions(instructions: Instructions, depth: int) -> list[Instruction]:
    started = _start_gathers_early(_keep_what_is_needed_soon(instructions, depth), depth)
    return list(_await_reductions_late(_split_reductions(started)))


def _keep_what_is_needed_soon(instructions: Instructions, depth: int) -> list[Instruction]:
    """Return the instructions without frees of weights whose next gather would start at once, and without it."""
    result: list[Instruction | None] = []
    freed: dict[TensorRef, tuple[int, int]] = {}  # where, and after how many computations
    num_computations = 0
    for instruction in instructions:
        if _is_blocking_gather(instruction) and instruction.tensor in freed:
            place, num_before = freed.pop(instruction.tensor)
            if num_computations - num_before <= depth:
                result[place] = None
                continue
        if isinstance(instruction, Free) and instruction.tensor.name == "weight":
            freed[instruction.tensor] = len(result), num_computations
        elif isinstance(instruction, _COMPUTATIONS):
            num_computations += 1
        elif not isinstance(instruction, _PASSED):
            freed.clear()
        result.append(instruction)
    return [instruction for instruction in result if instruction is not None]


def _start_gathers_early(instructions: Sequence[Instruction], depth: int) -> list[Instruction]:
    """Split gathers of weights into a start before earlier computations, and a wait; the first one stays whole."""
    result: list[Instruction] = []
    for instruction in instructions:
        if _is_blocking_gather(instruction):
            place = _find_start(result, instruction.tensor, depth)
            if place is not None:
                result.insert(place, replace(instruction, phase="start"))
                result.append(replace(instruction, phase="wait"))
                continue
        result.append(instruction)
    return result


def _find_start(instructions: Sequence[Instruction], weight: TensorRef, depth: int) -> int | None:
    """Return the index of the earliest of the last computations before which weights can be gathered; else None."""
    place, num_computations = None, 0
    for index in range(len(instructions) - 1, -1, -1):
        instruction = instructions[index]
        if isinstance(instruction, _COMPUTATIONS):
            place, num_computations = index, num_computations + 1
            if num_computations == depth:
                break
        elif not isinstance(instruction, _PASSED) or instruction.tensor == weight:
            break
    return place


def _split_reductions(instructions: list[Instruction]) -> Iterator[Instruction]:
    """Yield the instructions, with a start and a wait in place of each reduce-scatter whose gradient is freed next."""
    for instruction, following in zip_longest(instructions, instructions[1:]):
        if _is_reduce_scatter(instruction, "") and following == Free(instruction.tensor):
            yield replace(instruction, phase="start")
            yield replace(instruction, phase="wait")
        else:
            yield instruction


def _await_reductions_late(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    """Yield the instructions; each wait for a reduce-scatter, and the free after it, come after the next backward."""
    held: dict[TensorRef, list[Instruction]] = {}  # waits and frees, by gradient
    due: set[TensorRef] = set()  # of them, after the backward that was the last computation
    for instruction in instructions:
        if _is_reduce_scatter(instruction, "start"):
            yield instruction  # first, so that the runtime can start it during the backward
            continue
        if isinstance(instruction, Free) and instruction.tensor in held:
            held[instruction.tensor].append(instruction)
            continue
        for gradient in [one for one in held if one in due or _must_precede(one, instruction)]:
            yield from held.pop(gradient)
        due = {*held} if isinstance(instruction, Backward) else set()
        if _is_reduce_scatter(instruction, "wait"):
            held[instruction.tensor] = [instruction]
        else:
            yield instruction
    for waits in held.values():
        yield from waits


def _must_precede(gradient: TensorRef, instruction: Instruction) -> bool:
    """Return whether an instruction comes after the wait for a gradient."""
    match instruction:
        case Backward(block):
            return block in gradient.blocks
        case Recompute():
            return False
        case Free(tensor) | Collective(_, tensor) | Send(tensor) | Recv(tensor):
            return tensor == gradient
        case _:
            return True


def _is_reduce_scatter(instruction: Instruction, phase: str) -> TypeGuard[Collective]:
    """Return whether an instruction is a phase of a reduce-scatter."""
    return isinstance(instruction, Collective) and (instruction.op, instruction.phase) == ("reduce_scatter", phase)


def _is_blocking_gather(instruction: Instruction) -> TypeGuard[Collective]:
    """Return whether an instruction gathers weights and waits for them."""
    return (
        isinstance(instruction, Collective)
        and (instruction.op, instruction.tensor.name, instruction.phase) == _BLOCKING_GATHER
    )
