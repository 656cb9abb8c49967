"""Ranks that have run out of data follow the others, with zeros, until all have.

A rank cannot know that another has joined before it waits for it; so nothing is said or asked until a rank has waited
for longer than a moment. Then it looks at a board: if somebody has joined, it posts there what it has started and, from
then on, whatever it starts; those that have joined read it and take part. A program in which no rank ever joins before
the others pays nothing.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import count
from typing import Final

from counterpoint.compat.horovod.errors import HorovodInternalError
from counterpoint.compat.horovod.handles import HorovodHandle, JoinableCollective, OpRequest
from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.fabric.fingerprint import format_ranks
from counterpoint.fabric.shared_store import SharedStore

FIRST_POLL_S: Final = 0.02  # so long a rank waits before it looks at the board
MAX_POLL_S: Final = 0.5  # between two looks, in the end
JOINED_POLL_S: Final = 0.0005  # between two looks of a rank that has joined
STALL_WARNING_S: Final = 60.0  # then a rank that waits says so


class JoinState:
    """What one rank knows of those that have joined.

    Args:
        fabric: of this rank.
        board: opens the board when it is needed for the first time; None where there is none.
        started: the operations of all ranks that this rank has started and not waited for.

    Attributes:
        board: as given.
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
        """Those that have joined know what this rank is about to start.

        Raises:
            HorovodInternalError: they cannot take part in it.
        """
        if self._has_joined_ranks:
            self._publish(request, sequence)

    def wait(self, work: Work, request: OpRequest) -> None:
        """The collective is complete.

        Raises:
            HorovodInternalError: the deadline has passed, or a member has joined and cannot take part.
            PeerError: the members disagree, or one of them is gone.
        """
        if work.completes_within(FIRST_POLL_S):
            return
        began, pause_s, has_stalled = time.monotonic(), FIRST_POLL_S, False
        while not work.completes_within(pause_s):
            waited_s = self._check_deadline(request, began)
            if waited_s > STALL_WARNING_S and not has_stalled:
                self._report_stall(request, waited_s)
                has_stalled = True
            pause_s = min(2 * pause_s, MAX_POLL_S)
            self._check_joined_ranks(request)
        if has_stalled and (board := self.open_store()) is not None:
            board.delete(f"stalled/{self._fabric.rank}")

    def poll(self, handle: HorovodHandle) -> bool:
        """Return whether it is over; a program that asks again and again is told in the end what is wrong.

        Raises:
            HorovodInternalError: as :meth:`wait`.
        """
        if handle.poll():
            return True
        now = time.monotonic()
        if handle.first_polled_s is None:
            handle.first_polled_s = now
        self._check_deadline(handle.request, handle.first_polled_s)
        if now - self._last_checked_s > FIRST_POLL_S:
            self._last_checked_s = now
            self._check_joined_ranks(handle.request)
        return False

    def join(self, sequence: int, contribute_zeros: Callable[[Sequence[JoinableCollective]], None]) -> tuple[int, int]:
        """Return the rank that joined last, and the turn: all have joined, and this one has followed them until then.

        Args:
            turn: the operations of all ranks that this one has started; all are complete.
            mirror: takes part in an operation, with zeros.

        Raises:
            HorovodInternalError: the others do what this rank cannot follow, or nothing within the deadline.
        """
        board, rank, num_ranks = self.open_store(), self._fabric.rank, self._fabric.num_ranks
        if num_ranks == 1:
            return 0, sequence
        if board is None:
            raise HorovodInternalError(
                "join needs a port at which rank 0 can be reached, and none could be opened; pad the data instead, so "
                "that all ranks have the same number of batches, or give a MASTER_ADDR that is an address of its host"
            )
        place = f"join/{self._round}"
        board.set(f"{place}/here/{rank}", "here")
        if board.increment(f"{place}/count") == num_ranks:
            board.set(f"{place}/last", str(rank))
        for at in count(sequence):
            parts = self._next_operation(board, place, at)
            if parts is None:
                break
            contribute_zeros(parts)
            sequence = at + 1
        last = int(board.get(f"{place}/last") or 0)
        self._fabric.barrier(tuple(range(num_ranks)))  # nobody leaves while another may still look at the board
        self._round += 1
        self._has_joined_ranks = False
        return last, sequence

    def _check_deadline(self, request: OpRequest, began_s: float) -> float:
        """Return how long this rank has waited; an error where that is too long."""
        waited_s = time.monotonic() - began_s
        if waited_s > self._fabric.timeout_s:
            raise self._fail(
                f"rank {self._fabric.rank} waited {waited_s:.1f} s for {request} with {format_ranks(self._other_members(request))}: "
                f"the deadline of {self._fabric.timeout_s:.1f} s has passed; every member must start it: look at "
                "what the others did instead, or raise the deadline with `counterpoint run --deadline` where they "
                "are only slow"
            )
        return waited_s

    def _next_operation(self, store: SharedStore, place: str, sequence: int) -> list[JoinableCollective] | None:
        """Return the operation whose turn it is, when somebody has started it; None when all have joined instead."""
        end = time.monotonic() + self._fabric.timeout_s
        pause_s = JOINED_POLL_S
        while True:
            have_all_joined = store.get(f"{place}/last") is not None
            words = store.get(f"{place}/call/{sequence}")
            if words is not None:
                return [JoinableCollective(**{**part, "shape": tuple(part["shape"])}) for part in json.loads(words)]
            if have_all_joined:
                return None
            failure = store.get(f"{place}/failed")
            if failure is not None:
                store.set(f"{place}/heard/{self._fabric.rank}", "heard")
                raise HorovodInternalError(f"rank {self._fabric.rank}, which has joined, was stopped: {failure}")
            if store.is_lost:
                self._fabric.barrier(tuple(range(self._fabric.num_ranks)))  # the fabric knows why rank 0 has ended
            if time.monotonic() > end:
                missing = sorted(set(range(self._fabric.num_ranks)) - set(self._joined_ranks(store)))
                raise self._fail(
                    f"rank {self._fabric.rank} has joined and waited {self._fabric.timeout_s:.1f} s for "
                    f"{format_ranks(missing)} to go on or to join; every rank must call join: look at what "
                    f"{format_ranks(missing)} did instead"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, FIRST_POLL_S / 4)

    def _check_joined_ranks(self, request: OpRequest) -> None:
        """If somebody has joined, those who have know what this rank has started."""
        board = None if self._has_joined_ranks and len(request.group) == self._fabric.num_ranks else self.open_store()
        if board is None or board.get(f"join/{self._round}/count") is None:
            return
        absent = sorted(set(self._joined_ranks(board)) & set(request.group))
        if len(request.group) < self._fabric.num_ranks:
            if absent:
                raise self._reject(
                    board, request, f"{format_ranks(absent)} joined; a rank that has joined follows only"
                )
            return
        self._has_joined_ranks = True
        for handle in self._started():
            self._publish(handle.request, handle.sequence)
        if request.joinable is None:
            raise self._reject(board, request, f"{format_ranks(absent)} joined; a rank that has joined follows only")

    def _publish(self, request: OpRequest, sequence: int) -> None:
        board = self.open_store()
        if board is None or sequence < 0:
            return
        if request.joinable is None:
            raise self._reject(
                board, request, f"{format_ranks(self._joined_ranks(board))} joined; a rank that has joined follows only"
            )
        board.set(f"join/{self._round}/call/{sequence}", json.dumps([asdict(part) for part in request.joinable]))

    def _reject(self, store: SharedStore, request: OpRequest, why: str) -> HorovodInternalError:
        text = (
            f"rank {self._fabric.rank} starts {request} among {format_ranks(request.group)} after {why} "
            "allreduce, grouped_allreduce and barrier of all ranks; call it before any rank joins, or pad the data so "
            "that all ranks have the same number of batches"
        )
        place = f"join/{self._round}"
        store.set(f"{place}/failed", text)
        end = time.monotonic() + MAX_POLL_S
        while any(store.get(f"{place}/heard/{other}") is None for other in self._joined_ranks(store)):
            if time.monotonic() > end:
                break
            time.sleep(JOINED_POLL_S)  # the board is gone when rank 0 ends
        return self._fail(text)

    def _fail(self, text: str) -> HorovodInternalError:
        self._fabric.abort(text)
        return HorovodInternalError(text)

    def _joined_ranks(self, store: SharedStore) -> Group:
        everybody = range(self._fabric.num_ranks)
        return tuple(rank for rank in everybody if store.get(f"join/{self._round}/here/{rank}") is not None)

    def _other_members(self, request: OpRequest) -> list[int]:
        return [member for member in request.group if member != self._fabric.rank]

    def _report_stall(self, request: OpRequest, waited_s: float) -> None:
        """Say who is not there, as far as it is known: those that do not wait for the same."""
        board = self.open_store()
        if board is None:
            return
        board.set(f"stalled/{self._fabric.rank}", str(request))
        missing = [other for other in self._other_members(request) if board.get(f"stalled/{other}") != str(request)]
        logging.getLogger("counterpoint.horovod").warning(
            "rank %d has waited %.0f s for %s; %s not waiting for it: look at what they do instead",
            self._fabric.rank, waited_s, request, f"{format_ranks(missing)} {'is' if len(missing) == 1 else 'are'}",
        )  # fmt: skip
