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

from counterpoint.compat.kvstore.compression import Code, Compression
from counterpoint.compat.kvstore.optimizers import rule_of
from counterpoint.compat.kvstore.pairs import Key
from counterpoint.compat.kvstore.rows import added
from counterpoint.compat.kvstore.store import Look
from counterpoint.compat.kvstore.updaters import Updater
from counterpoint.errors import DataError, PeerError, PlanError
from counterpoint.server.choices import Aggregate, Rule, Sgd
from counterpoint.server.job import Asp, Bsp, Job, Patience
from counterpoint.server.messages import DTYPES, NO_PORTION
from counterpoint.server.session import Given, Pending, Pulls, Pushes, Session, Versions

WAIT_S = 600.0
"""The longest that a worker waits for others, if nobody says."""

BARRIER = "barrier"
MAX_UNDER_WAY = 8
"""Pushes of one key that may be under way at once."""


def job_of(*, num_workers: int, num_servers: int, is_async: bool, wait_s: float = WAIT_S) -> Job:
    """Return the job that a store of these workers and servers is; nobody waits longer than ``wait_s``.

    Example:
        >>> job_of(num_workers=2, num_servers=1, is_async=False).consistency
        Bsp(portions=2)
    """
    consistency = Asp() if is_async else Bsp(num_workers)
    return Job("kvstore", consistency, num_servers, patience=Patience(lease_s=wait_s))


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of a store.

    Args:
        session: its belonging to the job, see :func:`job_of`.
        rank: which worker it is, from 0.
        num_workers: how many there are.
        end: ends what belongs to the session; its ``close``, if not given.
    """

    session: Session
    rank: int
    num_workers: int
    end: Callable[[], None] | None = None


@dataclass(slots=True)
class Served:
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

    look: Look
    name: str = ""
    sign: str = ""
    step: int = 0
    versions: Versions | None = None
    under_way: deque[Pending[Pushes]] = field(default_factory=deque)
    is_open: bool = False

    @property
    def is_begun(self) -> bool:
        """Whether the step of the next push has begun, as far as this worker has heard."""
        return self.step == 0 or (self.versions is not None and min(self.versions) >= self.step)

    def heard(self, versions: Versions) -> None:
        """The parts of the key have these versions, at least."""
        self.versions = tuple(map(max, self.versions or versions, versions))


class ServedStore:
    """Values kept by servers.

    Args:
        member: which worker this is.
    """

    def __init__(self, member: Member) -> None:
        self.rank, self.num_workers = member.rank, member.num_workers
        self._session = member.session
        self._end = member.end or member.session.close
        self._is_async = isinstance(member.session.job.consistency, Asp)
        self._keys: dict[Key, Served] = {}
        self._rule: Rule | None = None
        self._num_optimizers = 0
        self._compression: Compression | None = None
        self._num_barriers = 0
        self._session.init(BARRIER, torch.zeros(1), self._plain_rule)

    updater = None

    @property
    def _plain_rule(self) -> Rule:
        """The rule of keys without an optimizer: under bsp the sum is the value; asp has none, so nothing changes."""
        return Sgd(0.0) if self._is_async else Aggregate()

    def require(self, key: Key, look: Look) -> None:
        """A key of this look can be kept.

        Raises:
            PlanError: servers keep no such numbers.
        """
        if look.dtype not in DTYPES.values():
            raise PlanError(
                f"init of key {key!r} with {look.dtype}: servers keep {', '.join(DTYPES)}; convert it to one of these"
            )

    def init(self, key: Key, look: Look, value: Tensor) -> None:
        """The key has this value: that of rank 0."""
        served = self._keys[key] = Served(look)
        self._rename(key, served)
        if self.rank == 0:
            self._make(served, value.detach().cpu())

    def _rename(self, key: Key, served: Served) -> None:
        served.name, served.sign = f"{self._num_optimizers}:{key}", f"{self._num_optimizers}!{key}"
        served.step, served.versions, served.is_open = 0, None, False

    def _make(self, served: Served, value: Tensor) -> None:
        """The key is there, with this value if it was not."""
        look, rule = served.look, self._rule or self._plain_rule
        if not look.has_rows:
            self._session.init(served.name, value.contiguous(), rule)
        else:
            self._make_rows(served, value, rule)
        self._session.init(served.sign, torch.zeros(1), self._plain_rule)
        if self.rank == 0:
            portions = [NO_PORTION] if self._is_async else range(self.num_workers)
            signs = [self._session.push(served.sign, torch.zeros(1), portion=portion) for portion in portions]
            for sign in signs:
                sign.wait()
        served.is_open = True

    def _make_rows(self, served: Served, value: Tensor, rule: Rule) -> None:
        num_rows, width = served.look.shape[0], served.look.shape[1:].numel()
        rule = Sgd(0.0) if isinstance(rule, Aggregate) else rule
        value = value.coalesce() if value.layout is torch.sparse_coo else value.to_sparse(1)
        given = Given(value.indices()[0], value.values().reshape(-1, width))
        self._session.init_rows(served.name, num_rows, width, served.look.dtype, rule, given)

    def _open(self, key: Key) -> Served:
        """Return a key that the session knows."""
        served = self._keys[key]
        if not served.is_open:
            self._session.init(served.sign, torch.zeros(1), self._plain_rule)
            self._session.pull(served.sign, least=1).wait()
            self._make(served, _nothing(served.look))
        return served

    def push(self, key: Key, values: Sequence[Tensor]) -> None:
        """The sum of the values is on its way to the servers.

        Raises:
            PlanError: the servers have no optimizer, and need one.
            DataError: a number is not finite.
        """
        served = self._open(key)
        self._require_rule(key, served.look)
        total = added(values).cpu()
        rows = None
        if served.look.has_rows:
            rows, total = total.indices()[0], total.values().reshape(-1, served.look.shape[1:].numel())
        if not bool(total.isfinite().all()):
            raise DataError(
                f"push of key {key!r} with numbers that are not finite: nothing was sent; look at the loss, or "
                "leave this batch out on all workers"
            )
        if self._compression is not None and rows is not None:
            raise PlanError(f"push of rows of key {key!r}: rows are not compressed; take a store without compression")
        self._wait_for_step(served, rows)
        self._send(key, served, total, rows)

    def _wait_for_step(self, served: Served, rows: Tensor | None) -> None:
        """The step of the next push has begun."""
        self._settle(served, most=MAX_UNDER_WAY - 1)
        if not self._is_async and not served.is_begun:
            served.heard(self._look_up(served, None if rows is None else rows[:0]).wait().versions)

    def _send(self, key: Key, served: Served, total: Tensor, rows: Tensor | None) -> None:
        """A push is under way; where it is compressed, what it leaves out is kept for the next."""
        portion = NO_PORTION if self._is_async else served.step * self.num_workers + self.rank
        read = None if self._is_async else served.versions
        compression, code = self._compression, ""
        if compression is not None:
            code = compression.code.text
            total = compression.due(key, total) if code else compression.compressed(key, total)
        pushed = self._session.push(served.name, total, portion=portion, read=read, rows=rows, code=code)
        served.step += 1
        served.under_way.append(pushed)

    def _look_up(self, served: Served, rows: Tensor | None) -> Pending[Pulls]:
        return self._session.pull(served.name, rows=rows, least=0 if self._is_async else served.step)

    def _settle(self, served: Served, *, most: int) -> None:
        """So many pushes are under way, at most; one that was refused is raised."""
        while served.under_way and (len(served.under_way) > most or served.under_way[0].done()):
            served.heard(served.under_way.popleft().wait().versions)

    def _require_rule(self, key: Key, look: Look) -> None:
        if self._rule is None and (self._is_async or look.has_rows):
            why = "rows" if look.has_rows else "a dist_async store"
            raise PlanError(
                f"push of key {key!r} without an optimizer, which {why} need{'' if look.has_rows else 's'}: call "
                "set_optimizer(partial(torch.optim.SGD, lr=0.1)) on all workers before"
            )

    def pull(self, keys: Sequence[Key]) -> list[Tensor]:
        """Return the values, after the steps of all own pushes."""
        found = [self._open(key) for key in keys]
        asked = []
        for served in found:
            every = torch.arange(served.look.shape[0]) if served.look.has_rows else None
            asked.append(self._look_up(served, every))
        return [self._taken(served, one).view(served.look.shape) for served, one in zip(found, asked, strict=True)]

    def pull_rows(self, key: Key, numbers: Tensor) -> Tensor:
        """Return these rows, after the steps of all own pushes."""
        served = self._open(key)
        rows = self._taken(served, self._look_up(served, numbers))
        return rows.view(len(numbers), *served.look.shape[1:])

    def _taken(self, served: Served, asked: Pending[Pulls]) -> Tensor:
        self._settle(served, most=0)
        try:
            found = asked.wait()
        except PeerError as error:
            steps = "" if self._is_async else f"; it waits for push {served.step} of all {self.num_workers} workers"
            raise PeerError(f"{error}{steps}") from error
        served.heard(found.versions)
        return found.values

    def set_optimizer(self, optimizer: object) -> None:
        """What is pushed is a gradient from now on; keys that are there go over to new tables.

        Raises:
            PlanError: servers cannot do what it does.
        """
        rule = rule_of(optimizer)
        if self._is_async and self._rule is not None and self._keys:
            self._await_pushes()
        values = self.pull(list(self._keys)) if self.rank == 0 else []
        self._rule = rule
        self._num_optimizers += 1
        for key, served in self._keys.items():
            self._settle(served, most=0)
            self._rename(key, served)
        for served, value in zip(self._keys.values(), values, strict=False):
            self._make(served, value)

    def _await_pushes(self) -> None:
        """All pushes of all workers before the next optimizer are counted, where this is rank 0; the others go on."""
        for served in self._keys.values():
            self._settle(served, most=0)
        name = f"moved {self._num_optimizers}"
        self._session.init(name, torch.zeros(1), self._plain_rule)
        self._session.push(name, torch.zeros(1)).wait()
        if self.rank == 0:
            self._session.pull(name, least=self.num_workers).wait()

    def set_updater(self, updater: Updater) -> None:
        """Servers run no functions.

        Raises:
            PlanError: always.
        """
        raise PlanError(
            "set_updater of a dist store: servers run no functions; set_optimizer, or update on the workers what "
            "pull gives without one"
        )

    def set_code(self, code: Code) -> None:
        """What is pushed is compressed from now on."""
        self._compression = Compression(code)

    def barrier(self) -> None:
        """All workers have come to this point, and what they pushed before is counted.

        Raises:
            PeerError: one has not, within the deadline.
        """
        for served in self._keys.values():
            self._settle(served, most=0)
        arrived = self._num_barriers
        self._num_barriers += 1
        portion = NO_PORTION if self._is_async else arrived * self.num_workers + self.rank
        self._session.push(BARRIER, torch.zeros(1), portion=portion).wait()
        everybody = self._num_barriers * (self.num_workers if self._is_async else 1)
        try:
            self._session.pull(BARRIER, least=everybody).wait()
        except PeerError as error:
            raise PeerError(f"barrier {self._num_barriers} of {self.num_workers} workers: {error}") from error

    def close(self) -> None:
        """The worker has left."""
        self._end()


def _nothing(look: Look) -> Tensor:
    """Return a value of this look for a key that is there already."""
    if look.has_rows:
        empty = torch.empty(0, *look.shape[1:], dtype=look.dtype)
        return torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), empty, look.shape, check_invariants=False)
    return torch.zeros(1, dtype=look.dtype).expand(look.shape)
