"""``KVStore``: MXNet's calls; arguments are checked here, values are stored in this process or on servers."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import torch

from counterpoint.compat.kvstore.arguments import Keys, Values, group_by_key
from counterpoint.compat.kvstore.compression import parse_compression
from counterpoint.compat.kvstore.errors import raise_unsupported
from counterpoint.compat.kvstore.key_registry import KeyRegistry
from counterpoint.compat.kvstore.optimizer_state_file import load_states, save_states
from counterpoint.compat.kvstore.sparse_rows import write_rows
from counterpoint.compat.kvstore.store import KVStoreBackend
from counterpoint.compat.kvstore.store_types import StoreType
from counterpoint.compat.kvstore.updaters import TorchUpdater, Updater
from counterpoint.errors import PlanError


class KVStore:
    """Values by key that devices and workers push to and pull from; made by :func:`create`.

    Args:
        store_type: of the store.
        store: that has the values.
    """

    def __init__(self, store_type: StoreType, store: KVStoreBackend) -> None:
        self._store_type, self._store = store_type, store
        self._registry = KeyRegistry()

    @property
    def type(self) -> str:
        """The type of the store, as given to :func:`create`."""
        return self._store_type.name

    @property
    def rank(self) -> int:
        """The index of this worker, from 0."""
        return self._store.rank

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return self._store.num_workers

    @torch.no_grad()
    def init(self, key: Keys, value: Values) -> None:
        """Create keys with the values of rank 0; all workers call this.

        Args:
            key: an int or a str, or a list of either.
            value: a tensor for each key; a sparse tensor makes a key with row-sparse pushes and pulls.

        Raises:
            PlanError: a key exists already, or its value is not supported.
        """
        tensors_by_key = group_by_key("init", key, value)
        specs = {name: self._registry.describe_new(name, values) for name, values in tensors_by_key.items()}
        for name, spec in specs.items():
            self._store.check_key(name, spec)
        for name, spec in specs.items():
            self._store.init(name, spec, tensors_by_key[name][0])
            self._registry.register(name, spec)

    @torch.no_grad()
    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Start to push values; a list of tensors for one key is summed first.

        Args:
            key: an int or a str, or a list of either.
            value: a tensor for each key, or a list of tensors, one per device.
            priority: MXNet's; ignored, requests are sent in call order.

        Raises:
            PlanError: a key does not exist, a value does not match it, or the servers need an optimizer.
            DataError: a value for the servers is not finite.
        """
        del priority
        tensors_by_key = group_by_key("push", key, value)
        for name, values in tensors_by_key.items():
            self._registry.check_push(name, values)
        for name, values in tensors_by_key.items():
            self._store.push(name, values)

    @torch.no_grad()
    def pull(self, key: Keys, out: Values | None = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy the values of the keys, after all previous pushes of this worker, into ``out``.

        Args:
            key: an int or a str, or a list of either.
            out: a tensor for each key, or a list of tensors, one per device.
            priority: MXNet's; ignored, requests are sent in call order.
            ignore_sparse: skip sparse tensors in ``out``; otherwise they receive all rows.

        Raises:
            PlanError: a key does not exist, or a tensor does not match it.
        """
        del priority
        tensors_by_key = {
            name: [tensor for tensor in outs if tensor.layout is torch.strided or not ignore_sparse]
            for name, outs in self._registry.resolve_outs("pull", key, out).items()
        }
        names = [name for name, outs in tensors_by_key.items() if outs]
        for name, value in zip(names, self._store.pull(names), strict=True):
            for tensor in tensors_by_key[name]:
                if tensor.layout is torch.strided:
                    tensor.copy_(value)
                else:
                    write_rows(tensor, torch.arange(len(value)), value)

    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """Push values, then pull the keys.

        Args:
            key: as in :meth:`push`.
            value: as in :meth:`push`.
            out: as in :meth:`pull`; ``value`` by default.
            priority: MXNet's; ignored, requests are sent in call order.
        """
        self.push(key, value, priority)
        self.pull(key, value if out is None else out, priority, ignore_sparse=False)

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """Create keys, then pull the values of rank 0.

        Args:
            key: as in :meth:`init`.
            value: as in :meth:`init`.
            out: as in :meth:`pull`.
            priority: MXNet's; ignored, requests are sent in call order.
        """
        self.init(key, value)
        self.pull(key, out, priority, ignore_sparse=False)

    @torch.no_grad()
    def row_sparse_pull(
        self, key: Keys, out: Values | None = None, priority: int = 0, row_ids: Values | None = None
    ) -> None:
        """Copy the given rows of the keys into ``out``: sparse tensors get only these rows, dense ones keep the others.

        Args:
            key: an int or a str, or a list of either, created from sparse tensors.
            out: a tensor for each key, or a list of tensors, one per device.
            priority: MXNet's; ignored, requests are sent in call order.
            row_ids: row indices in any order and shape, with duplicates allowed: one for all of ``out``, or one for
                each.

        Raises:
            PlanError: a key does not exist or is not row-sparse, or a tensor or a row index does not match it.
        """
        del priority
        tensors_by_key = self._registry.resolve_outs("row_sparse_pull", key, out)
        for name, ids_by_tensor in self._registry.resolve_row_ids(key, tensors_by_key, row_ids).items():
            previous = None
            for tensor, row_indices in zip(tensors_by_key[name], ids_by_tensor, strict=True):
                if row_indices is not previous:
                    values, previous = self._store.pull_rows(name, row_indices), row_indices
                write_rows(tensor, row_indices, values)

    def set_gradient_compression(self, compression_params: object) -> None:
        """Compress later pushes of workers, or of devices for a ``device`` store; pulls are not compressed.

        Args:
            compression_params: ``{"type": "2bit", "threshold": 0.5}``, or the type ``1bit``.

        Raises:
            PlanError: the parameters are invalid, or nothing is sent that could be compressed.
        """
        self._store.set_compression(parse_compression(compression_params))

    def set_optimizer(self, optimizer: object) -> None:
        """Treat later pushes as gradients, each of which makes an optimizer step; all workers call this.

        Call it before ``init``: existing keys move to new tables, without the state of the previous optimizer.

        Args:
            optimizer: a factory such as ``partial(torch.optim.SGD, lr=0.1)``, a torch optimizer, whose class and
                options are used, or an update rule of ``counterpoint.ps.update_rules``.

        Raises:
            PlanError: servers do not support it.
        """
        self._store.set_optimizer(optimizer)

    def set_updater(self, updater: Updater) -> None:
        """Pass later pushes to a function.

        Args:
            updater: called with the key, the sum of the pushed tensors, and the value, which it changes in place.

        Raises:
            PlanError: the values are on servers, which run no functions.
        """
        self._store.set_updater(updater)

    _set_updater = set_updater

    def barrier(self) -> None:
        """Wait until all workers have called this and their earlier pushes are applied.

        Raises:
            PeerError: one has not before the timeout.
        """
        self._store.barrier()

    _barrier = barrier

    def save_optimizer_states(self, fname: str | Path, dump_optimizer: bool = False) -> None:
        """Write the optimizer state to a file.

        Args:
            fname: the file; an existing one is replaced.
            dump_optimizer: also save options such as the learning rate.

        Raises:
            PlanError: the state is on servers, or no optimizer was set.
            CheckpointError: the file cannot be written.
        """
        save_states(Path(fname), self._require_updater("save").states(), with_options=dump_optimizer)

    def load_optimizer_states(self, fname: str | Path) -> None:
        """Restore the optimizer state from a file.

        Args:
            fname: written by :meth:`save_optimizer_states`.

        Raises:
            PlanError: the state is on servers, or no optimizer was set.
            CheckpointError: the file cannot be read, or is of another optimizer.
        """
        self._require_updater("load").load_states(load_states(Path(fname)))

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return whether the store has a capability: ``optimizer``, to run one on pushed gradients.

        Raises:
            PlanError: the capability is unknown.
        """
        if capability.lower() != "optimizer":
            raise PlanError(f"is_capable({capability!r}): the only known capability is 'optimizer'")
        return True

    def close(self) -> None:
        """Leave the store; it cannot be used afterwards."""
        self._store.close()

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: TracebackType | None) -> None:
        """Close the store."""
        self.close()

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an error that names the replacement of an unsupported name."""
        raise_unsupported(name)

    def _require_updater(self, operation: str) -> TorchUpdater:
        updater = self._store.updater
        if updater is None:
            reason = (
                "they are on the servers; a job with a folder saves them in its checkpoints"
                if self._store_type.is_dist
                else "call set_optimizer first"
            )
            raise PlanError(f"{operation}_optimizer_states of a {self.type} store: {reason}")
        return updater
