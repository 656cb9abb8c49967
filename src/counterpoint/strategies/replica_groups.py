"""Replicas: how strategies make them, who of them updates what, and where the program of one must not be replicated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Literal

from counterpoint.errors import PlanError
from counterpoint.model.spec import Unit
from counterpoint.program.instruction import ApplyPushes, Collective, Group, Instruction, Recv, Update, weight
from counterpoint.program.program import Instructions, Program, RankProgram
from counterpoint.program.rewrite import forward_blocks, replicate, widen_commits


def replica_group(rank: int, stride: int, degree: int) -> Group:
    """Return the ranks at the same position as ``rank`` in each of ``degree`` replicas of ``stride`` ranks.

    Example:
        >>> replica_group(1, stride=2, degree=3)
        (1, 3, 5)
    """
    return tuple(range(rank % stride, stride * degree, stride))


def map_replicas(program: Program, degree: int, change: Callable[[RankProgram, Group], RankProgram]) -> Program:
    """Return ``degree`` replicas of the program that commit together, each rank program changed.

    Args:
        program: of one replica.
        degree: number of replicas.
        change: called with each rank program, and the ranks at its position in all replicas.
    """
    replicated = widen_commits(replicate(program, degree), degree)
    rank_programs = (
        change(rank_program, replica_group(rank, program.num_ranks, degree))
        for rank, rank_program in enumerate(replicated.rank_programs)
    )
    return replace(replicated, rank_programs=tuple(rank_programs))


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


def uses_tree_reduce(program: Program) -> bool:
    """Tell whether gradients are sent to a rank that computes gradients itself: then the others do not update."""
    computing = (rank_program.body for rank_program in program.rank_programs if forward_blocks(rank_program))
    return any(receives_grad(instruction) for body in computing for instruction in body)


def uses_servers(program: Program) -> bool:
    """Tell whether gradients are sent to ranks that compute none."""
    not_computing = (rank_program.body for rank_program in program.rank_programs if not forward_blocks(rank_program))
    return any(
        isinstance(instruction, ApplyPushes) or receives_grad(instruction)
        for body in not_computing
        for instruction in body
    )


def require_unsharded(program: Program, name: str) -> None:
    """Check that every replica holds whole weights and updates them itself.

    Raises:
        PlanError: states are sharded, weights live on servers, or only the root of a tree updates.
    """
    if uses_tree_reduce(program):
        raise PlanError(
            f"{name} comes after tree, where only the first replica updates; write data(...) instead of tree(...), so "
            "that each replica updates its own weights"
        )
    for _, instruction in program.instructions():
        if isinstance(instruction, ApplyPushes) or receives_grad(instruction):
            raise PlanError(f"{name} comes after server, whose workers do not update; write {name} without server")
        if isinstance(instruction, Collective) and instruction.op in {"reduce_scatter", "all_gather"}:
            raise PlanError(
                f"{name} comes after zero or update=sharded, whose ranks update only their shards; write data(...) "
                "instead, so that each replica updates its own weights"
            )


def add_after_updates(
    instructions: Instructions,
    op: Literal["all_gather", "all_reduce_mean"],
    group: Group,
    units: Collection[Unit] | None = None,
) -> Iterator[Instruction]:
    """Yield the instructions with one collective on each updated weight after the last update.

    Args:
        instructions: of one rank.
        op: the collective.
        group: its members.
        units: whose weights; None for all.
    """
    last = max((index for index, instruction in enumerate(instructions) if isinstance(instruction, Update)), default=-1)
    for index, instruction in enumerate(instructions):
        yield instruction
        if index == last:
            updated = updated_units(instructions)
            yield from (Collective(op, weight(unit), group) for unit in updated if units is None or unit in units)
