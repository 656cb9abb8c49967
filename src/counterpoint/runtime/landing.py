"""Where gradients of weights are written straight to: their places in a rank's flat gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from counterpoint.runtime.arena import Arena
from counterpoint.runtime.layout import SMALL_BYTES, Slot
from counterpoint.runtime.rows import Piece, add_rows

MATRIX = 2
"""Dims of a weight whose gradient is a product."""


class Learner(Protocol):
    """Who knows whether gradients that are made now are those of a step."""

    is_learning: bool


@dataclass(frozen=True, slots=True)
class Landing:
    """Where the gradient of one weight belongs.

    Args:
        store: knows whether gradients that are made now are those of a step.
        arena: of the weight.
        slot: where it lies there.
    """

    store: Learner
    arena: Arena
    slot: Slot

    @property
    def is_open(self) -> bool:
        """Whether gradients that are made now are those of a step."""
        return self.store.is_learning

    @property
    def is_shown(self) -> bool:
        """Whether the other replicas see it, in memory in common."""
        return self.arena.commons is not None

    @property
    def is_watched(self) -> bool:
        """Whether somebody but the runtime hears of it from autograd."""
        return not self.is_shown and is_watched(self.arena.params[self.slot.name])

    def target(self) -> tuple[Tensor, bool]:
        """Return the memory, in the weight's shape, and whether something is in it to be added to."""
        return self.arena.landing(self.slot)

    def add(self, piece: Piece) -> None:
        """Take rows in the place of a gradient of the weight's size."""
        if self.is_shown:
            self.arena.add_rows(self.slot, piece)
            return
        into, has_some = self.target()
        if not has_some:
            into.zero_()
        add_rows(into.view(-1), 0, [piece], 1.0)

    @property
    def puts_off(self) -> bool:
        """Nothing is."""
        return False

    def when_due(self, job: Callable[[], None]) -> None:
        """Do it at once; torch's hook tells those who wait for it, though autograd puts nothing there."""
        job()


class OwnGradient(NamedTuple):
    """A parameter's own gradient, as autograd keeps it."""

    param: nn.Parameter
    store: Learner

    @property
    def is_watched(self) -> bool:
        """Whether somebody hears of it from autograd."""
        return is_watched(self.param)

    @property
    def is_open(self) -> bool:
        """Whether gradients that are made now are those of a step."""
        return self.store.is_learning

    @property
    def puts_off(self) -> bool:
        """Nothing is."""
        return False

    def when_due(self, job: Callable[[], None]) -> None:
        """Do it at once."""
        job()

    def target(self) -> tuple[Tensor, bool]:
        """Return the gradient, and whether something is in it to be added to."""
        found = self.param.grad
        if found is not None:
            return found, True
        self.param.grad = found = torch.empty_like(self.param)
        return found, False

    def add(self, piece: Piece) -> None:
        """Add rows to the gradient."""
        into, has_some = self.target()
        if not has_some:
            into.zero_()
        if into.is_contiguous():
            add_rows(into.view(-1), 0, [piece], 1.0)
        else:
            into.index_add_(0, *piece.expanded())


def is_watched(param: nn.Parameter) -> bool:
    """Tell whether somebody has a hook on a parameter's gradient."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)  # noqa: SLF001 - they have no public name


def landings_of(arenas: Iterable[Arena], store: Learner, *, has_editions: bool) -> dict[int, Landing]:
    """Return where gradients are written, by the identity of the weight.

    Args:
        arenas: of a rank.
        store: knows whether gradients that are made now are those of a step.
        has_editions: whether there are several versions of the weights; then autograd says whose a gradient is.
    """
    found = {}
    for arena in arenas:
        if arena.commons is not None:
            slots = list(arena.commons.large)
        else:
            named = [] if has_editions else arena.layout.slots
            slots = [slot for slot in named if pays(arena.params[slot.name]) and slot.name not in arena.strewn.slots]
        found.update({id(arena.params[slot.name]): Landing(store, arena, slot) for slot in slots})
    return found


def own_gradients(params: Iterable[nn.Parameter], store: Learner) -> dict[int, OwnGradient]:
    """Return the gradients of matrices that stay on this rank, by the identity of the weight."""
    return {id(param): OwnGradient(param, store) for param in params if pays(param)}


def pays(param: nn.Parameter) -> bool:
    """Tell whether a gradient is worth a function of ours that writes it where it belongs: not a small one's."""
    return param.requires_grad and param.dim() == MATRIX and param.is_cpu and param.nbytes > SMALL_BYTES
