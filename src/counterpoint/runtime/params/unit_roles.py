"""What a rank's row does with the parameters of every unit: which part it keeps, which it updates, with whom."""

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
    Forward,
    Free,
    Group,
    Instruction,
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
    """What a row does with a unit.

    Args:
        home: the part of the weights kept between steps.
        span: the part it updates; None when it updates nothing.
        in_arena: whether any other rank needs its gradient or gives it weights.
        replicas: who shares out its one update and joins its weights, if they may have these in common.
    """

    local_shard: ShardSpan
    update_shard: ShardSpan | None
    is_communicated: bool
    host_replicas: Group | None = None

    @property
    def has_full_params(self) -> bool:
        """Whether the rank has the whole unit as it is between steps."""
        return self.local_shard == WHOLE and (self.update_shard == WHOLE or self.host_replicas is not None)


def find_unit_roles(rank: int, words: Iterable[Instruction], model: ModelSpec) -> dict[Unit, UnitRole]:
    """Return what a rank's row does with every unit that it computes with, updates or serves."""
    notes = _RoleCollector(rank, model)
    row = tuple(words)
    together = host_shareable_units(row)
    for word in row:
        notes.visit(word)
    return {
        unit: UnitRole(
            home,
            notes.update_shards.get(unit, WHOLE) if unit in notes.updated else None,
            unit in notes.communicated,
            together.get(unit) if home == WHOLE else None,
        )
        for unit, home in notes.local_shards.items()
    }


class _RoleCollector:
    """What a row has said about units so far."""

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

    def visit(self, word: Instruction) -> None:
        """Note one word."""
        match word:
            case Forward(block):
                for unit in self.units_of_block.get(block, []):
                    self.local_shards.setdefault(unit, WHOLE)
            case Update(unit):
                self.updated.add(unit)
                self.local_shards.setdefault(unit, WHOLE)
            case ApplyPushes(units):
                self.updated.update(units if word.applies_gradients else ())
                self.communicated.update(units)
                self.local_shards.update(dict.fromkeys(units, WHOLE))
            case Collective() | Send() | Recv() | Push() | Pull():
                self._visit_communication(word)
            case Recompute() | Backward() | Commit() | SwapGradBuffers() | Free():
                pass

    def _visit_communication(self, word: Collective | Send | Recv | Push | Pull) -> None:
        """Note that a gradient or weights travel."""
        if word.tensor.name in UNIT_TENSORS:
            self.communicated.add(word.tensor.blocks)
            if isinstance(word, Collective):
                self._visit_sharding(word)

    def _visit_sharding(self, word: Collective) -> None:
        """Note which part of a unit a share or a first join leaves to this rank."""
        at, count = word.group.index(self.rank), len(word.group)
        part = (Fraction(at, count), Fraction(at + 1, count))
        if word.op == "reduce_scatter":
            self.update_shards[word.tensor.blocks] = part
        elif word.op == "all_gather":
            self.local_shards.setdefault(word.tensor.blocks, part)
