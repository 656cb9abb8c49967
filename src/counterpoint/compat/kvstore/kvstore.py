"""``KVStore``: MXNet's calls, checked here, carried out by this process or by servers."""

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
    """Values by key, to which devices and workers push and from which they pull; :func:`create` makes one.

    Args:
        kind: what it is.
        store: what keeps the values.
    """

    def __init__(self, store_type: StoreType, store: KVStoreBackend) -> None:
        self._store_type, self._store = store_type, store
        self._registry = KeyRegistry()

    @property
    def type(self) -> str:
        """The kind of the store, as it was asked for."""
        return self._store_type.name

    @property
    def rank(self) -> int:
        """Which worker this is, from 0."""
        return self._store.rank

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return self._store.num_workers

    @torch.no_grad()
    def init(self, key: Keys, value: Values) -> None:
        """The keys are there, each with the value that rank 0 gave; all workers call this.

        Args:
            key: a number or a text, or a list of either.
            value: a tensor for each; a sparse one makes a key whose rows are pushed and pulled by number.

        Raises:
            PlanError: a key is there already, or cannot be kept.
        """
        found = group_by_key("init", key, value)
        looks = {name: self._registry.describe_new(name, values) for name, values in found.items()}
        for name, look in looks.items():
            self._store.check_key(name, look)
        for name, look in looks.items():
            self._store.init(name, look, found[name][0])
            self._registry.register(name, look)

    @torch.no_grad()
    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """What was pushed is on its way; a list of tensors for one key is added up first.

        Args:
            key: a number or a text, or a list of either.
            value: a tensor for each, or a list of tensors, one for each device.
            priority: MXNet's; requests go in the order of the calls.

        Raises:
            PlanError: there is no such key, its value looks otherwise, or servers lack an optimizer.
            DataError: a number that goes to servers is not finite.
        """
        del priority
        found = group_by_key("push", key, value)
        for name, values in found.items():
            self._registry.check_push(name, values)
        for name, values in found.items():
            self._store.push(name, values)

    @torch.no_grad()
    def pull(self, key: Keys, out: Values | None = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """The tensors have the values of the keys, as they are after all pushes so far of this worker.

        Args:
            key: a number or a text, or a list of either.
            out: a tensor for each, or a list of tensors, one for each device.
            priority: MXNet's; requests go in the order of the calls.
            ignore_sparse: sparse tensors in ``out`` stay as they are; otherwise they get all rows.

        Raises:
            PlanError: there is no such key, or a tensor does not fit it.
        """
        del priority
        found = {
            name: [tensor for tensor in outs if tensor.layout is torch.strided or not ignore_sparse]
            for name, outs in self._registry.resolve_outs("pull", key, out).items()
        }
        wanted = [name for name, outs in found.items() if outs]
        for name, value in zip(wanted, self._store.pull(wanted), strict=True):
            for tensor in found[name]:
                if tensor.layout is torch.strided:
                    tensor.copy_(value)
                else:
                    write_rows(tensor, torch.arange(len(value)), value)

    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """The tensors have the values of the keys after these have been pushed.

        Args:
            key: as in :meth:`push`.
            value: as in :meth:`push`.
            out: as in :meth:`pull`; what was pushed is replaced, if not given.
            priority: MXNet's; requests go in the order of the calls.
        """
        self.push(key, value, priority)
        self.pull(key, value if out is None else out, priority, ignore_sparse=False)

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """The keys are there, and the tensors have the values that rank 0 gave.

        Args:
            key: as in :meth:`init`.
            value: as in :meth:`init`.
            out: as in :meth:`pull`.
            priority: MXNet's; requests go in the order of the calls.
        """
        self.init(key, value)
        self.pull(key, out, priority, ignore_sparse=False)

    @torch.no_grad()
    def row_sparse_pull(
        self, key: Keys, out: Values | None = None, priority: int = 0, row_ids: Values | None = None
    ) -> None:
        """The tensors have the rows that are named: sparse ones these alone, dense ones beside what they had.

        Args:
            key: a number or a text, or a list of either, made from sparse tensors.
            out: a tensor for each, or a list of tensors, one for each device.
            priority: MXNet's; requests go in the order of the calls.
            row_ids: numbers of rows, in any order and shape, also several times: for all of ``out``, or for each.

        Raises:
            PlanError: there is no such key, it has no rows, or a tensor or a row does not fit it.
        """
        del priority
        found = self._registry.resolve_outs("row_sparse_pull", key, out)
        for name, ids in self._registry.resolve_row_ids(key, found, row_ids).items():
            last = None
            for tensor, numbers in zip(found[name], ids, strict=True):
                if numbers is not last:
                    values, last = self._store.pull_rows(name, numbers), numbers
                write_rows(tensor, numbers, values)

    def set_gradient_compression(self, compression_params: object) -> None:
        """What workers push, or devices of a ``device`` store, is compressed from now on; pulls are not.

        Args:
            compression_params: ``{"type": "2bit", "threshold": 0.5}``, or the type ``1bit``.

        Raises:
            PlanError: there is no such compression, or nothing that it could compress.
        """
        self._store.set_compression(parse_compression(compression_params))

    def set_optimizer(self, optimizer: object) -> None:
        """What is pushed is a gradient from now on, and makes a step; all workers call this.

        Call it before ``init``: keys that are there go over to new tables, without the old optimizer's state.

        Args:
            optimizer: a factory such as ``partial(torch.optim.SGD, lr=0.1)``, a torch optimizer, of which the class and
                the options are taken, or a rule of ``counterpoint.ps.update_rules``.

        Raises:
            PlanError: servers cannot do what it does.
        """
        self._store.set_optimizer(optimizer)

    def set_updater(self, updater: Updater) -> None:
        """What is pushed is given to a function from now on.

        Args:
            updater: called with the key, the sum of what was pushed, and the value, which it changes in place.

        Raises:
            PlanError: values are kept by servers, which run no functions.
        """
        self._store.set_updater(updater)

    _set_updater = set_updater

    def barrier(self) -> None:
        """All workers have come to this point, and what they pushed before is counted.

        Raises:
            PeerError: one has not, within the deadline.
        """
        self._store.barrier()

    _barrier = barrier

    def save_optimizer_states(self, fname: str | Path, dump_optimizer: bool = False) -> None:
        """The file has what the optimizer keeps beside the values.

        Args:
            fname: the file; one that was there is replaced.
            dump_optimizer: the options, such as the learning rate, are saved, too.

        Raises:
            PlanError: servers keep the states, or no optimizer was set.
            CheckpointError: the file cannot be written.
        """
        save_states(Path(fname), self._require_updater("save").states(), with_options=dump_optimizer)

    def load_optimizer_states(self, fname: str | Path) -> None:
        """The optimizer goes on from the states of a file.

        Args:
            fname: one of :meth:`save_optimizer_states`.

        Raises:
            PlanError: servers keep the states, or no optimizer was set.
            CheckpointError: the file cannot be read, or is of another optimizer.
        """
        self._require_updater("load").load_states(load_states(Path(fname)))

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return whether the store can do something: ``optimizer``, run one on what is pushed.

        Raises:
            PlanError: nobody knows what that is.
        """
        if capability.lower() != "optimizer":
            raise PlanError(f"is_capable({capability!r}): MXNet's stores are asked for 'optimizer' alone")
        return True

    def close(self) -> None:
        """This worker has left; the store is not used any more."""
        self._store.close()

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: TracebackType | None) -> None:
        """The store is closed."""
        self.close()

    def __getattr__(self, name: str) -> NoReturn:
        """Say what there is instead of what there is not."""
        raise_unsupported(name)

    def _require_updater(self, verb: str) -> TorchUpdater:
        updater = self._store.updater
        if updater is None:
            why = (
                "servers keep them, and a job that is hosted with a folder saves them with its checkpoints"
                if self._store_type.is_dist
                else "there are none before set_optimizer"
            )
            raise PlanError(f"{verb}_optimizer_states of a {self.type} store: {why}")
        return updater
