"""The stores ``dist_*``: values kept by servers, for workers that push and pull over a session.

A key of the user's is, on the servers, a key for each optimizer it has had: ``0:fc1`` before the first, ``1:fc1`` after
it. Rank 0 makes it, and says so by a push to ``0!fc1``; the others wait for that when they first need the key. Under
bsp a worker's n-th push of a key is its portion of the key's n-th step; a pull waits for the steps of all own pushes.
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
from counterpoint.ps.job_config import Asp, Bsp, JobConfig, Timeouts
from counterpoint.ps.messages import DTYPES, NO_SLICE
from counterpoint.ps.session import InitialRows, PendingResult, PullResult, PushResult, Session, Versions
from counterpoint.ps.update_rules import Assign, Sgd, UpdateRule

WAIT_S = 600.0
"""The longest that a worker waits for others, if nobody says."""

BARRIER = "barrier"
MAX_PENDING_PUSHES = 8
"""Pushes of one key that may be under way at once."""


def make_job(*, num_workers: int, num_servers: int, is_async: bool, wait_s: float = WAIT_S) -> JobConfig:
    """Return the job that a store of these workers and servers is; nobody waits longer than ``wait_s``.

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
        session: its belonging to the job, see :func:`make_job`.
        rank: which worker it is, from 0.
        num_workers: how many there are.
        end: ends what belongs to the session; its ``close``, if not given.
    """

    session: Session
    rank: int
    num_workers: int
    end: Callable[[], None] | None = None


@dataclass(slots=True)
class RemoteKey:
    """A key, as its worker knows it.

    Args:
        look: what its value looks like.
        name: of the key on the servers, for this optimizer.
        sign: of the key that rank 0 pushes when it has made this one.
        step: own pushes.
        versions: the newest that were heard of.
        under_way: pushes that have not been answered.
        is_open: the session knows the key.
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
        """Whether the step of the next push has begun, as far as this worker has heard."""
        return self.num_pushes == 0 or (self.versions is not None and min(self.versions) >= self.num_pushes)

    def update_versions(self, versions: Versions) -> None:
        """The parts of the key have these versions, at least."""
        self.versions = tuple(map(max, self.versions or versions, versions))


