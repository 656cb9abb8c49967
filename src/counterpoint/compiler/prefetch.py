"""The prefetch pass: gather weights one computation before they are needed, and await reductions one after."""

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
_BLOCKING_GATHER = ("all_gather", "weight", "")


def prefetch(program: Program) -> Program:
    """Let gathers of weights and reductions of gradients run during computations.

    Three changes, none of which can change results:

    1. Weights that would be freed and gathered again without a computation in between are not freed.
    2. Other gathers start before the computation that precedes their use, but not before an update, nor before the same
       weights are freed.
    3. The wait for a gradient that is reduce-scattered and then freed comes after the next backward.

    ::

        before   gather(w0) F0 free(w0) gather(w1) F1 free(w1) gather(w1) B1 start(g1) wait(g1) free(g1) free(w1)
                 gather(w0) B0 ...
        after    gather(w0) start(w1) F0 free(w0) wait(w1) F1 start(w0) B1 start(g1) free(w1) wait(w0) B0 start(g0)
                 wait(g1) free(g1) ...

    Cost:
        the weights of two blocks at a time, and the whole gradients of two.

    Source:
        forward and backward prefetch of Zhao et al., PyTorch FSDP, VLDB 2023, section 3.3.
    """
    return replace(
        program,
        rank_programs=tuple(map_parts(rank_program, _prefetch_instructions) for rank_program in program.rank_programs),
    )


def _prefetch_instructions(instructions: Instructions) -> list[Instruction]:
    started = _start_gathers_early(_keep_what_is_needed_next(instructions))
    return list(_await_reductions_late(_split_reductions(started)))


def _keep_what_is_needed_next(instructions: Instructions) -> list[Instruction]:
    """Return the instructions without weights that are freed, and gathered again before the next computation."""
    result: list[Instruction | None] = []
    freed: dict[TensorRef, int] = {}  # where, since the last computation
    for instruction in instructions:
        if _is_blocking_gather(instruction) and instruction.tensor in freed:
            result[freed.pop(instruction.tensor)] = None
            continue
        if isinstance(instruction, Free) and instruction.tensor.name == "weight":
            freed[instruction.tensor] = len(result)
        elif not isinstance(instruction, Free | Collective | Send | Recv):
            freed.clear()
        result.append(instruction)
    return [instruction for instruction in result if instruction is not None]


def _start_gathers_early(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Split gathers of weights into a start before the previous computation, and a wait; the first one stays whole."""
    result: list[Instruction] = []
    for instruction in instructions:
        if _is_blocking_gather(instruction):
            place = _previous_computation(result, instruction.tensor)
            if place is not None:
                result.insert(place, replace(instruction, phase="start"))
                result.append(replace(instruction, phase="wait"))
                continue
        result.append(instruction)
    return result


def _previous_computation(instructions: Sequence[Instruction], weight: TensorRef) -> int | None:
    """Return the index of the last computation, if weights can be gathered before it; else None."""
    for index in range(len(instructions) - 1, -1, -1):
        instruction = instructions[index]
        if isinstance(instruction, _COMPUTATIONS):
            return index
        is_same = isinstance(instruction, Free | Collective | Send | Recv) and instruction.tensor == weight
        if is_same or not isinstance(instruction, Free | Collective | Send | Recv):
            return None
    return None


def _split_reductions(instructions: list[Instruction]) -> Iterator[Instruction]:
    """Yield the instructions, with a start and a wait in place of each reduce-scatter whose gradient is freed next."""
    for instruction, following in zip_longest(instructions, instructions[1:]):
        if _is_reduce_scatter(instruction, "") and following == Free(instruction.tensor):
            yield replace(instruction, phase="start")
            yield replace(instruction, phase="wait")
        else:
            yield instruction


def _await_reductions_late(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    """Yield the instructions, with each wait for a reduce-scatter and the free after it behind the next backward."""
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
