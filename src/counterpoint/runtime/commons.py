"""Memory that the replicas of one host have in common: one copy of the weights, and the gradient of each of them.

Every rank computes with the one copy, writes its own gradient where all others can read it, and updates its share of
the weights with what all have written. Nothing is copied from rank to rank: a share of gradients is an announcement
that they are complete, and a join of weights one that they have been updated.

The gradients of small parameters are moved there all at once, when a rank's last one is complete; a large one as soon
as it is complete, while it is still in the cache and before the next one needs memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from counterpoint.fabric.shm.segments import drop_pages
from counterpoint.runtime.board import Board
from counterpoint.runtime.layout import Layout, Slot, is_small
from counterpoint.runtime.rows import is_table
from counterpoint.runtime.tables import Tables

ALIGNED_BYTES = 64


def table_slots(layout: Layout, sparse: Collection[str]) -> list[Slot]:
    """Return the parameters whose gradients may be shown as rows: those that are large, or sparse as the model says."""
    return [
        slot for slot in layout.slots if is_table(slot.shape) and (slot.name in sparse or not is_small(slot, layout))
    ]


def row_elements(num_elements: int, dtype: torch.dtype) -> int:
    """Return how long a row for so many elements is, so that the next one begins at the start of a cache line."""
    step = ALIGNED_BYTES // dtype.itemsize
    return -(-num_elements // step) * step


class Commons:
    """One arena's memory in common, as one rank sees it.

    Args:
        weights: of all replicas; flat.
        gradients: a row for each replica's gradient.
        layout: what lies in a row.
        place: which replica's is the own one.
        board: where they show rows of gradients.
    """

    def __init__(self, weights: Tensor, gradients: Tensor, layout: Layout, place: int, board: Board) -> None:
        self.weights = weights
        self.rows = list(gradients[:, : layout.num_elements])
        self.own = self.rows[place]
        self.tables = Tables(self.rows, self.own, board)
        self.is_shown = False
        self.large: list[Slot] = []
        self._small: list[tuple[nn.Parameter, Tensor]] = []
        self.small_names: frozenset[str] = frozenset()
        self._hooks: list[RemovableHandle] = []

    def receive(self, layout: Layout, params: Mapping[str, nn.Parameter], move: Callable[[Slot], None]) -> None:
        """Large gradients come here by ``move`` as soon as they are complete, small ones by :meth:`gather`."""
        for slot in layout.slots:
            if is_small(slot, layout):
                self._small.append((params[slot.name], self.own[slot.start : slot.stop].view(slot.shape)))
            else:
                self.large.append(slot)
                param: Any = params[slot.name]  # torch's stubs leave out the type of this method
                self._hooks.append(param.register_post_accumulate_grad_hook(partial(_move, move, slot)))
        large = {slot.name for slot in self.large}
        self.small_names = frozenset(slot.name for slot in layout.slots if slot.name not in large)

    def gather(self) -> frozenset[str]:
        """Move all small gradients here at once and return their names; none where one is missing or sparse."""
        fresh = [param.grad for param, _ in self._small]
        if any(grad is None or grad.is_sparse for grad in fresh):
            return frozenset()
        torch._foreach_copy_([place for _, place in self._small], fresh)  # type: ignore[arg-type]
        for param, _ in self._small:
            param.grad = None
        return self.small_names

    def forget_gradient(self) -> None:
        """The own row takes no memory any more; nobody reads it after the updates of a step."""
        drop_pages(self.own.data_ptr(), self.own.numel() * self.own.element_size())

    def cease(self) -> None:
        """Gradients stay on the parameters again."""
        for hook in self._hooks:
            hook.remove()


def _move(move: Callable[[Slot], None], slot: Slot, _: Tensor) -> None:
    move(slot)
