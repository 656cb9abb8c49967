"""All that one rank holds of the model: parameters, buffers, and for each unit where its gradients go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor, nn, optim

from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Forward,
    Instruction,
    Pull,
    Push,
    Recv,
    Release,
    Send,
    Serve,
    Update,
)
from counterpoint.runtime.arena import WHOLE, Allocate, Arena, Span, lay_out, new_tensor
from counterpoint.runtime.optimizers import Face


@dataclass(frozen=True, slots=True)
class UnitRole:
    """What a row does with a unit.

    Args:
        home: the part of the weights kept between steps.
        span: the part it updates; None when it updates nothing.
        in_arena: whether any other rank needs its gradient or gives it weights.
    """

    home: Span
    span: Span | None
    in_arena: bool


def roles_of(rank: int, words: Iterable[Instruction], model: ModelSpec) -> dict[Unit, UnitRole]:
    """Return what a rank's row does with every unit that it computes with, updates or serves."""
    notes = _Notes(rank, model)
    for word in words:
        notes.take(word)
    return {
        unit: UnitRole(home, notes.shares.get(unit, WHOLE) if unit in notes.updates else None, unit in notes.moved)
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
                self.updates.update(units)
                self.moved.update(units)
                self.homes.update(dict.fromkeys(units, WHOLE))
            case Collective() | Send() | Recv() | Push() | Pull():
                self.move(word)
            case Backward() | Commit() | Release():
                pass

    def move(self, word: Collective | Send | Recv | Push | Pull) -> None:
        """Note that a gradient or weights travel."""
        if word.value.name in {"grad", "weight"}:
            self.moved.add(word.value.blocks)
            if isinstance(word, Collective):
                self.divide(word)

    def divide(self, word: Collective) -> None:
        """Note which part of a unit a share or a first join leaves to this rank."""
        at, count = word.group.index(self.rank), len(word.group)
        part = (Fraction(at, count), Fraction(at + 1, count))
        if word.verb == "share":
            self.shares[word.value.blocks] = part
        elif word.verb == "join":
            self.homes.setdefault(word.value.blocks, part)


@dataclass(slots=True)
class UnitStore:
    """One unit on one rank.

    Args:
        unit: which unit.
        role: what the row does with it.
        params: its parameters by name; views of the arenas where there are any.
        arenas: one for each dtype; none when the gradient stays on this rank.
    """

    unit: Unit
    role: UnitRole
    params: dict[str, nn.Parameter]
    arenas: list[Arena] = field(default_factory=list)

    def targets(self, face: Face) -> list[tuple[int, Tensor]]:
        """Return the tensors an optimizer updates for this unit, with their option groups."""
        span = self.role.span
        if span is None:
            return []
        if not self.arenas:
            return [(face.group_of[name], param) for name, param in self.params.items()]
        return [
            (group, nn.Parameter(arena.view_of(start, stop), requires_grad=False))
            for arena in self.arenas
            for group, start, stop in arena.layout.updated(span)
        ]

    def gradients(self) -> list[Tensor]:
        """Return the gradients that belong to :meth:`targets`; parameters without one are left out."""
        span = self.role.span
        if span is None:
            return []
        if not self.arenas:
            return [param.grad for param in self.params.values() if param.grad is not None]
        return [
            arena.gradient_of(start, stop, span)
            for arena in self.arenas
            for _, start, stop in arena.layout.updated(span)
        ]

    def missing(self) -> list[str]:
        """Return the parameters on which autograd has put no gradient in this step."""
        if not self.arenas:
            return [name for name, param in self.params.items() if param.grad is None]
        return [name for arena in self.arenas for name in arena.missing()]

    def fill(self) -> None:
        """Give zeros to the parameters without a gradient, as an arena does by itself."""
        for param in self.params.values() if not self.arenas else ():
            if param.grad is None:
                param.grad = torch.zeros_like(param)

    def clear(self) -> None:
        """Forget all gradients of the unit."""
        for param in self.params.values():
            param.grad = None
        for arena in self.arenas:
            arena.clear()


class Store:
    """The parameters, buffers and optimizers of one rank.

    Args:
        units: what the row does with each unit.
        params: the rank's own parameters by name, sliced where blocks are sliced.
        buffers: the rank's own buffers by name.
        names_of: the parameters of each unit.
        face: the user's optimizer.
        empty: makes memory for gradients that other ranks need.
    """

    def __init__(
        self,
        units: Mapping[Unit, UnitRole],
        params: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        names_of: Mapping[Unit, tuple[str, ...]],
        face: Face,
        empty: Allocate = new_tensor,
    ) -> None:
        self.params = dict(params)
        self.buffers = dict(buffers)
        self.face = face
        self.empty = empty
        self.units = {
            unit: UnitStore(unit, role, {name: self.params[name] for name in names_of[unit]})
            for unit, role in units.items()
        }
        for store in self.units.values():
            if store.role.in_arena:
                store.arenas = self._arenas(store)
        self.optimizers: dict[tuple[Unit, ...], tuple[optim.Optimizer | None, list[Tensor]]] = {}

    def begin(self) -> None:
        """Start a step, in which no parameter has got a gradient or missed one."""
        for store in self.units.values():
            for arena in store.arenas:
                arena.missed = None

    def _arenas(self, store: UnitStore) -> list[Arena]:
        described = [
            (name, tuple(param.shape), param.dtype, self.face.group_of[name]) for name, param in store.params.items()
        ]
        layouts = lay_out(described, cut_anywhere=self.face.is_elementwise)
        return [Arena(layout, store.params, store.role.home, self.empty) for layout in layouts]

    def optimizer(self, units: tuple[Unit, ...]) -> tuple[optim.Optimizer | None, list[Tensor]]:
        """Return the optimizer over some units and the tensors it updates, made when first asked for.

        A rank whose shares of them are empty has none.
        """
        if units not in self.optimizers:
            targets = [target for unit in units for target in self.units[unit].targets(self.face)]
            tensors = [tensor for _, tensor in targets]
            self.optimizers[units] = (self.face.build(targets) if targets else None, tensors)
        return self.optimizers[units]

    def update(self, units: tuple[Unit, ...]) -> None:
        """Take one optimizer step on some units with the gradients that they hold, and clear them."""
        made, tensors = self.optimizer(units)
        in_arenas = [unit for unit in units if self.units[unit].arenas]
        if in_arenas:
            gradients = [gradient for unit in units for gradient in self._aligned(unit)]
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor.grad = gradient
        if made is not None:
            self.face.refresh(made)
            made.step()
        for unit in units:
            self.units[unit].clear()
        for tensor in tensors if in_arenas else ():
            tensor.grad = None

    def _aligned(self, unit: Unit) -> list[Tensor | None]:
        store = self.units[unit]
        if store.arenas:
            return list(store.gradients())
        return [param.grad for param in store.params.values()]

    def clear(self) -> None:
        """Forget all gradients."""
        for store in self.units.values():
            store.clear()
