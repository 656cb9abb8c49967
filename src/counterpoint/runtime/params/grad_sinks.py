"""Where gradients of weights are written straight to: their places in a rank's flat gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from counterpoint.runtime.params.flat_layout import SMALL_BYTES, ParamSlot
from counterpoint.runtime.params.flat_params import FlatParams
from counterpoint.runtime.params.sparse_grads import RowGrad, add_rows

MATRIX_DIMS = 2
"""Dims of a weight whose gradient is a product."""


class BackwardState(Protocol):
    """Who knows whether gradients that are made now are those of a step."""

    in_backward: bool


@dataclass(frozen=True, slots=True)
class FlatGradSink:
    """Where the gradient of one weight belongs.

    Args:
        store: knows whether gradients that are made now are those of a step.
        arena: of the weight.
        slot: where it lies there.
    """

    state: BackwardState
    flat_params: FlatParams
    slot: ParamSlot

    @property
    def accepts_grads(self) -> bool:
        """Whether gradients that are made now are those of a step."""
        return self.state.in_backward

    @property
    def is_shared(self) -> bool:
        """Whether the other replicas see it, in memory in common."""
        return self.flat_params.shared is not None

    @property
    def has_user_hooks(self) -> bool:
        """Whether somebody but the runtime hears of it from autograd."""
        return not self.is_shared and has_user_hooks(self.flat_params.params[self.slot.name])

    def target(self) -> tuple[Tensor, bool]:
        """Return the memory, in the weight's shape, and whether something is in it to be added to."""
        return self.flat_params.grad_target(self.slot)

    def add(self, row_grad: RowGrad) -> None:
        """Take rows in the place of a gradient of the weight's size."""
        if self.is_shared:
            self.flat_params.add_row_grad(self.slot, row_grad)
            return
        into, has_some = self.target()
        if not has_some:
            into.zero_()
        add_rows(into.view(-1), 0, [row_grad], 1.0)

    @property
    def is_deferred(self) -> bool:
        """Nothing is."""
        return False

    def submit(self, job: Callable[[], None]) -> None:
        """Do it at once; torch's hook tells those who wait for it, though autograd puts nothing there."""
        job()


class ParamGradSink(NamedTuple):
    """A parameter's own gradient, as autograd keeps it."""

    param: nn.Parameter
    state: BackwardState

    @property
    def has_user_hooks(self) -> bool:
        """Whether somebody hears of it from autograd."""
        return has_user_hooks(self.param)

    @property
    def accepts_grads(self) -> bool:
        """Whether gradients that are made now are those of a step."""
        return self.state.in_backward

    @property
    def is_deferred(self) -> bool:
        """Nothing is."""
        return False

    def submit(self, job: Callable[[], None]) -> None:
        """Do it at once."""
        job()

    def target(self) -> tuple[Tensor, bool]:
        """Return the gradient, and whether something is in it to be added to."""
        found = self.param.grad
        if found is not None:
            return found, True
        self.param.grad = found = torch.empty_like(self.param)
        return found, False

    def add(self, row_grad: RowGrad) -> None:
        """Add rows to the gradient."""
        into, has_some = self.target()
        if not has_some:
            into.zero_()
        if into.is_contiguous():
            add_rows(into.view(-1), 0, [row_grad], 1.0)
        else:
            into.index_add_(0, *row_grad.expand())


def has_user_hooks(param: nn.Parameter) -> bool:
    """Tell whether somebody has a hook on a parameter's gradient."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)  # noqa: SLF001 - they have no public name


def find_flat_sinks(
    flat_params: Iterable[FlatParams], state: BackwardState, *, has_weight_versions: bool
) -> dict[int, FlatGradSink]:
    """Return where gradients are written, by the identity of the weight.

    Args:
        arenas: of a rank.
        store: knows whether gradients that are made now are those of a step.
        has_editions: whether there are several versions of the weights; then autograd says whose a gradient is.
    """
    found = {}
    for arena in flat_params:
        if arena.shared is not None:
            slots = list(arena.shared.large_slots)
        else:
            named = [] if has_weight_versions else arena.layout.slots
            slots = [
                slot
                for slot in named
                if is_worthwhile(arena.params[slot.name]) and slot.name not in arena.sparse_grads.slots
            ]
        found.update({id(arena.params[slot.name]): FlatGradSink(state, arena, slot) for slot in slots})
    return found


def find_param_sinks(params: Iterable[nn.Parameter], state: BackwardState) -> dict[int, ParamGradSink]:
    """Return the gradients of matrices that stay on this rank, by the identity of the weight."""
    return {id(param): ParamGradSink(param, state) for param in params if is_worthwhile(param)}


def is_worthwhile(param: nn.Parameter) -> bool:
    """Tell whether a gradient is worth a function of ours that writes it where it belongs: not a small one's."""
    return param.requires_grad and param.dim() == MATRIX_DIMS and param.is_cpu and param.nbytes > SMALL_BYTES
