"""Interface of the storage of a :class:`KVStore`, which checks all arguments before it calls it."""

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
    """Specification of a key.

    Args:
        shape: of its value.
        dtype: of its value.
        has_rows: whether it was created from a sparse tensor, so that rows are pushed and pulled by index.
    """

    shape: torch.Size
    dtype: torch.dtype
    has_rows: bool


class KVStoreBackend(Protocol):
    """Storage of values. Keys exist, tensors match their keys, and row indices are sorted and unique."""

    @property
    def rank(self) -> int:
        """The index of this worker."""
        ...

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        ...

    @property
    def updater(self) -> TorchUpdater | None:
        """The updater with the optimizer state, if it is in this process."""
        ...

    def check_key(self, key: Key, spec: StoredKeySpec) -> None:
        """Check that a key of this specification is supported.

        Raises:
            PlanError: it is not.
        """

    def init(self, key: Key, spec: StoredKeySpec, value: Tensor) -> None:
        """Create the key with the value of rank 0."""

    def push(self, key: Key, values: Sequence[Tensor]) -> None:
        """Push the values of one worker's devices."""

    def pull(self, keys: Sequence[Key]) -> list[Tensor]:
        """Return the values after the previous pushes; the caller only reads them."""
        ...

    def pull_rows(self, key: Key, row_ids: Tensor) -> Tensor:
        """Return these rows."""
        ...

    def set_optimizer(self, optimizer: object) -> None:
        """Treat later pushes as gradients of this optimizer."""

    def set_updater(self, updater: Updater) -> None:
        """Pass later pushes to this function."""

    def set_compression(self, codec: KVCodec) -> None:
        """Compress later pushes."""

    def barrier(self) -> None:
        """Wait for all workers."""

    def close(self) -> None:
        """Leave the store."""
