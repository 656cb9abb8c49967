"""The gloo connections of one rank: opened by name among some ranks, cut all at once when something has gone wrong."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from counterpoint.errors import PeerError
from counterpoint.fabric.c10d import GlooProcessGroup, PrefixStore, ProcessGroupGloo
from counterpoint.fabric.fingerprint import format_ranks

MAX_PAUSE_S = 0.02  # between two looks into the store


ConnectionFactory = Callable[[PrefixStore, str, tuple[int, ...], int, float], GlooProcessGroup]
"""Opens a connection: the ranks' store, its name, its members, this rank, and the longest that this may last."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """What the ranks share before they are connected: the store, what connects them, and which ranks they are."""

    store: PrefixStore
    connect: ConnectionFactory
    job: int
    generation: int


def gloo_connection_factory(device: ProcessGroupGloo.Device) -> ConnectionFactory:
    """Return what opens connections of gloo, which listen on this device."""

    def link(store: PrefixStore, place: str, group: tuple[int, ...], rank: int, deadline_s: float) -> GlooProcessGroup:
        """Return a connection among the members of a group, all of which have come to this place of the store."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - it has no public name
        options._devices = [device]  # noqa: SLF001
        options._timeout = timedelta(seconds=deadline_s)  # noqa: SLF001
        options._threads = 2  # noqa: SLF001
        # torch's stubs know neither this way to make it nor most of its calls
        own = PrefixStore(place, store)
        gloo: GlooProcessGroup = ProcessGroupGloo(own, group.index(rank), len(group), options)  # type: ignore[assignment]
        return gloo

    return link


class Connections:
    """Opens connections, and cuts them."""

    def __init__(self, rank: int, rendezvous: Rendezvous, timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._rendezvous: Rendezvous | None = rendezvous
        self._open: list[GlooProcessGroup] = []
        # gloo waits for what is under way when it is freed, also at the end of the process: then it has to be cut first
        self._at_exit = weakref.finalize(self, abort_connections, self._open)

    def open(self, name: str, group: Sequence[int]) -> GlooProcessGroup:
        """Return a new connection among the ranks of the group, all of which have come to open it.

        Raises:
            PeerError: some have not come when the deadline passes.
            RuntimeError: it has been closed, or a member is gone.
        """
        meeting = self._rendezvous
        if meeting is None:
            raise RuntimeError("the fabric has been closed")
        place = f"{name}/{'.'.join(map(str, group))}"
        self._barrier_on_store(meeting.store, f"{place}/came", group)
        gloo = meeting.connect(meeting.store, place, tuple(group), self._rank, self._timeout_s)
        self._open.append(gloo)
        self._barrier_on_store(
            meeting.store, f"{place}/joined", group
        )  # one that leaves early must not cut off the others
        return gloo

    def _barrier_on_store(self, store: PrefixStore, key: str, group: Sequence[int]) -> None:
        """All members are at this place.

        Raises:
            PeerError: some have not come when the deadline passes.
        """
        began = time.monotonic()
        store.set(f"{key}/{self._rank}", "here")
        missing = wait_for_keys(store, [f"{key}/{member}" for member in group], self._timeout_s)
        if missing:
            late = format_ranks([group[index] for index in missing])
            waited_s = time.monotonic() - began
            raise PeerError(
                f"rank {self._rank} waited {waited_s:.1f} s for {late} to join the group of {format_ranks(group)}; all "
                f"members must start a collective of this group: look at what {late} did instead"
            )

    def post_abort_reason(self, reason: str) -> None:
        """The other ranks can read why this one stops, unless another was first or the store is gone."""
        if self._rendezvous is not None:
            try_post_abort_reason(self._rendezvous.store, f"{self._rank}: {reason}")

    def abort_reason(self) -> str | None:
        """Return "rank 2: why it stopped" of the first rank that said so, if it was another; None otherwise."""
        if self._rendezvous is None:
            return None
        posted = read_abort_reason(self._rendezvous.store)
        return None if posted is None or posted.startswith(f"{self._rank}: ") else f"rank {posted}"

    def abort(self) -> None:
        """Nothing is under way any more: here it has failed, and the other sides see that the connection is gone."""
        abort_connections(self._open)

    def close(self) -> None:
        """The connections are forgotten."""
        self._at_exit.detach()
        self._open.clear()
        self._rendezvous = None


class StoreLostError(RuntimeError):
    """The store is gone, with whoever kept it.

    Args:
        missing: the places of the keys that were not in it.
        cause: what torch says.
    """

    def __init__(self, missing: Sequence[int], cause: str) -> None:
        super().__init__(cause)
        self.missing = missing


def abort_connections(connections: Sequence[GlooProcessGroup]) -> None:
    """All pairs of these connections are closed.

    gloo has no call for this; but a receive that expires closes every pair of its connection.
    """
    for gloo in connections:
        nothing = torch.empty(1, dtype=torch.uint8)
        try:
            gloo.recv([nothing], (gloo.rank() + 1) % gloo.size(), 1 << 20).wait(timedelta(milliseconds=1))
        except RuntimeError:
            continue  # it has expired, or was closed before


def wait_for_keys(
    store: PrefixStore, keys: Sequence[str], timeout_s: float, should_cancel: Callable[[], bool] = lambda: False
) -> list[int]:
    """Return the places of the keys that are not in the store when all are, or time is up.

    Args:
        store: where they will be.
        keys: to wait for.
        deadline_s: the longest that this lasts.
        is_vain: whether to wait no longer.

    Raises:
        StoreLostError: it is, which says little of those that are missing.
    """
    end = time.monotonic() + timeout_s
    missing = list(range(len(keys)))
    pause_s = 0.0005
    while True:
        # not store.wait: it is deaf to signals, and writes to stderr when it expires
        try:
            missing = [index for index in missing if not store.check([keys[index]])]
        except RuntimeError as error:
            raise StoreLostError(missing, str(error)) from error
        if not missing or time.monotonic() > end or should_cancel():
            return missing
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def try_post_abort_reason(store: PrefixStore, reason: str) -> None:
    """The store has a reason: this one where it had none; nothing has happened where the store is gone."""
    try:
        store.compare_set("stopped", "", reason)
    except RuntimeError:
        return


def read_abort_reason(store: PrefixStore) -> str | None:
    """Return what was posted first; None where nothing was, or the store is gone."""
    try:
        return store.get("stopped").decode() if store.check(["stopped"]) else None
    except RuntimeError:
        return None
