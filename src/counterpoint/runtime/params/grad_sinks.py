"""Gradient sinks: where backward writes weight gradients directly, instead of returning them to autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from counterpoint.runtime.params.flat_grads import is_large_matrix
from counterpoint.runtime.params.flat_layout import ParamSlot
from counterpoint.runtime.params.flat_params import FlatParams
from counterpoint.runtime.params.grad_check import GradCheck, has_hooks
from counterpoint.runtime.params.sparse_grads import RowGrad, add_rows


class BackwardState(Protocol):
    """State that says whether gradients computed now belong to a step, and the check of these."""

    in_backward: bool
    grad_check: GradCheck


@dataclass(frozen=True, slots=True)
class FlatGradSink:
    """Sink for the gradient of one weight in a flat gradient.

    Args:
        state: says whether gradients computed now belong to a step.
        flat_params: of the weight.
        slot: its position there.
    """

    state: BackwardState
    flat_params: FlatParams
    slot: ParamSlot

    @property
    def accepts_grads(self) -> bool:
        """Whether gradients computed now belong to a step."""
        return self.state.in_backward

    @property
    def is_shared(self) -> bool:
        """Whether the other replicas read the gradient in shared memory."""
        return self.flat_params.grads.is_shared

    @property
    def has_user_hooks(self) -> bool:
        """Whether code outside the runtime has a hook on the gradient."""
        return not self.is_shared and has_hooks(self.flat_params.params[self.slot.name])

    def target(self) -> tuple[Tensor, bool]:
        """Return the memory, in the weight's shape, and whether to add to what is there."""
        return self.flat_params.grads.target(self.slot)

    def is_bounded(self, rows: Tensor, inputs: Tensor) -> bool:
        """Check the gradient ``rows.T @ inputs`` by its factors; return whether it need not be read itself."""
        return self.state.grad_check.is_bounded(rows, inputs)

    def check(self, grad: Tensor, *, is_bounded: bool = False) -> None:
        """Check a gradient that was written here, unless its factors have shown that it is finite."""
        if not is_bounded and not self.state.grad_check.defer(self.slot.name, grad):
            self.state.grad_check.check_one(self.slot.name, grad)

    def add(self, row_grad: RowGrad) -> None:
        """Add rows to the gradient."""
        self.state.grad_check.check_rows(self.slot.name, row_grad.values, len(row_grad.rows))
        self.flat_params.grads.add_rows(self.slot, row_grad)

    @property
    def is_deferred(self) -> bool:
        """Always False."""
        return False

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job now; torch calls the parameter's hooks although autograd accumulates nothing."""
        job()


class ParamGradSink(NamedTuple):
    """Sink for a parameter's own ``.grad``."""

    name: str
    param: nn.Parameter
    state: BackwardState

    @property
    def has_user_hooks(self) -> bool:
        """Whether code outside the runtime has a hook on the gradient."""
        return has_hooks(self.param)

    @property
    def accepts_grads(self) -> bool:
        """Whether gradients computed now belong to a step."""
        return self.state.in_backward

    @property
    def is_deferred(self) -> bool:
        """Always False."""
        return False

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job now."""
        job()

    def target(self) -> tuple[Tensor, bool]:
        """Return the gradient, and whether to add to what is there."""
        grad = self.param.grad
        if grad is not None:
            return grad, True
        self.param.grad = grad = torch.empty_like(self.param)
        return grad, False

    def is_bounded(self, rows: Tensor, inputs: Tensor) -> bool:
        """Check the gradient ``rows.T @ inputs`` by its factors; return whether it need not be read itself."""
        return self.state.grad_check.is_bounded(rows, inputs)

    def check(self, grad: Tensor, *, is_bounded: bool = False) -> None:
        """Let a gradient be that its factors have shown to be finite; others are checked after the backward."""
        if is_bounded or self.state.grad_check.defer(self.name, grad):
            self.state.grad_check.mark_checked(self.name, grad)

    def add(self, row_grad: RowGrad) -> None:
        """Add rows to the gradient."""
        target, has_some = self.target()
        if not has_some:
            target.zero_()
        if target.is_contiguous():
            add_rows(target.view(-1), 0, [row_grad], 1.0)
        else:
            target.index_add_(0, *row_grad.expand())
        self.state.grad_check.check_rows(self.name, row_grad.values, len(row_grad.rows))
        self.state.grad_check.mark_checked(self.name, target)


def find_flat_sinks(
    flat_params: Iterable[FlatParams], state: BackwardState, *, has_weight_versions: bool
) -> dict[int, FlatGradSink]:
    """Return the sinks of large weights in flat gradients, by ``id`` of the weight.

    Args:
        flat_params: of a rank.
        state: says whether gradients computed now belong to a step.
        has_weight_versions: whether there are several versions of the weights; autograd then says which one a gradient
            belongs to, so that only shared gradients have sinks.
    """
    return {
        id(storage.params[slot.name]): FlatGradSink(state, storage, slot)
        for storage in flat_params
        if storage.grads.is_shared or not has_weight_versions
        for slot in storage.grads.sink_slots()
    }


def find_param_sinks(params: Mapping[str, nn.Parameter], state: BackwardState) -> dict[int, ParamGradSink]:
    """Return the sinks of large matrices whose gradient stays on this rank, by ``id`` of the weight."""
    return {id(param): ParamGradSink(name, param, state) for name, param in params.items() if is_large_matrix(param)}
