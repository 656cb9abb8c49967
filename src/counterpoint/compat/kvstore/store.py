"""What keeps the values: this process, or servers. The face in front of both checks what it is called with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from counterpoint.compat.kvstore.arguments import Key
from counterpoint.compat.kvstore.compression import KVCodec
from counterpoint.compat.kvstore.updaters import TorchUpdater, Updater


@dataclass(frozen=True, slots=True)
class StoredKeySpec:
    """What a key looks like.

    Args:
        shape: of its value.
        dtype: of its numbers.
        has_rows: it was made from a sparse tensor, and its rows are pushed and pulled by number.
    """

    shape: torch.Size
    dtype: torch.dtype
    has_rows: bool


class KVStoreBackend(Protocol):
    """Where values are kept. Keys are known, tensors have their look, and rows are ascending and each once."""

    @property
    def rank(self) -> int:
        """Which worker this is."""
        ...

    @property
    def num_workers(self) -> int:
        """How many there are."""
        ...

    @property
    def updater(self) -> TorchUpdater | None:
        """What keeps the states of the optimizer, if this process does."""
        ...

    def check_key(self, key: Key, spec: StoredKeySpec) -> None:
        """A key of this look can be kept.

        Raises:
            PlanError: it cannot.
        """

    def init(self, key: Key, spec: StoredKeySpec, value: Tensor) -> None:
        """The key has this value: that of rank 0."""

    def push(self, key: Key, values: Sequence[Tensor]) -> None:
        """The values of one worker's devices are counted."""

    def pull(self, keys: Sequence[Key]) -> list[Tensor]:
        """Return the values as they are after the pushes so far; the caller only reads them."""
        ...

    def pull_rows(self, key: Key, row_ids: Tensor) -> Tensor:
        """Return these rows."""
        ...

    def set_optimizer(self, optimizer: object) -> None:
        """What is pushed is a gradient from now on, and makes a step of this optimizer."""

    def set_updater(self, updater: Updater) -> None:
        """What is pushed is given to this function from now on."""

    def set_compression(self, codec: KVCodec) -> None:
        """What is pushed is compressed from now on."""

    def barrier(self) -> None:
        """All workers have come to this point."""

    def close(self) -> None:
        """The worker has left."""
