"""Memory that the replicas of one host have in common: one copy of the weights, and the gradient of each of them.

Every rank computes with the one copy, writes its own gradient where all others can read it, and updates its share of
the weights with what all have written. Nothing is copied from rank to rank: a share of gradients is an announcement
that they are complete, and a join of weights one that they have been updated.

Autograd adds the gradients of small parameters straight into this memory, because their ``grad`` lies there; it is set
to zero before every step. A large gradient would be read and written once more that way, so it is moved instead, as
soon as it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from counterpoint.runtime.layout import Layout, Slot

ALIGNED_BYTES = 64
BOUND_BYTES = 64 << 10
"""A parameter up to this size has its ``grad`` in common memory for good."""


def row_elements(num_elements: int, dtype: torch.dtype) -> int:
    """Return how long a row for so many elements is, so that the next one begins at the start of a cache line."""
    step = ALIGNED_BYTES // dtype.itemsize
    return -(-num_elements // step) * step


class Commons:
    """One arena's memory in common, as one rank sees it.

    Args:
        memory: one row for the weights, then one for each replica's gradient; flat.
        layout: what lies in a row.
        num_replicas: how many there are.
        place: the own one among them.
    """

    def __init__(self, memory: Tensor, layout: Layout, num_replicas: int, place: int) -> None:
        rows = memory.view(num_replicas + 1, -1)[:, : layout.num_elements]
        self.weights = rows[0]
        self.rows = list(rows[1:])
        self.own = self.rows[place]
        self.is_shown = False
        self.bound: frozenset[str] = frozenset()
        self._grads: list[tuple[str, nn.Parameter, Tensor]] = []
        self._zeroed: list[Tensor] = []
        self._versions: list[int] = []
        self._hooks: list[RemovableHandle] = []

    def bind(self, layout: Layout, params: Mapping[str, nn.Parameter], move: Callable[[Slot], None]) -> None:
        """The gradients of small parameters land here by themselves, those of large ones are moved by ``move``."""
        small = [slot for slot in layout.slots if (slot.stop - slot.start) * layout.dtype.itemsize <= BOUND_BYTES]
        self.bound = frozenset(slot.name for slot in small)
        for slot in small:
            place = self.own[slot.start : slot.stop].view(slot.shape).data  # counts its own changes
            self._grads.append((slot.name, params[slot.name], place))
        edges = [slot.start for slot in small if slot.start not in {other.stop for other in small}]
        ends = [slot.stop for slot in small if slot.stop not in {other.start for other in small}]
        self._zeroed = [self.own[start:stop] for start, stop in zip(edges, ends, strict=True)]
        for slot in layout.slots:
            if slot.name not in self.bound:
                hook = partial(_move, move, slot)
                param: Any = params[slot.name]  # torch's stubs leave out the type of this method
                self._hooks.append(param.register_post_accumulate_grad_hook(hook))
        self.begin()

    def unbind(self) -> None:
        """Gradients land on the parameters again."""
        for hook in self._hooks:
            hook.remove()
        for _, param, _ in self._grads:
            param.grad = None

    def begin(self) -> None:
        """Small parameters have gradients of zeros."""
        for zeroed in self._zeroed:
            zeroed.zero_()
        for _, param, grad in self._grads:
            if param.grad is not grad:
                param.grad = grad
        self._versions = [grad._version for _, _, grad in self._grads]  # noqa: SLF001 - it counts what autograd adds

    def reached(self) -> set[str]:
        """Return the small parameters to whose gradients something has been added in this step."""
        pairs = zip(self._grads, self._versions, strict=True)
        return {name for (name, _, grad), version in pairs if grad._version != version}  # noqa: SLF001


def _move(move: Callable[[Slot], None], slot: Slot, _: Tensor) -> None:
    move(slot)
