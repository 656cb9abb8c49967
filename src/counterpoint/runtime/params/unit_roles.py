"""Derive a rank's role for each unit from its rank program: the parts that it keeps and updates, with which ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.instruction import (
    UNIT_TENSORS,
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Fetch,
    Forward,
    Free,
    Group,
    Instruction,
    Offload,
    Pull,
    Push,
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    Update,
)
from counterpoint.program.units import host_shareable_units
from counterpoint.runtime.params.flat_layout import WHOLE, ShardSpan


@dataclass(frozen=True, slots=True)
class UnitRole:
    """What a rank does with a unit.

    Args:
        local_shard: the part of the weights kept between steps.
        update_shard: the part it updates; None if it updates nothing.
        is_communicated: whether another rank needs its gradient or gives it weights.
        host_replicas: the ranks of one update, which may keep the weights in shared memory; None if there are none.
    """

    local_shard: ShardSpan
    update_shard: ShardSpan | None
    is_communicated: bool
    host_replicas: Group | None = None

    @property
    def has_full_params(self) -> bool:
        """Whether the rank has all current weights of the unit between steps."""
        return self.local_shard == WHOLE and (self.update_shard == WHOLE or self.host_replicas is not None)


def find_unit_roles(rank: int, instructions: Iterable[Instruction], model: ModelSpec) -> dict[Unit, UnitRole]:
    """Return a rank's role for every unit that it computes with, updates or serves."""
    collector = _RoleCollector(rank, model)
    rank_program = tuple(instructions)
    host_replicas = host_shareable_units(rank_program)
    for instruction in rank_program:
        collector.visit(instruction)
    return {
        unit: UnitRole(
            local_shard,
            collector.update_shards.get(unit, WHOLE) if unit in collector.updated else None,
            unit in collector.communicated,
            host_replicas.get(unit) if local_shard == WHOLE else None,
        )
        for unit, local_shard in collector.local_shards.items()
    }


class _RoleCollector:
    """Roles that the instructions visited so far imply."""

    def __init__(self, rank: int, model: ModelSpec) -> None:
        self.rank = rank
        self.units_of_block: dict[int, list[Unit]] = {}
        for unit in model.units:
            for block in unit:
                self.units_of_block.setdefault(block, []).append(unit)
        self.local_shards: dict[Unit, ShardSpan] = {}
        self.update_shards: dict[Unit, ShardSpan] = {}
        self.updated: set[Unit] = set()
        self.communicated: set[Unit] = set()

    def visit(self, instruction: Instruction) -> None:
        match instruction:
            case Forward(block):
                for unit in self.units_of_block.get(block, []):
                    self.local_shards.setdefault(unit, WHOLE)
            case Update(unit):
                self.updated.add(unit)
                self.local_shards.setdefault(unit, WHOLE)
            case ApplyPushes(units):
                self.updated.update(units if instruction.applies_gradients else ())
                self.communicated.update(units)
                self.local_shards.update(dict.fromkeys(units, WHOLE))
            case Collective() | Send() | Recv() | Push() | Pull():
                self._visit_communication(instruction)
            case Recompute() | Backward() | Commit() | SwapGradBuffers() | Free() | Fetch() | Offload():
                pass

    def _visit_communication(self, instruction: Collective | Send | Recv | Push | Pull) -> None:
        if instruction.tensor.name in UNIT_TENSORS:
            self.communicated.add(instruction.tensor.blocks)
            if isinstance(instruction, Collective):
                self._visit_sharding(instruction)

    def _visit_sharding(self, instruction: Collective) -> None:
        """Record the shard that a reduce-scatter, or an all-gather without one before it, leaves on this rank."""
        position, count = instruction.group.index(self.rank), len(instruction.group)
        shard = (Fraction(position, count), Fraction(position + 1, count))
        if instruction.op == "reduce_scatter":
            self.update_shards[instruction.tensor.blocks] = shard
        elif instruction.op == "all_gather":
            self.local_shards.setdefault(instruction.tensor.blocks, shard)
