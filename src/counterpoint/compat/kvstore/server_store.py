"""The stores ``dist_*``: values on servers, for workers that push and pull over a session.

A user's key becomes one key on the servers per optimizer: ``0:fc1`` before the first ``set_optimizer``, ``1:fc1`` after
it. Rank 0 creates it, and then pushes to ``0!fc1``; the other ranks wait for that push when they first use the key.
With bsp, the n-th push of a key by a worker is its gradient slice of the key's n-th step, and a pull waits for the
steps of the worker's own pushes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from counterpoint.compat.kvstore.arguments import Key
from counterpoint.compat.kvstore.compression import GradientCompressor, KVCodec
from counterpoint.compat.kvstore.optimizers import to_server_rule
from counterpoint.compat.kvstore.sparse_rows import sum_tensors
from counterpoint.compat.kvstore.store import StoredKeySpec
from counterpoint.compat.kvstore.updaters import Updater
from counterpoint.errors import DataError, PeerError, PlanError
from counterpoint.ps.consistency import NO_SLICE, Asp, Bsp
from counterpoint.ps.job_config import JobConfig, Timeouts
from counterpoint.ps.messages import DTYPES
from counterpoint.ps.session import InitialRows, PendingResult, PullResult, PushResult, Session, Versions
from counterpoint.ps.update_rules import Assign, Sgd, UpdateRule

WAIT_S = 600.0
"""Default of the longest time that a worker waits for others."""

BARRIER = "barrier"
MAX_PENDING_PUSHES = 8
"""Maximum number of pending pushes of one key."""


def make_job(*, num_workers: int, num_servers: int, is_async: bool, wait_s: float = WAIT_S) -> JobConfig:
    """Return the job configuration of a store; no worker waits longer than ``wait_s`` for others.

    Example:
        >>> make_job(num_workers=2, num_servers=1, is_async=False).consistency
        Bsp(slices_per_step=2)
    """
    consistency = Asp() if is_async else Bsp(num_workers)
    return JobConfig("kvstore", consistency, num_servers, timeouts=Timeouts(lease_s=wait_s))


@dataclass(frozen=True, slots=True)
class KVStoreMember:
    """One worker of a store.

    Args:
        session: in a job made by :func:`make_job`.
        rank: of the worker, from 0.
        num_workers: of the job.
        end: called when the worker leaves; by default ``session.close``.
    """

    session: Session
    rank: int
    num_workers: int
    end: Callable[[], None] | None = None


@dataclass(slots=True)
class RemoteKey:
    """A worker's view of a key on the servers.

    Args:
        spec: of the value.
        server_key: of the value on the servers, for the current optimizer.
        ready_key: that rank 0 pushes to after it has created the value.
        num_pushes: of this worker.
        versions: newest known, by shard.
        pending_pushes: without a reply so far.
        is_initialized: whether the session knows the key.
    """

    spec: StoredKeySpec
    server_key: str = ""
    ready_key: str = ""
    num_pushes: int = 0
    versions: Versions | None = None
    pending_pushes: deque[PendingResult[PushResult]] = field(default_factory=deque)
    is_initialized: bool = False

    @property
    def has_next_step_started(self) -> bool:
        """Whether the step of the next push has started, as far as this worker knows."""
        return self.num_pushes == 0 or (self.versions is not None and min(self.versions) >= self.num_pushes)

    def update_versions(self, versions: Versions) -> None:
        """Record versions of the key's shards."""
        self.versions = tuple(map(max, self.versions or versions, versions))