class ServerStore:
    """Values kept by servers.

    Args:
        member: which worker this is.
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
        """The rule of keys without an optimizer: under bsp the sum is the value; asp has none, so nothing changes."""
        return Sgd(0.0) if self._is_async else Assign()

    def check_key(self, key: Key, spec: StoredKeySpec) -> None:
        """A key of this look can be kept.

        Raises:
            PlanError: servers keep no such numbers.
        """
        if spec.dtype not in DTYPES.values():
            raise PlanError(
                f"init of key {key!r} with {spec.dtype}: servers keep {', '.join(DTYPES)}; convert it to one of these"
            )

    def init(self, key: Key, spec: StoredKeySpec, value: Tensor) -> None:
        """The key has this value: that of rank 0."""
        served = self._keys[key] = RemoteKey(spec)
        self._assign_server_keys(key, served)
        if self.rank == 0:
            self._create_key(served, value.detach().cpu())

    def _assign_server_keys(self, key: Key, remote: RemoteKey) -> None:
        remote.server_key, remote.ready_key = f"{self._num_optimizers}:{key}", f"{self._num_optimizers}!{key}"
        remote.num_pushes, remote.versions, remote.is_initialized = 0, None, False

    def _create_key(self, remote: RemoteKey, value: Tensor) -> None:
        """The key is there, with this value if it was not."""
        look, rule = remote.spec, self._rule or self._default_rule
        if not look.has_rows:
            self._session.init(remote.server_key, value.contiguous(), rule)
        else:
            self._create_row_key(remote, value, rule)
        self._session.init(remote.ready_key, torch.zeros(1), self._default_rule)
        if self.rank == 0:
            portions = [NO_SLICE] if self._is_async else range(self.num_workers)
            signs = [self._session.push(remote.ready_key, torch.zeros(1), slice_index=portion) for portion in portions]
            for sign in signs:
                sign.wait()
        remote.is_initialized = True

    def _create_row_key(self, remote: RemoteKey, value: Tensor, rule: UpdateRule) -> None:
        num_rows, width = remote.spec.shape[0], remote.spec.shape[1:].numel()
        rule = Sgd(0.0) if isinstance(rule, Assign) else rule
        value = value.coalesce() if value.layout is torch.sparse_coo else value.to_sparse(1)
        given = InitialRows(value.indices()[0], value.values().reshape(-1, width))
        self._session.init_rows(remote.server_key, num_rows, width, remote.spec.dtype, rule, given)

    def _ensure_initialized(self, key: Key) -> RemoteKey:
        """Return a key that the session knows."""
        served = self._keys[key]
        if not served.is_initialized:
            self._session.init(served.ready_key, torch.zeros(1), self._default_rule)
            self._session.pull(served.ready_key, min_versions=1).wait()
            self._create_key(served, _empty_value(served.spec))
        return served

    def push(self, key: Key, values: Sequence[Tensor]) -> None:
        """The sum of the values is on its way to the servers.

        Raises:
            PlanError: the servers have no optimizer, and need one.
            DataError: a number is not finite.
        """
        served = self._ensure_initialized(key)
        self._check_rule(key, served.spec)
        total = sum_tensors(values).cpu()
        rows = None
        if served.spec.has_rows:
            rows, total = total.indices()[0], total.values().reshape(-1, served.spec.shape[1:].numel())
        if not bool(total.isfinite().all()):
            raise DataError(
                f"push of key {key!r} with numbers that are not finite: nothing was sent; look at the loss, or "
                "leave this batch out on all workers"
            )
        if self._compressor is not None and rows is not None:
            raise PlanError(f"push of rows of key {key!r}: rows are not compressed; take a store without compression")
        self._wait_for_step(served, rows)
        self._start_push(key, served, total, rows)

    def _wait_for_step(self, remote: RemoteKey, rows: Tensor | None) -> None:
        """The step of the next push has begun."""
        self._wait_pending(remote, max_pending=MAX_PENDING_PUSHES - 1)
        if not self._is_async and not remote.has_next_step_started:
            remote.update_versions(self._start_pull(remote, None if rows is None else rows[:0]).wait().versions)

    def _start_push(self, key: Key, remote: RemoteKey, total: Tensor, rows: Tensor | None) -> None:
        """A push is under way; where it is compressed, what it leaves out is kept for the next."""
        portion = NO_SLICE if self._is_async else remote.num_pushes * self.num_workers + self.rank
        read = None if self._is_async else remote.versions
        compression, code = self._compressor, ""
        if compression is not None:
            code = compression.codec.codec
            total = compression.add_residual(key, total) if code else compression.compress(key, total)
        pushed = self._session.push(
            remote.server_key, total, slice_index=portion, read_versions=read, rows=rows, codec=code
        )
        remote.num_pushes += 1
        remote.pending_pushes.append(pushed)

    def _start_pull(self, remote: RemoteKey, rows: Tensor | None) -> PendingResult[PullResult]:
        return self._session.pull(remote.server_key, rows=rows, min_versions=0 if self._is_async else remote.num_pushes)

    def _wait_pending(self, remote: RemoteKey, *, max_pending: int) -> None:
        """So many pushes are under way, at most; one that was refused is raised."""
        while remote.pending_pushes and (len(remote.pending_pushes) > max_pending or remote.pending_pushes[0].done()):
            remote.update_versions(remote.pending_pushes.popleft().wait().versions)

    def _check_rule(self, key: Key, spec: StoredKeySpec) -> None:
        if self._rule is None and (self._is_async or spec.has_rows):
            why = "rows" if spec.has_rows else "a dist_async store"
            raise PlanError(
                f"push of key {key!r} without an optimizer, which {why} need{'' if spec.has_rows else 's'}: call "
                "set_optimizer(partial(torch.optim.SGD, lr=0.1)) on all workers before"
            )

    def pull(self, keys: Sequence[Key]) -> list[Tensor]:
        """Return the values, after the steps of all own pushes."""
        found = [self._ensure_initialized(key) for key in keys]
        asked = []
        for served in found:
            every = torch.arange(served.spec.shape[0]) if served.spec.has_rows else None
            asked.append(self._start_pull(served, every))
        return [self._wait_pull(served, one).view(served.spec.shape) for served, one in zip(found, asked, strict=True)]

    def pull_rows(self, key: Key, row_ids: Tensor) -> Tensor:
        """Return these rows, after the steps of all own pushes."""
        served = self._ensure_initialized(key)
        rows = self._wait_pull(served, self._start_pull(served, row_ids))
        return rows.view(len(row_ids), *served.spec.shape[1:])

    def _wait_pull(self, remote: RemoteKey, pending: PendingResult[PullResult]) -> Tensor:
        self._wait_pending(remote, max_pending=0)
        try:
            found = pending.wait()
        except PeerError as error:
            steps = (
                "" if self._is_async else f"; it waits for push {remote.num_pushes} of all {self.num_workers} workers"
            )
            raise PeerError(f"{error}{steps}") from error
        remote.update_versions(found.versions)
        return found.values

    def set_optimizer(self, optimizer: object) -> None:
        """What is pushed is a gradient from now on; keys that are there go over to new tables.

        Raises:
            PlanError: servers cannot do what it does.
        """
        rule = to_server_rule(optimizer)
        if self._is_async and self._rule is not None and self._keys:
            self._wait_all_pushes()
        values = self.pull(list(self._keys)) if self.rank == 0 else []
        self._rule = rule
        self._num_optimizers += 1
        for key, served in self._keys.items():
            self._wait_pending(served, max_pending=0)
            self._assign_server_keys(key, served)
        for served, value in zip(self._keys.values(), values, strict=False):
            self._create_key(served, value)

    def _wait_all_pushes(self) -> None:
        """All pushes of all workers before the next optimizer are counted, where this is rank 0; the others go on."""
        for served in self._keys.values():
            self._wait_pending(served, max_pending=0)
        name = f"moved {self._num_optimizers}"
        self._session.init(name, torch.zeros(1), self._default_rule)
        self._session.push(name, torch.zeros(1)).wait()
        if self.rank == 0:
            self._session.pull(name, min_versions=self.num_workers).wait()

    def set_updater(self, updater: Updater) -> None:
        """Servers run no functions.

        Raises:
            PlanError: always.
        """
        raise PlanError(
            "set_updater of a dist store: servers run no functions; set_optimizer, or update on the workers what "
            "pull gives without one"
        )

    def set_compression(self, codec: KVCodec) -> None:
        """What is pushed is compressed from now on."""
        self._compressor = GradientCompressor(codec)

    def barrier(self) -> None:
        """All workers have come to this point, and what they pushed before is counted.

        Raises:
            PeerError: one has not, within the deadline.
        """
        for served in self._keys.values():
            self._wait_pending(served, max_pending=0)
        arrived = self._num_barriers
        self._num_barriers += 1
        portion = NO_SLICE if self._is_async else arrived * self.num_workers + self.rank
        self._session.push(BARRIER, torch.zeros(1), slice_index=portion).wait()
        everybody = self._num_barriers * (self.num_workers if self._is_async else 1)
        try:
            self._session.pull(BARRIER, min_versions=everybody).wait()
        except PeerError as error:
            raise PeerError(f"barrier {self._num_barriers} of {self.num_workers} workers: {error}") from error

    def close(self) -> None:
        """The worker has left."""
        self._end()


def _empty_value(spec: StoredKeySpec) -> Tensor:
    """Return a value of this look for a key that is there already."""
    if spec.has_rows:
        empty = torch.empty(0, *spec.shape[1:], dtype=spec.dtype)
        return torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), empty, spec.shape, check_invariants=False)
    return torch.zeros(1, dtype=spec.dtype).expand(spec.shape)
