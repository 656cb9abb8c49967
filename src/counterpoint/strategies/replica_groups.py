"""Who holds what among replicas: helpers that the data-parallel strategies and the parameter servers share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from counterpoint.model.spec import Unit
from counterpoint.program.instruction import Collective, Group, Instruction, Recv, Update, weight
from counterpoint.program.program import Instructions, Program


def replica_group(rank: int, stride: int, degree: int) -> Group:
    """Return the ranks at the same position as ``rank`` in each of ``degree`` replicas of ``stride`` ranks.

    Example:
        >>> replica_group(1, stride=2, degree=3)
        (1, 3, 5)
    """
    return tuple(range(rank % stride, stride * degree, stride))


def updated_units(instructions: Instructions) -> list[Unit]:
    """Return the units that are updated, in the order of their updates."""
    return [instruction.unit for instruction in instructions if isinstance(instruction, Update)]


def updating_ranks(program: Program) -> dict[Unit, Group]:
    """Return for each unit the ranks whose body updates it."""
    ranks: dict[Unit, Group] = {}
    for rank, rank_program in enumerate(program.rank_programs):
        for unit in updated_units(rank_program.body):
            ranks[unit] = (*ranks.get(unit, ()), rank)
    return ranks


def receives_grad(instruction: Instruction) -> bool:
    """Tell whether an instruction receives a gradient, which is then updated on the receiving rank."""
    return isinstance(instruction, Recv) and instruction.tensor.name == "grad"


def add_after_updates(
    instructions: Instructions, op: Literal["all_gather", "all_reduce_mean"], group: Group
) -> Iterator[Instruction]:
    """Yield the instructions with one collective on each updated weight after the last update."""
    last = max((index for index, instruction in enumerate(instructions) if isinstance(instruction, Update)), default=-1)
    for index, instruction in enumerate(instructions):
        yield instruction
        if index == last:
            yield from (Collective(op, weight(unit), group) for unit in updated_units(instructions))
