"""Ranks without more data take part in the other ranks' operations with zeros, until all have joined.

A rank cannot know that another has joined before it waits for it. So a rank checks a key-value store on rank 0 only
after it has waited for some time. If a rank has joined, it writes there each operation that it has started and that it
starts from then on; joined ranks read them and take part:

    rank 0: allreduce(a) starts, waits 20 ms, finds that rank 1 has joined, writes call/0 = allreduce(a)
    rank 1: join() reads call/0, takes part with zeros, then reads call/1 ... until all have joined

A program in which all ranks join at the same time has no extra cost.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from typing import Final

from counterpoint.compat.horovod.errors import HorovodInternalError
from counterpoint.compat.horovod.handles import HorovodHandle, JoinableCollective, OpRequest
from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.fabric.fingerprint import format_ranks
from counterpoint.fabric.shared_store import SharedStore
from counterpoint.terminal_text import escape_line

FIRST_POLL_S: Final = 0.02  # wait of a rank before it checks the store
MAX_POLL_S: Final = 0.5  # longest time between two checks
JOINED_POLL_S: Final = 0.0005  # between two checks of a joined rank
STALL_WARNING_S: Final = 60.0  # wait after which a warning is logged


class JoinState:
    """What a rank knows about joined ranks.

    Args:
        fabric: of this rank.
        open_store: opens the store on first use; returns None if there is none.
        started: returns the operations of all ranks that this rank has started and not waited for.

    Attributes:
        open_store: as given.
    """

    def __init__(
        self,
        fabric: Fabric,
        open_store: Callable[[], SharedStore | None],
        started: Callable[[], Sequence[HorovodHandle]],
    ) -> None:
        self._fabric = fabric
        self.open_store = open_store
        self._started = started
        self._round = 0
        self._has_joined_ranks = False
        self._last_checked_s = time.monotonic()

    def announce(self, request: OpRequest, sequence: int) -> None:
        """Tell joined ranks about an operation that this rank is about to start.

        Raises:
            HorovodInternalError: they cannot take part in it.
        """
        if self._has_joined_ranks:
            self._publish(request, sequence)

    def wait(self, work: Work, request: OpRequest) -> None:
        """Wait until the collective is complete.

        Raises:
            HorovodInternalError: the timeout has passed, or a member has joined and cannot take part.
            PeerError: the members disagree, or one has exited.
        """
        if work.completes_within(FIRST_POLL_S):
            return
        started_s, pause_s, has_stalled = time.monotonic(), FIRST_POLL_S, False
        while not work.completes_within(pause_s):
            waited_s = self._check_timeout(request, started_s)
            if waited_s > STALL_WARNING_S and not has_stalled:
                self._report_stall(request, waited_s)
                has_stalled = True
            pause_s = min(2 * pause_s, MAX_POLL_S)
            self._check_joined_ranks(request)
        if has_stalled and (store := self.open_store()) is not None:
            store.delete(f"stalled/{self._fabric.rank}")

    def poll(self, handle: HorovodHandle) -> bool:
        """Return whether the operation is complete; repeated polling raises the errors of :meth:`wait`.

        Raises:
            HorovodInternalError: as :meth:`wait`.
        """
        if handle.poll():
            return True
        now = time.monotonic()
        if handle.first_polled_s is None:
            handle.first_polled_s = now
        self._check_timeout(handle.request, handle.first_polled_s)
        if now - self._last_checked_s > FIRST_POLL_S:
            self._last_checked_s = now
            self._check_joined_ranks(handle.request)
        return False

    def join(self, sequence: int, contribute_zeros: Callable[[Sequence[JoinableCollective]], None]) -> tuple[int, int]:
        """Take part with zeros until all ranks have joined; return the last rank to join, and the next sequence number.

        Args:
            sequence: number of operations of all ranks that this rank has started; all are complete.
            contribute_zeros: takes part in an operation.

        Raises:
            HorovodInternalError: the others start an operation that joined ranks cannot take part in, or nothing before
                the timeout.
        """
        store, rank, num_ranks = self.open_store(), self._fabric.rank, self._fabric.num_ranks
        if num_ranks == 1:
            return 0, sequence
        if store is None:
            raise HorovodInternalError(
                "join needs a reachable port on rank 0, and none could be opened; pad the data so "
                "that all ranks have the same number of batches, or set MASTER_ADDR to an address of rank 0's host"
            )
        prefix = f"join/{self._round}"
        store.set(f"{prefix}/here/{rank}", "here")
        if store.increment(f"{prefix}/count") == num_ranks:
            store.set(f"{prefix}/last", str(rank))
        for index in count(sequence):
            collectives = self._next_operation(store, prefix, index)
            if collectives is None:
                break
            contribute_zeros(collectives)
            sequence = index + 1
        last = int(store.get(f"{prefix}/last") or 0)
        self._fabric.barrier(tuple(range(num_ranks)))  # rank 0 serves the store until all have read it
        self._round += 1
        self._has_joined_ranks = False
        return last, sequence

    def _check_timeout(self, request: OpRequest, began_s: float) -> float:
        """Return how long this rank has waited; raise an error after the timeout."""
        waited_s = time.monotonic() - began_s
        if waited_s > self._fabric.timeout_s:
            raise self._fail(
                f"rank {self._fabric.rank} waited {waited_s:.1f} s for {request} with "
                f"{format_ranks(self._other_members(request))}: "
                f"the timeout of {self._fabric.timeout_s:.1f} s has passed; every member must start it: check "
                "what the others do instead, or raise the timeout with `counterpoint run --timeout` if they "
                "are only slow"
            )
        return waited_s

    def _next_operation(self, store: SharedStore, prefix: str, sequence: int) -> list[JoinableCollective] | None:
        """Wait for the operation with this sequence number and return it; None when all ranks have joined instead."""
        deadline = time.monotonic() + self._fabric.timeout_s
        pause_s = JOINED_POLL_S
        while True:
            have_all_joined = store.get(f"{prefix}/last") is not None
            encoded = store.get(f"{prefix}/call/{sequence}")
            if encoded is not None:
                return [
                    JoinableCollective(**{**collective, "shape": tuple(collective["shape"])})
                    for collective in json.loads(encoded)
                ]
            if have_all_joined:
                return None
            failure = store.get(f"{prefix}/failed")
            if failure is not None:
                with suppress(RuntimeError):  # rank 0 may exit when it has seen this, before it answers
                    store.set(f"{prefix}/seen/{self._fabric.rank}", "seen")
                raise HorovodInternalError(f"rank {self._fabric.rank}, which has joined, was stopped: {failure}")
            if store.is_lost:
                self._fabric.barrier(tuple(range(self._fabric.num_ranks)))  # raises why rank 0 has exited
            if time.monotonic() > deadline:
                missing = sorted(set(range(self._fabric.num_ranks)) - set(self._joined_ranks(store)))
                raise self._fail(
                    f"rank {self._fabric.rank} has joined and waited {self._fabric.timeout_s:.1f} s for "
                    f"{format_ranks(missing)} to continue or to join; every rank must call join: check what "
                    f"{format_ranks(missing)} do instead"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, FIRST_POLL_S / 4)

    def _check_joined_ranks(self, request: OpRequest) -> None:
        """If a rank has joined, publish what this rank has started."""
        store = None if self._has_joined_ranks and len(request.group) == self._fabric.num_ranks else self.open_store()
        if store is None or store.get(f"join/{self._round}/count") is None:
            return
        joined = sorted(set(self._joined_ranks(store)) & set(request.group))
        if len(request.group) < self._fabric.num_ranks:
            if joined:
                raise self._reject(store, request, f"{format_ranks(joined)} joined; a joined rank takes part only in")
            return
        self._has_joined_ranks = True
        for handle in self._started():
            self._publish(handle.request, handle.sequence)
        if request.joinable is None:
            raise self._reject(store, request, f"{format_ranks(joined)} joined; a joined rank takes part only in")

    def _publish(self, request: OpRequest, sequence: int) -> None:
        store = self.open_store()
        if store is None or sequence < 0:
            return
        if request.joinable is None:
            raise self._reject(
                store, request, f"{format_ranks(self._joined_ranks(store))} joined; a joined rank takes part only in"
            )
        store.set(
            f"join/{self._round}/call/{sequence}", json.dumps([asdict(collective) for collective in request.joinable])
        )

    def _reject(self, store: SharedStore, request: OpRequest, reason: str) -> HorovodInternalError:
        text = (
            f"rank {self._fabric.rank} starts {request} among {format_ranks(request.group)} after {reason} "
            "allreduce, grouped_allreduce and barrier of all ranks; call it before any rank joins, or pad the data so "
            "that all ranks have the same number of batches"
        )
        prefix = f"join/{self._round}"
        store.set(f"{prefix}/failed", text)
        deadline = time.monotonic() + MAX_POLL_S
        while any(store.get(f"{prefix}/seen/{other}") is None for other in self._joined_ranks(store)):
            if time.monotonic() > deadline:
                break
            time.sleep(JOINED_POLL_S)  # the store is lost when rank 0 exits
        return self._fail(text)

    def _fail(self, text: str) -> HorovodInternalError:
        self._fabric.abort(text)
        return HorovodInternalError(text)

    def _joined_ranks(self, store: SharedStore) -> Group:
        all_ranks = range(self._fabric.num_ranks)
        return tuple(rank for rank in all_ranks if store.get(f"join/{self._round}/here/{rank}") is not None)

    def _other_members(self, request: OpRequest) -> list[int]:
        return [member for member in request.group if member != self._fabric.rank]

    def _report_stall(self, request: OpRequest, waited_s: float) -> None:
        """Log which members are not waiting for the same operation."""
        store = self.open_store()
        if store is None:
            return
        store.set(f"stalled/{self._fabric.rank}", str(request))
        missing = [other for other in self._other_members(request) if store.get(f"stalled/{other}") != str(request)]
        logging.getLogger("counterpoint.horovod").warning(
            "rank %d has waited %.0f s for %s; %s not waiting for it: check what they wait for instead",
            self._fabric.rank,
            waited_s,
            escape_line(str(request)),
            f"{format_ranks(missing)} {'is' if len(missing) == 1 else 'are'}",
        )
