"""One baton for many threads: exactly one rank runs, and who runs next is decided by rank number, never by the system.

All state here is touched only by whoever has the baton, so it needs no locks of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from counterpoint.errors import PeerError, PlanError, ProgramError

DEVICES = ("cpu", "cuda")


class ThreadState(Enum):
    """What a rank is about, where it does not wait."""

    IDLE = 0
    RUNNABLE = 1


@dataclass(frozen=True, slots=True)
class BlockedOn:
    """Why a rank cannot go on: until ``over()``, and ``what()`` says for what and for whom."""

    is_done: Callable[[], bool]
    describe: Callable[[], str]


class RankScheduler:
    """Passes the right to run round among ``num_ranks`` threads.

    The state of torch's CPU generator goes with the rank that has the baton, as if each had a process of its own; a
    rank's begins as the caller's was when it first ran. Gradient mode and autocast are each thread's own and begin as
    the caller's.
    """

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._rank_locks = [acquired_lock() for _ in range(num_ranks)]
        self._caller_lock = acquired_lock()
        self._states: list[ThreadState | BlockedOn] = [ThreadState.IDLE] * num_ranks
        self._started = [False] * num_ranks
        self._generators: list[Tensor | None] = [None] * num_ranks
        self._work: Callable[[int], None] | None = None
        self._is_closed = False
        self._failure: str | None = None
        self._first_error: tuple[int, BaseException] | None = None
        self._threads = [
            threading.Thread(target=self._run_thread, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(num_ranks)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, work: Callable[[int], None]) -> None:
        """Every rank has run ``work(rank)`` to its end.

        Raises:
            ProgramError: this is called by one of the ranks, or while they run.
            PlanError: the threads are gone.
        """
        if self._is_closed:
            raise PlanError(
                f"the {len(self._rank_locks)} ranks have ended, because close() was called; close when training is over, "
                "and to train on, make them anew with another parallelize(...) or Trainer"
            )
        if self._work is not None:
            raise ProgramError("the ranks are running already; a world runs one piece of work at a time")
        num_ranks = len(self._rank_locks)
        self._work = inherit_torch_context(work)
        self._failure = self._first_error = None
        self._states[:] = [ThreadState.RUNNABLE] * num_ranks
        self._started[:] = [False] * num_ranks
        own = torch.default_generator.get_state()
        self._generators[:] = [own if state is None else state for state in self._generators]
        try:
            self._rank_locks[0].release()
            self._wait_for_ranks()
        finally:
            torch.default_generator.set_state(own)
        self._raise_first_error()

    def _raise_first_error(self) -> None:
        """No rank has ended in an error."""
        if self._first_error is not None:
            rank, error = self._first_error
            self._first_error = None
            error.add_note(f"raised by rank {rank} of {len(self._rank_locks)}; the others were stopped")
            raise error

    def _wait_for_ranks(self) -> None:
        """The ranks have all ended, also where the caller was interrupted while they ran.

        Ranks that wait for each other are found at once, and one that computes may take its time; so at the deadline
        they are only looked at, whether their threads live.
        """
        try:
            while not self._caller_lock.acquire(timeout=self._timeout_s):
                self._check_threads_alive()
            self._work = None
        except BaseException as error:
            self._failure = f"stopped because the caller was interrupted by {type(error).__name__}"
            if self._caller_lock.acquire(timeout=self._timeout_s):
                self._work = None
            raise

    def _check_threads_alive(self) -> None:
        """No rank's thread has ended."""
        gone = [str(rank) for rank, thread in enumerate(self._threads) if not thread.is_alive()]
        if gone:
            raise PeerError(
                f"the thread of rank {', '.join(gone)} has ended in the middle of its work, and the others wait for "
                "it; make the ranks anew"
            )

    def wait(self, rank: int, is_done: Callable[[], bool], describe: Callable[[], str]) -> None:
        """It is over, and the rank has the baton again; a PeerError where another rank has failed or all wait.

        Args:
            rank: who waits; it has the baton.
            over: whether it can go on.
            what: "x1.0 from rank 1", for the error when nobody can go on.
        """
        self.raise_if_failed()
        if is_done():
            return
        self._states[rank] = BlockedOn(is_done, describe)
        self._switch_from(rank)
        self._states[rank] = ThreadState.RUNNABLE
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """No rank has failed.

        Raises:
            PeerError: one has, with why.
        """
        if self._failure is not None:
            raise PeerError(self._failure)

    def fail(self, rank: int, reason: str) -> None:
        """The other ranks will be stopped where they wait; those that have not begun will not."""
        if self._failure is None:
            self._failure = f"stopped because of rank {rank}: {reason}"
        for other, begun in enumerate(self._started):
            if not begun:
                self._states[other] = ThreadState.IDLE

    def close(self) -> None:
        """The threads are gone; a second call does nothing."""
        self._is_closed = True
        for turn, thread in zip(self._rank_locks, self._threads, strict=True):
            if thread.is_alive():
                turn.release()
                thread.join(self._timeout_s)

    def _run_thread(self, rank: int) -> None:
        """Run whatever work there is whenever the baton comes; end when it comes without work."""
        while True:
            self._rank_locks[rank].acquire()
            work = self._work
            if work is None:
                return
            self._started[rank] = True
            self._restore_rng(rank)
            try:
                work(rank)
            except BaseException as error:  # noqa: BLE001 - it is raised again by the caller's thread
                self._record_error(rank, error)
            work = None
            self._states[rank] = ThreadState.IDLE
            self._generators[rank] = torch.default_generator.get_state()
            follower = self._next_runnable(rank)
            (self._caller_lock if follower is None else self._rank_locks[follower]).release()

    def _record_error(self, rank: int, error: BaseException) -> None:
        if self._first_error is None:
            self._first_error = (rank, error)
        self.fail(rank, f"{type(error).__name__}: {error}")

    def _switch_from(self, rank: int) -> None:
        """Somebody else runs until it is this rank's turn again."""
        follower = self._next_runnable(rank)
        if follower is None or follower == rank:
            return
        self._generators[rank] = torch.default_generator.get_state()
        self._rank_locks[follower].release()
        self._rank_locks[rank].acquire()
        self._restore_rng(rank)

    def _restore_rng(self, rank: int) -> None:
        state = self._generators[rank]
        if state is not None:
            torch.default_generator.set_state(state)

    def _next_runnable(self, rank: int) -> int | None:
        """Return the next rank that can go on, after this one in a circle; None where all have ended."""
        num_ranks = len(self._rank_locks)
        circle = [(rank + step) % num_ranks for step in range(1, num_ranks + 1)]
        for other in circle:
            mood = self._states[other]
            if mood is ThreadState.RUNNABLE or (
                isinstance(mood, BlockedOn) and (self._failure is not None or mood.is_done())
            ):
                return other
        waiting = [other for other in circle if isinstance(self._states[other], BlockedOn)]
        if not waiting:
            return None
        self._failure = self._describe_deadlock()
        return waiting[0]

    def _describe_deadlock(self) -> str:
        """Say who waits for what, of all ranks that have not ended."""
        waits = [(rank, mood) for rank, mood in enumerate(self._states) if isinstance(mood, BlockedOn)]
        ended = [str(rank) for rank, mood in enumerate(self._states) if mood is ThreadState.IDLE]
        return (
            "deadlock: "
            + "; ".join(f"rank {rank} waits for {wait.describe()}" for rank, wait in waits)
            + (f"; no more will come from rank {', '.join(ended)}" if ended else "")
            + "; every wait needs another rank that can still end it: compare the order of sends, "
            "receives and collectives"
        )


def inherit_torch_context(work: Callable[[int], None]) -> Callable[[int], None]:
    """Return the work with the gradient mode and the autocasts of this thread, which torch keeps for each apart."""
    grad_mode = torch.is_grad_enabled()
    casts = [(device, torch.get_autocast_dtype(device)) for device in DEVICES if torch.is_autocast_enabled(device)]

    def run(rank: int) -> None:
        with torch.set_grad_enabled(grad_mode), ExitStack() as stack:
            for device, dtype in casts:
                stack.enter_context(torch.autocast(device, dtype))
            work(rank)

    return run


def acquired_lock() -> threading.Lock:
    """Return a lock that its next taker will wait for."""
    lock = threading.Lock()
    lock.acquire()
    return lock
