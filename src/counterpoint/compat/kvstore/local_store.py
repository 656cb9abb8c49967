"""The stores ``local`` and ``device``: values in this process, for devices whose gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from counterpoint.compat.kvstore.arguments import Key
from counterpoint.compat.kvstore.compression import GradientCompressor, KVCodec
from counterpoint.compat.kvstore.sparse_rows import sum_tensors
from counterpoint.compat.kvstore.store import StoredKeySpec
from counterpoint.compat.kvstore.store_types import StoreType
from counterpoint.compat.kvstore.updaters import TorchUpdater, Updater
from counterpoint.device.select import accelerator_for
from counterpoint.errors import PlanError


class LocalKVStore:
    """Values in this process.

    Args:
        store_type: of the store.
    """

    rank = 0
    num_workers = 1

    def __init__(self, store_type: StoreType) -> None:
        self._store_type = store_type
        self._values: dict[Key, Tensor] = {}
        self._updater: Updater | None = None
        self._compressor: GradientCompressor | None = None

    @property
    def updater(self) -> TorchUpdater | None:
        """The updater with the optimizer state, if an optimizer was set."""
        return self._updater if isinstance(self._updater, TorchUpdater) else None

    def check_key(self, key: Key, spec: StoredKeySpec) -> None:
        """Accept every key."""
        del key, spec

    def init(self, key: Key, spec: StoredKeySpec, value: Tensor) -> None:
        """Create the key with this value."""
        dense = value.detach().to_dense() if spec.has_rows else value.detach()
        self._values[key] = dense.clone(memory_format=torch.contiguous_format)

    def push(self, key: Key, values: Sequence[Tensor]) -> None:
        """Replace the value by the sum of the tensors, or pass the sum to the updater."""
        stored = self._values[key]
        if self._compressor is not None:
            if values[0].layout is torch.sparse_coo:
                raise PlanError(
                    f"push of rows of key {key!r}: sparse rows cannot be compressed; use a store without compression"
                )
            values = [
                self._compressor.compress((key, device_index), value) for device_index, value in enumerate(values)
            ]
        total = sum_tensors(values).to(stored.device)
        if self._updater is None:
            stored.copy_(total.to_dense())
        else:
            self._updater(key, total, stored)

    def pull(self, keys: Sequence[Key]) -> list[Tensor]:
        """Return the values."""
        return [self._values[key] for key in keys]

    def pull_rows(self, key: Key, row_ids: Tensor) -> Tensor:
        """Return these rows."""
        stored = self._values[key]
        return stored[row_ids.to(stored.device)]

    def set_optimizer(self, optimizer: object) -> None:
        """Treat later pushes as gradients of this optimizer."""
        self._updater = TorchUpdater(optimizer)

    def set_updater(self, updater: Updater) -> None:
        """Pass later pushes to this function."""
        self._updater = updater

    def set_compression(self, codec: KVCodec) -> None:
        """Compress later pushes of devices.

        Raises:
            PlanError: the store is not a ``device`` store, so no device sends anything.
        """
        if not self._store_type.is_device:
            raise PlanError(
                f"set_gradient_compression of a {self._store_type.name} store: nothing is sent in this store; use "
                "create('device') or create('dist_sync')"
            )
        self._compressor = GradientCompressor(codec)

    def barrier(self) -> None:
        """Wait for the work of this process's devices; there is no other worker."""
        for device in {value.device for value in self._values.values() if not value.is_cpu}:
            accelerator_for(device).synchronize()

    def close(self) -> None:
        """Free the values."""
        self._values.clear()
