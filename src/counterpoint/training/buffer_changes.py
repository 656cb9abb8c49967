"""Buffers of the user's model that code between steps changes or replaces: the ranks' own ones get the new values."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from counterpoint.partitioning.dry_run import BufferSlots, assign_values
from counterpoint.runtime.rank_builder import RankRuntime
from counterpoint.training.stale_weights import without_stale_reads


class BufferChanges:
    """Finds changed buffers by torch's version counters and by what is registered; ``.data`` does not count.

    Args:
        model: the user's model.
        ranks: of this process; those that run the model itself have its buffers.
    """

    def __init__(self, model: nn.Module, ranks: Collection[RankRuntime]) -> None:
        self.ranks = ranks
        self.slots = BufferSlots(model)
        own = {id(buffer) for rank in ranks for buffer in rank.interpreter.store.buffers.values()}
        self.buffers = [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) not in own]
        self.versions: list[int] = []
        self.values: list[Tensor] = []
        self.record()

    def record(self) -> None:
        """Take the present values as those that the ranks know."""
        with without_stale_reads():
            self.versions = self._read_versions()
            self.values = [buffer.clone() for _, buffer in self.buffers]

    def carry_over(self) -> None:
        """Load the buffers that were changed since :meth:`record` into all ranks.

        Raises:
            DataError: one was replaced by a tensor of another shape or dtype.
        """
        with without_stale_reads(), torch.no_grad():
            self.slots.adopt()
            if self._read_versions() == self.versions:
                return
            for (name, buffer), value in zip(self.buffers, self.values, strict=True):
                if not torch.equal(buffer, value):
                    for rank in self.ranks:
                        assign_values(rank.interpreter.store.buffers[name], buffer)
        self.record()

    def _read_versions(self) -> list[int]:
        return [buffer._version for _, buffer in self.buffers]  # noqa: SLF001 - there is no other way to see changes
