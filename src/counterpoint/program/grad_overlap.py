"""Which reductions of gradients may start before the backward that completes these gradients has ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from counterpoint.program.instruction import Backward, Collective, Group, Instruction, Recv, Send
from counterpoint.program.program import Instructions, Program

OverlapMap: TypeAlias = Mapping[int, tuple[Collective, ...]]
"""For the index of a backward, the reductions that may start during it, in program order."""


def overlappable_reductions(program: Program, rank: int) -> OverlapMap:
    """Return which reductions a rank may start bucket by bucket while it computes the last of their gradients.

    In the program a reduction starts right after a backward. The runtime may start parts of it earlier, during that
    backward. All members of a group must start their collectives in the same order; this holds if only sends, receives
    and other such reductions lie between the backward and the start, and if all members have the same ones.

    Args:
        program: the program.
        rank: the rank whose reductions are returned.
    """
    candidates = reductions_after_backward(program.rank_programs[rank].body)
    groups = {instruction.group for instructions in candidates.values() for instruction in instructions}
    agreeing = {
        group for group in groups if len({_reduction_signature(program, member, group) for member in group}) == 1
    }
    overlappable = {
        index: tuple(instruction for instruction in instructions if instruction.group in agreeing)
        for index, instructions in candidates.items()
    }
    return {index: instructions for index, instructions in overlappable.items() if instructions}


def reductions_after_backward(instructions: Instructions) -> OverlapMap:
    """Return the reductions that are started right after a backward, by the index of the backward."""
    reductions: dict[int, list[Collective]] = {}
    backward_index: int | None = None
    for index, instruction in enumerate(instructions):
        if isinstance(instruction, Backward):
            backward_index = None if instruction.part else index  # autograd reports no gradients of split backwards
        elif backward_index is not None and _is_started_grad_reduction(instruction):
            assert isinstance(instruction, Collective), "a reduction"
            reductions.setdefault(backward_index, []).append(instruction)
        elif not (isinstance(instruction, Send | Recv) and instruction.tensor.micro is not None):
            backward_index = None
    return {index: tuple(reductions_here) for index, reductions_here in reductions.items()}


def _is_started_grad_reduction(instruction: Instruction) -> bool:
    return (
        isinstance(instruction, Collective)
        and instruction.op in {"all_reduce", "reduce_scatter"}
        and instruction.tensor.name == "grad"
        and instruction.phase == "start"
        and not instruction.codec
    )


def _reduction_signature(program: Program, member: int, group: Group) -> tuple[tuple[tuple[object, ...], ...], ...]:
    """Return the reductions that a member may start early with its group, backward by backward."""
    reductions = (
        tuple((instruction.op, instruction.tensor) for instruction in instructions if instruction.group == group)
        for instructions in reductions_after_backward(program.rank_programs[member].body).values()
    )
    return tuple(reductions_here for reductions_here in reductions if reductions_here)
