"""What a rank's row does with the parameters of every unit: which part it keeps, which it updates, with whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.instruction import (
    OF_UNITS,
    Backward,
    Collective,
    Commit,
    Forward,
    Group,
    Instruction,
    Pull,
    Push,
    Recompute,
    Recv,
    Release,
    Send,
    Serve,
    Swap,
    Update,
)
from counterpoint.program.one_copy import groups_with_one_copy
from counterpoint.runtime.layout import WHOLE, Span


@dataclass(frozen=True, slots=True)
class UnitRole:
    """What a row does with a unit.

    Args:
        home: the part of the weights kept between steps.
        span: the part it updates; None when it updates nothing.
        in_arena: whether any other rank needs its gradient or gives it weights.
        replicas: who shares out its one update and joins its weights, if they may have these in common.
    """

    home: Span
    span: Span | None
    in_arena: bool
    replicas: Group | None = None

    @property
    def is_up_to_date(self) -> bool:
        """Whether the rank has the whole unit as it is between steps."""
        return self.home == WHOLE and (self.span == WHOLE or self.replicas is not None)


def roles_of(rank: int, words: Iterable[Instruction], model: ModelSpec) -> dict[Unit, UnitRole]:
    """Return what a rank's row does with every unit that it computes with, updates or serves."""
    notes = _Notes(rank, model)
    row = tuple(words)
    together = groups_with_one_copy(row)
    for word in row:
        notes.take(word)
    return {
        unit: UnitRole(
            home,
            notes.shares.get(unit, WHOLE) if unit in notes.updates else None,
            unit in notes.moved,
            together.get(unit) if home == WHOLE else None,
        )
        for unit, home in notes.homes.items()
    }


class _Notes:
    """What a row has said about units so far."""

    def __init__(self, rank: int, model: ModelSpec) -> None:
        self.rank = rank
        self.users: dict[int, list[Unit]] = {}
        for unit in model.units:
            for block in unit:
                self.users.setdefault(block, []).append(unit)
        self.homes: dict[Unit, Span] = {}
        self.shares: dict[Unit, Span] = {}
        self.updates: set[Unit] = set()
        self.moved: set[Unit] = set()

    def take(self, word: Instruction) -> None:
        """Note one word."""
        match word:
            case Forward(block):
                for unit in self.users.get(block, []):
                    self.homes.setdefault(unit, WHOLE)
            case Update(unit):
                self.updates.add(unit)
                self.homes.setdefault(unit, WHOLE)
            case Serve(units):
                self.updates.update(units if word.updates else ())
                self.moved.update(units)
                self.homes.update(dict.fromkeys(units, WHOLE))
            case Collective() | Send() | Recv() | Push() | Pull():
                self.move(word)
            case Recompute() | Backward() | Commit() | Swap() | Release():
                pass

    def move(self, word: Collective | Send | Recv | Push | Pull) -> None:
        """Note that a gradient or weights travel."""
        if word.value.name in OF_UNITS:
            self.moved.add(word.value.blocks)
            if isinstance(word, Collective):
                self.divide(word)

    def divide(self, word: Collective) -> None:
        """Note which part of a unit a share or a first join leaves to this rank."""
        at, count = word.group.index(self.rank), len(word.group)
        part = (Fraction(at, count), Fraction(at + 1, count))
        if word.verb == "reduce_scatter":
            self.shares[word.value.blocks] = part
        elif word.verb == "all_gather":
            self.homes.setdefault(word.value.blocks, part)
