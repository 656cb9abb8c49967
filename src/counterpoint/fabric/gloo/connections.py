"""Connections of one rank: gloo process groups, opened by name over the store, and aborted together."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from counterpoint.errors import PeerError
from counterpoint.fabric.c10d import GlooProcessGroup, PrefixStore, ProcessGroupGloo, Store
from counterpoint.fabric.fingerprint import format_ranks
from counterpoint.fabric.gloo.pair_proof import prove_pairs

MAX_PAUSE_S = 0.02  # between two reads of the store

ConnectionFactory = Callable[[Store, str, tuple[int, ...], int, float], GlooProcessGroup]
"""Opens a connection, given the store, its name, its members, this rank, and a timeout in seconds."""


def abort_connections(connections: Sequence[GlooProcessGroup]) -> None:
    """Close all sockets of these process groups.

    gloo has no call for this, but a receive that expires closes all sockets of its group.
    """
    for gloo in connections:
        buffer = torch.empty(1, dtype=torch.uint8)
        try:
            gloo.recv([buffer], (gloo.rank() + 1) % gloo.size(), 1 << 20).wait(timedelta(milliseconds=1))
        except RuntimeError:
            continue  # expired, or closed before


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """State that ranks share before they are connected.

    Attributes:
        store: of the job.
        connect: opens a connection among some ranks.
        job: the job's number.
        generation: of its ranks.
        secret: with which the ends of a connection prove that they are ranks of the job; None where none is shared.
        abort: ends all that is pending on some connections.
    """

    store: Store
    connect: ConnectionFactory
    job: int
    generation: int
    secret: bytes | None = None
    abort: Callable[[Sequence[GlooProcessGroup]], None] = abort_connections


def gloo_connection_factory(device: ProcessGroupGloo.Device) -> ConnectionFactory:
    """Return a factory of gloo process groups that listen on this device."""

    def connect(store: Store, name: str, group: tuple[int, ...], rank: int, timeout_s: float) -> GlooProcessGroup:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - it has no public name
        options._devices = [device]  # noqa: SLF001
        options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
        options._threads = 2  # noqa: SLF001
        # torch's stubs have neither this constructor nor most of the methods
        group_store = PrefixStore(name, store)
        gloo: GlooProcessGroup = ProcessGroupGloo(group_store, group.index(rank), len(group), options)  # type: ignore[assignment]
        return gloo

    return connect


class Connections:
    """Opens connections among ranks, and aborts all of them."""

    def __init__(self, rank: int, rendezvous: Rendezvous, timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._rendezvous: Rendezvous | None = rendezvous
        self._open: list[GlooProcessGroup] = []
        # gloo waits for pending operations when it is freed, also at process exit: so it is aborted first
        self._abort = rendezvous.abort
        self._at_exit = weakref.finalize(self, self._abort, self._open)

    def open(self, name: str, group: Sequence[int]) -> GlooProcessGroup:
        """Return a new connection among the ranks of the group; all of them call it.

        Raises:
            PeerError: members are missing at the timeout, or have not proved that they are of the job.
            RuntimeError: the fabric is closed, or a member is gone.
        """
        meeting = self._rendezvous
        if meeting is None:
            raise RuntimeError("the fabric has been closed")
        key = f"{name}/{'.'.join(map(str, group))}"
        self._barrier_on_store(meeting.store, f"{key}/came", group)
        gloo = meeting.connect(meeting.store, key, tuple(group), self._rank, self._timeout_s)
        self._open.append(gloo)
        if meeting.secret is not None:
            connection = f"{meeting.job}/{meeting.generation}/{key}"
            prove_pairs(gloo, meeting.secret, connection, tuple(group), self._rank, self._timeout_s)
        self._barrier_on_store(
            meeting.store, f"{key}/joined", group
        )  # a member that left before all have connected would break the others' connections
        return gloo

    def _barrier_on_store(self, store: Store, key: str, group: Sequence[int]) -> None:
        """Wait until all members have set the key.

        Raises:
            PeerError: members are missing at the timeout.
        """
        began = time.monotonic()
        store.set(f"{key}/{self._rank}", "here")
        missing = wait_for_keys(store, [f"{key}/{member}" for member in group], self._timeout_s)
        if missing:
            late = format_ranks([group[index] for index in missing])
            waited_s = time.monotonic() - began
            raise PeerError(
                f"rank {self._rank} waited {waited_s:.1f} s for {late} to join the group of {format_ranks(group)}; all "
                f"members must start collectives of this group: check what {late} did instead"
            )

    def post_abort_reason(self, reason: str) -> None:
        """Store why this rank aborts, unless another rank was first or the store is gone."""
        if self._rendezvous is not None:
            try_post_abort_reason(self._rendezvous.store, f"{self._rank}: {reason}")

    def abort_reason(self) -> str | None:
        """Return "rank 2: reason" of the first rank that aborted, unless it is this one; None otherwise."""
        if self._rendezvous is None:
            return None
        posted = read_abort_reason(self._rendezvous.store)
        return None if posted is None or posted.startswith(f"{self._rank}: ") else f"rank {posted}"

    def abort(self) -> None:
        """Abort all connections: pending operations fail here, and the peers see closed connections."""
        self._abort(self._open)

    def close(self) -> None:
        """Release the connections."""
        self._at_exit.detach()
        self._open.clear()
        self._rendezvous = None


class StoreLostError(RuntimeError):
    """The store is gone, because its owner has ended.

    Args:
        missing: indices of the keys that were not set.
        cause: torch's error text.
    """

    def __init__(self, missing: Sequence[int], cause: str) -> None:
        super().__init__(cause)
        self.missing = missing


def wait_for_keys(
    store: Store, keys: Sequence[str], timeout_s: float, should_cancel: Callable[[], bool] = lambda: False
) -> list[int]:
    """Wait until all keys are set; return the indices of those that are missing at the timeout.

    Args:
        store: where they will be set.
        keys: to wait for.
        timeout_s: the longest that this lasts.
        should_cancel: polled; whether to stop waiting.

    Raises:
        StoreLostError: the store is gone.
    """
    end = time.monotonic() + timeout_s
    missing = list(range(len(keys)))
    pause_s = 0.0005
    while True:
        # not store.wait, which ignores signals, and writes to stderr when it expires
        try:
            missing = [index for index in missing if not store.check([keys[index]])]
        except RuntimeError as error:
            raise StoreLostError(missing, str(error)) from error
        if not missing or time.monotonic() > end or should_cancel():
            return missing
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def try_post_abort_reason(store: Store, reason: str) -> None:
    """Store the reason, unless one is stored already or the store is gone."""
    try:
        store.compare_set("stopped", "", reason)
    except RuntimeError:
        return


def read_abort_reason(store: Store) -> str | None:
    """Return the first reason that was posted; None if there is none, or the store is gone."""
    try:
        return store.get("stopped").decode() if store.check(["stopped"]) else None
    except RuntimeError:
        return None
