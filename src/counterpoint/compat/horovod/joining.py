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
from counterpoint.compat.horovod.handles import Call, Part, Pending
from counterpoint.fabric.board import Board
from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.fabric.fingerprint import ranks

MOMENT_S: Final = 0.02  # so long a rank waits before it looks at the board
LONG_MOMENT_S: Final = 0.5  # between two looks, in the end
PAUSE_S: Final = 0.0005  # between two looks of a rank that has joined
STALL_S: Final = 60.0  # then a rank that waits says so


class Joining:
    """What one rank knows of those that have joined.

    Args:
        fabric: of this rank.
        board: opens the board when it is needed for the first time; None where there is none.
        started: the operations of all ranks that this rank has started and not waited for.

    Attributes:
        board: as given.
    """

    def __init__(
        self, fabric: Fabric, board: Callable[[], Board | None], started: Callable[[], Sequence[Pending]]
    ) -> None:
        self._fabric = fabric
        self.board = board
        self._started = started
        self._round = 0
        self._somebody_has_joined = False
        self._asked_s = time.monotonic()

    def announce(self, call: Call, turn: int) -> None:
        """Those that have joined know what this rank is about to start.

        Raises:
            HorovodInternalError: they cannot take part in it.
        """
        if self._somebody_has_joined:
            self._post(call, turn)

    def wait(self, work: Work, call: Call) -> None:
        """The collective is complete.

        Raises:
            HorovodInternalError: the deadline has passed, or a member has joined and cannot take part.
            PeerError: the members disagree, or one of them is gone.
        """
        if work.completes_within(MOMENT_S):
            return
        began, pause_s, has_stalled = time.monotonic(), MOMENT_S, False
        while not work.completes_within(pause_s):
            waited_s = self._require_in_time(call, began)
            if waited_s > STALL_S and not has_stalled:
                self._report_stall(call, waited_s)
                has_stalled = True
            pause_s = min(2 * pause_s, LONG_MOMENT_S)
            self._look(call)
        if has_stalled and (board := self.board()) is not None:
            board.clear(f"stalled/{self._fabric.rank}")

    def ask(self, handle: Pending) -> bool:
        """Return whether it is over; a program that asks again and again is told in the end what is wrong.

        Raises:
            HorovodInternalError: as :meth:`wait`.
        """
        if handle.completes():
            return True
        now = time.monotonic()
        if handle.asked_since_s is None:
            handle.asked_since_s = now
        self._require_in_time(handle.call, handle.asked_since_s)
        if now - self._asked_s > MOMENT_S:
            self._asked_s = now
            self._look(handle.call)
        return False

    def join(self, turn: int, mirror: Callable[[Sequence[Part]], None]) -> tuple[int, int]:
        """Return the rank that joined last, and the turn: all have joined, and this one has followed them until then.

        Args:
            turn: the operations of all ranks that this one has started; all are complete.
            mirror: takes part in an operation, with zeros.

        Raises:
            HorovodInternalError: the others do what this rank cannot follow, or nothing within the deadline.
        """
        board, rank, num_ranks = self.board(), self._fabric.rank, self._fabric.num_ranks
        if num_ranks == 1:
            return 0, turn
        if board is None:
            raise HorovodInternalError(
                "join needs a port at which rank 0 can be reached, and none could be opened; pad the data instead, so "
                "that all ranks have the same number of batches, or give a MASTER_ADDR that is an address of its host"
            )
        place = f"join/{self._round}"
        board.post(f"{place}/here/{rank}", "here")
        if board.count(f"{place}/count") == num_ranks:
            board.post(f"{place}/last", str(rank))
        for at in count(turn):
            parts = self._next(board, place, at)
            if parts is None:
                break
            mirror(parts)
            turn = at + 1
        last = int(board.read(f"{place}/last") or 0)
        self._fabric.barrier(tuple(range(num_ranks)))  # nobody leaves while another may still look at the board
        self._round += 1
        self._somebody_has_joined = False
        return last, turn

    def _require_in_time(self, call: Call, began_s: float) -> float:
        """Return how long this rank has waited; an error where that is too long."""
        waited_s = time.monotonic() - began_s
        if waited_s > self._fabric.deadline_s:
            raise self._fail(
                f"rank {self._fabric.rank} waited {waited_s:.1f} s for {call} with {ranks(self._others(call))}: "
                f"the deadline of {self._fabric.deadline_s:.1f} s has passed; every member must start it: look at "
                "what the others did instead, or raise the deadline with `counterpoint run --deadline` where they "
                "are only slow"
            )
        return waited_s

    def _next(self, board: Board, place: str, turn: int) -> list[Part] | None:
        """Return the operation whose turn it is, when somebody has started it; None when all have joined instead."""
        end = time.monotonic() + self._fabric.deadline_s
        pause_s = PAUSE_S
        while True:
            have_all_joined = board.read(f"{place}/last") is not None
            words = board.read(f"{place}/call/{turn}")
            if words is not None:
                return [Part(**{**part, "shape": tuple(part["shape"])}) for part in json.loads(words)]
            if have_all_joined:
                return None
            failure = board.read(f"{place}/failed")
            if failure is not None:
                board.post(f"{place}/heard/{self._fabric.rank}", "heard")
                raise HorovodInternalError(f"rank {self._fabric.rank}, which has joined, was stopped: {failure}")
            if board.is_lost:
                self._fabric.barrier(tuple(range(self._fabric.num_ranks)))  # the fabric knows why rank 0 has ended
            if time.monotonic() > end:
                missing = sorted(set(range(self._fabric.num_ranks)) - set(self._joined(board)))
                raise self._fail(
                    f"rank {self._fabric.rank} has joined and waited {self._fabric.deadline_s:.1f} s for "
                    f"{ranks(missing)} to go on or to join; every rank must call join: look at what "
                    f"{ranks(missing)} did instead"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MOMENT_S / 4)

    def _look(self, call: Call) -> None:
        """If somebody has joined, those who have know what this rank has started."""
        board = None if self._somebody_has_joined and len(call.group) == self._fabric.num_ranks else self.board()
        if board is None or board.read(f"join/{self._round}/count") is None:
            return
        absent = sorted(set(self._joined(board)) & set(call.group))
        if len(call.group) < self._fabric.num_ranks:
            if absent:
                raise self._refuse(board, call, f"{ranks(absent)} joined; a rank that has joined follows only")
            return
        self._somebody_has_joined = True
        for handle in self._started():
            self._post(handle.call, handle.turn)
        if call.parts is None:
            raise self._refuse(board, call, f"{ranks(absent)} joined; a rank that has joined follows only")

    def _post(self, call: Call, turn: int) -> None:
        board = self.board()
        if board is None or turn < 0:
            return
        if call.parts is None:
            raise self._refuse(board, call, f"{ranks(self._joined(board))} joined; a rank that has joined follows only")
        board.post(f"join/{self._round}/call/{turn}", json.dumps([asdict(part) for part in call.parts]))

    def _refuse(self, board: Board, call: Call, why: str) -> HorovodInternalError:
        text = (
            f"rank {self._fabric.rank} starts {call} among {ranks(call.group)} after {why} "
            "allreduce, grouped_allreduce and barrier of all ranks; call it before any rank joins, or pad the data so "
            "that all ranks have the same number of batches"
        )
        place = f"join/{self._round}"
        board.post(f"{place}/failed", text)
        end = time.monotonic() + LONG_MOMENT_S
        while any(board.read(f"{place}/heard/{other}") is None for other in self._joined(board)):
            if time.monotonic() > end:
                break
            time.sleep(PAUSE_S)  # the board is gone when rank 0 ends
        return self._fail(text)

    def _fail(self, text: str) -> HorovodInternalError:
        self._fabric.stop(text)
        return HorovodInternalError(text)

    def _joined(self, board: Board) -> Group:
        everybody = range(self._fabric.num_ranks)
        return tuple(rank for rank in everybody if board.read(f"join/{self._round}/here/{rank}") is not None)

    def _others(self, call: Call) -> list[int]:
        return [member for member in call.group if member != self._fabric.rank]

    def _report_stall(self, call: Call, waited_s: float) -> None:
        """Say who is not there, as far as it is known: those that do not wait for the same."""
        board = self.board()
        if board is None:
            return
        board.post(f"stalled/{self._fabric.rank}", str(call))
        missing = [other for other in self._others(call) if board.read(f"stalled/{other}") != str(call)]
        logging.getLogger("counterpoint.horovod").warning(
            "rank %d has waited %.0f s for %s; %s not waiting for it: look at what they do instead",
            self._fabric.rank, waited_s, call, f"{ranks(missing)} {'is' if len(missing) == 1 else 'are'}",
        )  # fmt: skip