class ServerStore:
    """Values on servers.

    Args:
        member: this worker.
    """

    def __init__(self, member: KVStoreMember) -> None:
        self.rank, self.num_workers = member.rank, member.num_workers
        self._session = member.session
        self._end = member.end or member.session.close
        self._is_async = isinstance(member.session.job.consistency, Asp)
        self._keys: dict[Key, RemoteKey] = {}
        self._rule: UpdateRule | None = None
        self._num_optimizers = 0
        self._compressor: GradientCompressor | None = None
        self._num_barriers = 0
        self._session.init(BARRIER, torch.zeros(1), self._default_rule)

    updater = None

    @property
    def _default_rule(self) -> UpdateRule:
        """The rule of keys without an optimizer: with bsp the sum replaces the value; with asp the value stays."""
        return Sgd(0.0) if self._is_async else Assign()

    def check_key(self, key: Key, spec: StoredKeySpec) -> None:
        """Check that servers support the dtype.

        Raises:
            PlanError: they do not.
        """
        if spec.dtype not in DTYPES.values():
            raise PlanError(
                f"init of key {key!r} with {spec.dtype}: servers store {', '.join(DTYPES)}; convert it to one of these"
            )

    def init(self, key: Key, spec: StoredKeySpec, value: Tensor) -> None:
        """Create the key with the value of rank 0."""
        remote = self._keys[key] = RemoteKey(spec)
        self._assign_server_keys(key, remote)
        if self.rank == 0:
            self._create_key(remote, value.detach().cpu())

    def _assign_server_keys(self, key: Key, remote: RemoteKey) -> None:
        remote.server_key, remote.ready_key = f"{self._num_optimizers}:{key}", f"{self._num_optimizers}!{key}"
        remote.num_pushes, remote.versions, remote.is_initialized = 0, None, False

    def _create_key(self, remote: RemoteKey, value: Tensor) -> None:
        """Create the key on the servers with this value, unless it exists."""
        spec, rule = remote.spec, self._rule or self._default_rule
        if not spec.has_rows:
            self._session.init(remote.server_key, value.contiguous(), rule)
        else:
            self._create_row_key(remote, value, rule)
        self._session.init(remote.ready_key, torch.zeros(1), self._default_rule)
        if self.rank == 0:
            slice_indices = [NO_SLICE] if self._is_async else range(self.num_workers)
            pushes = [
                self._session.push(remote.ready_key, torch.zeros(1), slice_index=slice_index)
                for slice_index in slice_indices
            ]
            for push in pushes:
                push.wait()
        remote.is_initialized = True

    def _create_row_key(self, remote: RemoteKey, value: Tensor, rule: UpdateRule) -> None:
        num_rows, width = remote.spec.shape[0], remote.spec.shape[1:].numel()
        rule = Sgd(0.0) if isinstance(rule, Assign) else rule
        value = value.coalesce() if value.layout is torch.sparse_coo else value.to_sparse(1)
        initial_rows = InitialRows(value.indices()[0], value.values().reshape(-1, width))
        self._session.init_rows(remote.server_key, num_rows, width, remote.spec.dtype, rule, initial_rows)

    def _ensure_initialized(self, key: Key) -> RemoteKey:
        """Return a key that the session knows."""
        remote = self._keys[key]
        if not remote.is_initialized:
            self._session.init(remote.ready_key, torch.zeros(1), self._default_rule)
            self._session.pull(remote.ready_key, min_versions=1).wait()
            self._create_key(remote, _empty_value(remote.spec))
        return remote

    def push(self, key: Key, values: Sequence[Tensor]) -> None:
        """Start to push the sum of the values to the servers.

        Raises:
            PlanError: the servers need an optimizer.
            DataError: a value is not finite.
        """
        remote = self._ensure_initialized(key)
        self._check_rule(key, remote.spec)
        total = sum_tensors(values).cpu()
        rows = None
        if remote.spec.has_rows:
            rows, total = total.indices()[0], total.values().reshape(-1, remote.spec.shape[1:].numel())
        if not bool(total.isfinite().all()):
            raise DataError(
                f"push of key {key!r} with values that are not finite: nothing was sent; check the loss, or "
                "skip this batch on all workers"
            )
        if self._compressor is not None and rows is not None:
            raise PlanError(
                f"push of rows of key {key!r}: sparse rows cannot be compressed; use a store without compression"
            )
        self._wait_for_step(remote, rows)
        self._start_push(key, remote, total, rows)

    def _wait_for_step(self, remote: RemoteKey, rows: Tensor | None) -> None:
        """Wait until the step of the next push has started."""
        self._wait_pending(remote, max_pending=MAX_PENDING_PUSHES - 1)
        if not self._is_async and not remote.has_next_step_started:
            remote.update_versions(self._start_pull(remote, None if rows is None else rows[:0]).wait().versions)

    def _start_push(self, key: Key, remote: RemoteKey, total: Tensor, rows: Tensor | None) -> None:
        """Start a push; with compression, the rest is added to the next push."""
        slice_index = NO_SLICE if self._is_async else remote.num_pushes * self.num_workers + self.rank
        read_versions = None if self._is_async else remote.versions
        compressor, codec = self._compressor, ""
        if compressor is not None:
            codec = compressor.codec.codec
            total = compressor.add_residual(key, total) if codec else compressor.compress(key, total)
        pending = self._session.push(
            remote.server_key, total, slice_index=slice_index, read_versions=read_versions, rows=rows, codec=codec
        )
        remote.num_pushes += 1
        remote.pending_pushes.append(pending)

    def _start_pull(self, remote: RemoteKey, rows: Tensor | None) -> PendingResult[PullResult]:
        return self._session.pull(remote.server_key, rows=rows, min_versions=0 if self._is_async else remote.num_pushes)

    def _wait_pending(self, remote: RemoteKey, *, max_pending: int) -> None:
        """Wait until at most ``max_pending`` pushes are pending; raise the error of a rejected one."""
        while remote.pending_pushes and (len(remote.pending_pushes) > max_pending or remote.pending_pushes[0].done()):
            remote.update_versions(remote.pending_pushes.popleft().wait().versions)

    def _check_rule(self, key: Key, spec: StoredKeySpec) -> None:
        if self._rule is None and (self._is_async or spec.has_rows):
            reason = "sparse rows need" if spec.has_rows else "a dist_async store needs"
            raise PlanError(
                f"push of key {key!r} without an optimizer, but {reason} one; call "
                "set_optimizer(partial(torch.optim.SGD, lr=0.1)) on all workers first"
            )

    def pull(self, keys: Sequence[Key]) -> list[Tensor]:
        """Return the values after the steps of this worker's pushes."""
        remotes = [self._ensure_initialized(key) for key in keys]
        pending = []
        for remote in remotes:
            all_rows = torch.arange(remote.spec.shape[0]) if remote.spec.has_rows else None
            pending.append(self._start_pull(remote, all_rows))
        return [
            self._wait_pull(remote, pull).view(remote.spec.shape) for remote, pull in zip(remotes, pending, strict=True)
        ]

    def pull_rows(self, key: Key, row_ids: Tensor) -> Tensor:
        """Return these rows after the steps of this worker's pushes."""
        remote = self._ensure_initialized(key)
        rows = self._wait_pull(remote, self._start_pull(remote, row_ids))
        return rows.view(len(row_ids), *remote.spec.shape[1:])

    def _wait_pull(self, remote: RemoteKey, pending: PendingResult[PullResult]) -> Tensor:
        self._wait_pending(remote, max_pending=0)
        try:
            result = pending.wait()
        except PeerError as error:
            hint = "" if self._is_async else f"; it needs push {remote.num_pushes} of all {self.num_workers} workers"
            raise PeerError(f"{error}{hint}") from error
        remote.update_versions(result.versions)
        return result.values

    def set_optimizer(self, optimizer: object) -> None:
        """Treat later pushes as gradients of this optimizer; existing keys move to new tables.

        Raises:
            PlanError: servers do not support it.
        """
        rule = to_server_rule(optimizer)
        if self._is_async and self._rule is not None and self._keys:
            self._wait_all_pushes()
        values = self.pull(list(self._keys)) if self.rank == 0 else []
        self._rule = rule
        self._num_optimizers += 1
        for key, remote in self._keys.items():
            self._wait_pending(remote, max_pending=0)
            self._assign_server_keys(key, remote)
        for remote, value in zip(self._keys.values(), values, strict=False):
            self._create_key(remote, value)

    def _wait_all_pushes(self) -> None:
        """On rank 0, wait until the pushes of all workers before the next optimizer are applied; others only report."""
        for served in self._keys.values():
            self._wait_pending(served, max_pending=0)
        name = f"moved {self._num_optimizers}"
        self._session.init(name, torch.zeros(1), self._default_rule)
        self._session.push(name, torch.zeros(1)).wait()
        if self.rank == 0:
            self._session.pull(name, min_versions=self.num_workers).wait()

    def set_updater(self, updater: Updater) -> None:
        """Reject the updater, since servers run no functions.

        Raises:
            PlanError: always.
        """
        raise PlanError(
            "set_updater of a dist store: servers run no functions; use set_optimizer, or update the pulled "
            "values on the workers"
        )

    def set_compression(self, codec: KVCodec) -> None:
        """Compress later pushes."""
        self._compressor = GradientCompressor(codec)

    def barrier(self) -> None:
        """Wait until all workers have called this and their earlier pushes are applied.

        Raises:
            PeerError: one has not before the timeout.
        """
        for remote in self._keys.values():
            self._wait_pending(remote, max_pending=0)
        index = self._num_barriers
        self._num_barriers += 1
        slice_index = NO_SLICE if self._is_async else index * self.num_workers + self.rank
        self._session.push(BARRIER, torch.zeros(1), slice_index=slice_index).wait()
        min_versions = self._num_barriers * (self.num_workers if self._is_async else 1)
        try:
            self._session.pull(BARRIER, min_versions=min_versions).wait()
        except PeerError as error:
            raise PeerError(f"barrier {self._num_barriers} of {self.num_workers} workers: {error}") from error

    def close(self) -> None:
        """Leave the job."""
        self._end()


def _empty_value(spec: StoredKeySpec) -> Tensor:
    """Return a placeholder value for a key that exists already."""
    if spec.has_rows:
        empty = torch.empty(0, *spec.shape[1:], dtype=spec.dtype)
        return torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), empty, spec.shape, check_invariants=False)
    return torch.zeros(1, dtype=spec.dtype).expand(spec.shape)
