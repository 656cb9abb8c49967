"""Cooperative scheduler for ranks that are threads of one process: one rank runs at a time, chosen by rank number.

The order of execution never depends on the operating system's scheduler. All state is touched only by the running rank,
so it needs no lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

from counterpoint.errors import PeerError, PlanError, ProgramError

DEVICES = ("cpu", "cuda")


class ThreadState(Enum):
    """State of a rank that is not blocked."""

    IDLE = 0
    RUNNABLE = 1


@dataclass(frozen=True, slots=True)
class BlockedOn:
    """The condition that a rank waits for, and its description for the deadlock error."""

    is_done: Callable[[], bool]
    describe: Callable[[], str]


class RankScheduler:
    """Runs one function on ``num_ranks`` threads, one thread at a time, round-robin.

    Each rank has its own state of torch's default CPU generator, as a process would; it is swapped on every switch and
    starts as a copy of the caller's. Gradient mode, autocast and function modes are thread-local and start as the
    caller's, as contextvars do.
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
        """Run ``work(rank)`` on every rank to its end.

        Raises:
            ProgramError: called by one of the ranks, or while they run.
            PlanError: the scheduler was closed.
        """
        if self._is_closed:
            raise PlanError(
                f"the {len(self._rank_locks)} ranks have ended because close() was called; close after training, or "
                "create them again with another parallelize(...) or Trainer"
            )
        if self._work is not None:
            raise ProgramError("the ranks are running already; a world runs one function at a time")
        num_ranks = len(self._rank_locks)
        self._work = inherit_torch_context(work)
        self._failure = self._first_error = None
        self._states[:] = [ThreadState.RUNNABLE] * num_ranks
        self._started[:] = [False] * num_ranks
        caller_state = torch.default_generator.get_state()
        self._generators[:] = [caller_state if state is None else state for state in self._generators]
        try:
            self._rank_locks[0].release()
            self._wait_for_ranks()
        finally:
            torch.default_generator.set_state(caller_state)
        self._raise_first_error()

    def _raise_first_error(self) -> None:
        if self._first_error is not None:
            rank, error = self._first_error
            self._first_error = None
            error.add_note(f"raised by rank {rank} of {len(self._rank_locks)}; the others were stopped")
            raise error

    def _wait_for_ranks(self) -> None:
        """Wait until all ranks have ended, also if the caller is interrupted during the wait.

        Deadlocks are detected by the ranks themselves and a computing rank may take long, so at the timeout only the
        liveness of the threads is checked.
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
        gone = [str(rank) for rank, thread in enumerate(self._threads) if not thread.is_alive()]
        if gone:
            raise PeerError(
                f"the thread of rank {', '.join(gone)} has ended in the middle of its run while the others wait for "
                "it; create the ranks again"
            )

    def wait(self, rank: int, is_done: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Run other ranks until ``is_done()``; raise a PeerError if another rank fails or no rank is runnable.

        Args:
            rank: the waiting rank, which is the running one.
            is_done: whether the rank can continue.
            describe: what it waits for, such as "act1.0 from rank 1", for the deadlock error.
        """
        self.raise_if_failed()
        if is_done():
            return
        self._states[rank] = BlockedOn(is_done, describe)
        self._switch_from(rank)
        self._states[rank] = ThreadState.RUNNABLE
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise the error of the first rank that failed, if any has.

        Raises:
            PeerError: a rank has failed; the text says why.
        """
        if self._failure is not None:
            raise PeerError(self._failure)

    def fail(self, rank: int, reason: str) -> None:
        """Make the other ranks raise at their next wait; ranks that have not started do not run."""
        if self._failure is None:
            self._failure = f"stopped because of rank {rank}: {reason}"
        for other, begun in enumerate(self._started):
            if not begun:
                self._states[other] = ThreadState.IDLE

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._is_closed = True
        for lock, thread in zip(self._rank_locks, self._threads, strict=True):
            if thread.is_alive():
                lock.release()
                thread.join(self._timeout_s)

    def _run_thread(self, rank: int) -> None:
        """Run each piece of work when the rank's lock is released; exit when released without work."""
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
            next_rank = self._next_runnable(rank)
            (self._caller_lock if next_rank is None else self._rank_locks[next_rank]).release()

    def _record_error(self, rank: int, error: BaseException) -> None:
        if self._first_error is None:
            self._first_error = (rank, error)
        self.fail(rank, f"{type(error).__name__}: {error}")

    def _switch_from(self, rank: int) -> None:
        """Run other ranks until this rank is scheduled again."""
        next_rank = self._next_runnable(rank)
        if next_rank is None or next_rank == rank:
            return
        self._generators[rank] = torch.default_generator.get_state()
        self._rank_locks[next_rank].release()
        self._rank_locks[rank].acquire()
        self._restore_rng(rank)

    def _restore_rng(self, rank: int) -> None:
        state = self._generators[rank]
        if state is not None:
            torch.default_generator.set_state(state)

    def _next_runnable(self, rank: int) -> int | None:
        """Return the next runnable rank after this one, round-robin; None if all have ended."""
        num_ranks = len(self._rank_locks)
        round_robin = [(rank + step) % num_ranks for step in range(1, num_ranks + 1)]
        for other in round_robin:
            state = self._states[other]
            if state is ThreadState.RUNNABLE or (
                isinstance(state, BlockedOn) and (self._failure is not None or state.is_done())
            ):
                return other
        waiting = [other for other in round_robin if isinstance(self._states[other], BlockedOn)]
        if not waiting:
            return None
        self._failure = self._describe_deadlock()
        return waiting[0]

    def _describe_deadlock(self) -> str:
        waits = [(rank, state) for rank, state in enumerate(self._states) if isinstance(state, BlockedOn)]
        ended = [str(rank) for rank, state in enumerate(self._states) if state is ThreadState.IDLE]
        return (
            "deadlock: "
            + "; ".join(f"rank {rank} waits for {wait.describe()}" for rank, wait in waits)
            + (f"; rank {', '.join(ended)} has ended" if ended else "")
            + "; a wait can end only if another rank can still run: compare the order of sends, receives and "
            "collectives"
        )


def inherit_torch_context(work: Callable[[int], None]) -> Callable[[int], None]:
    """Return a function that runs the work under this thread's gradient mode, autocast, function modes and contextvars.

    All of them are thread-local.
    """
    context = copy_context()
    grad_mode = torch.is_grad_enabled()
    function_modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    casts = [(device, torch.get_autocast_dtype(device)) for device in DEVICES if torch.is_autocast_enabled(device)]

    def run(rank: int) -> None:
        with torch.set_grad_enabled(grad_mode), ExitStack() as stack:
            for device, dtype in casts:
                stack.enter_context(torch.autocast(device, dtype))
            for mode in function_modes:
                stack.enter_context(mode)
            context.copy().run(work, rank)

    return run


def acquired_lock() -> threading.Lock:
    """Return a lock in the acquired state."""
    lock = threading.Lock()
    lock.acquire()
    return lock
