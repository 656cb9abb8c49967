"""All that one rank holds of the model: parameters, buffers, and for each unit where its gradients go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn, optim

from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.model.spec import Unit
from counterpoint.runtime.arena import Allocate, Arena, new_tensor
from counterpoint.runtime.board import Board, note_elements
from counterpoint.runtime.commons import Commons, row_elements, table_slots
from counterpoint.runtime.editions import Editions
from counterpoint.runtime.fused import Sum, alone, can_update, lies_in_rows, update_all
from counterpoint.runtime.landing import Landing, OwnGradient, landings_of, own_gradients
from counterpoint.runtime.layout import lay_out
from counterpoint.runtime.optimizers import Face
from counterpoint.runtime.roles import UnitRole


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
    _sums: list[Sum] | None = field(default=None, init=False)

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

    def sums(self) -> list[Sum]:
        """Return for each of :meth:`targets` what tells what adds up to its gradient; made once."""
        span = self.role.span
        if self._sums is None and span is not None:
            self._sums = [
                partial(one.stretches, *at[1:], span) for one in self.arenas for at in one.layout.updated(span)
            ]
            self._sums += [partial(alone, param) for param in self.params.values() if not self.arenas]
        return self._sums or []

    def lies_in_rows(self) -> bool:
        """Tell whether weights and gradients are flat memory, element by element in the same order."""
        return bool(self.arenas) or all(map(lies_in_rows, self.params.values()))

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

    def swap(self) -> None:
        """Exchange the gradient with the one that was set aside a step ago."""
        for arena in self.arenas:
            arena.swap()

    def clear(self) -> None:
        """Forget all gradients of the unit but those set aside."""
        for param in self.params.values() if not self.arenas else ():
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
        tables: the parameters that are looked up in, and whether their gradients are sparse.
    """

    def __init__(  # noqa: PLR0913 - the parts of one rank
        self,
        units: Mapping[Unit, UnitRole],
        params: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        names_of: Mapping[Unit, tuple[str, ...]],
        face: Face,
        empty: Allocate = new_tensor,
        tables: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        self.params = dict(params)
        self.buffers = dict(buffers)
        self.face = face
        self.empty = empty
        self.tables = tables
        self.sparse = frozenset(name for name, is_sparse in tables.items() if is_sparse)
        self.units = {
            unit: UnitStore(unit, role, {name: self.params[name] for name in names_of[unit]})
            for unit, role in units.items()
        }
        for store in self.units.values():
            if store.role.in_arena:
                store.arenas = self._arenas(store)
        self.is_in_commons = False
        self.is_learning = False  # whether gradients that are made now are those of a step
        self.optimizers: dict[tuple[Unit, ...], tuple[optim.Optimizer | None, list[Tensor]]] = {}
        self.editions: Editions | None = None
        self.landings, self.own = self._landings(), self._own()  # where gradients may be written straight to
        self.apart: Callable[[], AbstractContextManager[None]] = nullcontext  # in what to make optimizers' state

    def keep_versions(self, count: int) -> None:
        """From now on the weights of so many versions are there, in memory of their own; all are as the newest."""
        self.editions = Editions(self.params, list(self.arenas()), count) if count > 1 else None
        self.landings, self.own = self._landings(), self._own()

    def _landings(self) -> dict[int, Landing]:
        return landings_of(self.arenas(), self, has_editions=self.editions is not None)

    def _own(self) -> dict[int, OwnGradient]:
        shared = {name for arena in self.arenas() for name in arena.params} | self.sparse
        names = () if self.editions is not None else self.params.keys() - shared
        return own_gradients((self.params[name] for name in names), self)

    def weights(self, version: int) -> Mapping[str, Tensor]:
        """Return the parameters by name as they stood so many updates ago."""
        return self.params if self.editions is None else self.editions.read(version)

    def hand_over(self, version: int) -> None:
        """Gradients that autograd has put on the parameters of a version are those of the newest ones."""
        if self.editions is not None:
            self.editions.hand_over(version)

    def begin_version(self, *, is_new: bool) -> None:
        """An update begins: the weights as they are stay a version; without anything new, it is the same again."""
        if self.editions is not None:
            self.editions.advance(is_new=is_new)
            self._follow_weights()

    def begin(self) -> None:
        """Start a step, in which no parameter has got a gradient or missed one."""
        for store in self.units.values():
            for arena in store.arenas:
                arena.begin()

    def settle(self, *, applied: bool) -> None:
        """What codes have left unsent in this step stays behind if the step is applied; else all is as it was."""
        for store in self.units.values():
            for arena in store.arenas:
                for left in arena.left.values():
                    left.settle(applied=applied)

    def enter_commons(self, fabric: Fabric) -> None:
        """Where replicas have memory in common, their weights and gradients live there; all ranks call it together."""
        if self.is_in_commons:
            return
        self.is_in_commons = True
        for store in self.units.values():
            group = store.role.replicas
            for index, arena in enumerate(store.arenas if group is not None else ()):
                assert group is not None, "it has arenas to go through"
                commons = commons_of(arena, fabric, group, f"weights of {store.unit} {index}")
                if commons is not None:
                    arena.enter(commons)
        self._follow_weights()
        self.landings = self._landings()

    def leave_commons(self, fabric: Fabric | None) -> None:
        """Weights and gradients live in this rank's own memory again.

        Args:
            fabric: all ranks call it together; None where the others are gone or have failed.
        """
        self.is_in_commons = False
        for arena in self.arenas() if fabric is not None else ():
            if arena.commons is not None:
                arena.commons.forget_gradient()  # there is room for the weights that come into this rank's own memory
        left = [(store, arena.leave()) for store in self.units.values() for arena in store.arenas]
        self.landings = self._landings()
        self._follow_weights()
        for store, commons in left:  # nobody's memory is used for something else before all have left it
            if commons is not None and fabric is not None and store.role.replicas is not None:
                fabric.meet(f"leaving weights of {store.unit}", store.role.replicas).wait()

    def _follow_weights(self) -> None:
        """What optimizers update is where the weights are now."""
        for units, (_, tensors) in self.optimizers.items():
            now = [target for unit in units for _, target in self.units[unit].targets(self.face)]
            for tensor, target in zip(tensors, now, strict=True):
                tensor.data = target.data

    def arenas(self) -> Iterator[Arena]:
        """Yield the arenas of all units."""
        for store in self.units.values():
            yield from store.arenas

    def _arenas(self, store: UnitStore) -> list[Arena]:
        described = [
            (name, tuple(param.shape), param.dtype, self.face.group_of[name]) for name, param in store.params.items()
        ]
        layouts = lay_out(described, cut_anywhere=self.face.is_elementwise)
        return [Arena(layout, store.params, store.role.home, self.empty, self.sparse) for layout in layouts]

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
        if made is not None:
            self.face.refresh(made)
            with nullcontext() if made.state else self.apart():
                if not self._update_in_one_pass(made, tensors, units):
                    self._update_by_steps(made, tensors, units)
        for unit in units:
            self.units[unit].clear()

    def _update_in_one_pass(self, made: optim.Optimizer, tensors: list[Tensor], units: tuple[Unit, ...]) -> bool:
        """Add up gradients and update weights in one pass over memory; return whether that is possible here."""
        if not can_update(made) or not all(self.units[unit].lies_in_rows() for unit in units):
            return False
        found = [sums for unit in units for sums in self.units[unit].sums()]
        update_all(made, {id(tensor): sums for tensor, sums in zip(tensors, found, strict=True)})
        return True

    def _update_by_steps(self, made: optim.Optimizer, tensors: list[Tensor], units: tuple[Unit, ...]) -> None:
        in_arenas = any(self.units[unit].arenas for unit in units)
        if in_arenas:
            gradients = [gradient for unit in units for gradient in self._aligned(unit)]
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor.grad = gradient
        made.step()
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


def commons_of(arena: Arena, fabric: Fabric, group: Group, label: str) -> Commons | None:
    """Return memory that replicas have in common, with an arena's weights; None where they can have none.

    All of them call it together. What weights were in before is free before there is memory for gradients.
    """
    count, dtype = arena.layout.num_elements, arena.layout.dtype
    weights = fabric.shared(label, count, dtype, group)
    if weights is None:
        return None
    if fabric.rank == group[0]:
        weights.copy_(arena.weights)
    arena.house(weights)  # its values are there when all have met for what comes next
    gradients = fabric.shared(f"gradients beside {label}", len(group) * row_elements(count, dtype), dtype, group)
    assert gradients is not None, "these ranks have memory in common"
    board = board_of(arena, fabric, group, f"notes of {label}")
    return Commons(weights, gradients.view(len(group), -1), arena.layout, group.index(fabric.rank), board)


def board_of(arena: Arena, fabric: Fabric, group: Group, label: str) -> Board:
    """Return where replicas show each other rows of an arena's tables; all of them call it together."""
    tables, dtype = table_slots(arena.layout, arena.sparse), arena.layout.dtype
    if not tables:
        return Board(torch.zeros(len(group), 0, dtype=torch.int64), tables, dtype, group.index(fabric.rank))
    notes = fabric.shared(label, len(group) * note_elements(len(tables)), torch.int64, group)
    assert notes is not None, "these ranks have memory in common"
    return Board(notes.view(len(group), -1), tables, dtype, group.index(fabric.rank))
