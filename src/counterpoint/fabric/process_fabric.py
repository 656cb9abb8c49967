"""Base class of transports between processes: a failed wait is an error that names the waiting and missing ranks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from counterpoint.errors import PeerError
from counterpoint.fabric.fabric import Fabric
from counterpoint.fabric.fingerprint import format_ranks
from counterpoint.fabric.peer_liveness import PeerProcesses
from counterpoint.terminal_text import escape_surrogates

REASON_WAIT_S = 0.5  # after a lost connection, wait this long for a rank that posts the reason
EXIT_WAIT_S = 0.3  # on one host: a process closes its connections a moment before the kernel reports its exit
POLL_S = 0.02


class ProcessFabric(Fabric, ABC):
    """One rank among processes.

    Attributes:
        failure: the error text, once a wait has failed; every later call raises it.
        is_subfabric: whether it is a part of a hierarchical fabric, whose other parts may know more about a failure.
        linked_fabrics: the other parts; they fail together.
        while_waiting: context manager that is entered around every wait.

    Args:
        rank: the own rank.
        num_ranks: the world size.
        timeout_s: the longest that any wait may last.
    """

    def __init__(self, rank: int, num_ranks: int, timeout_s: float) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self.failure: str | None = None
        self.is_subfabric = False
        self.linked_fabrics: tuple[ProcessFabric, ...] = ()
        self.while_waiting: AbstractContextManager[None] = nullcontext()
        self._processes = PeerProcesses([])

    def link_to(self, *fabrics: ProcessFabric) -> None:
        """Fail together with the other parts of a hierarchical fabric."""
        self.linked_fabrics = fabrics

    def become_subfabric(self, while_waiting: AbstractContextManager[None] | None = None) -> None:
        """Become a part of a hierarchical fabric; ``while_waiting`` is entered around every wait."""
        self.is_subfabric = True
        self.while_waiting = while_waiting or nullcontext()

    @abstractmethod
    def broadcast_abort(self, reason: str) -> None:
        """Let the other ranks know why this one cannot continue."""

    @abstractmethod
    def describe_error(self, error: Exception) -> str:
        """Return the cause of a failed wait that did not time out."""

    @contextmanager
    def translate_errors(self, what: str, peers: Sequence[int]) -> Iterator[None]:
        """Turn any error of the block into a PeerError that names the operation, the ranks, and the cause.

        Raises:
            PeerError: the block has failed, or the fabric had failed before.
        """
        if self.failure is not None:
            raise PeerError(self.failure)
        began = time.monotonic()
        try:
            with self.while_waiting:
                yield
        except PeerError as error:
            raise self.fail(str(error)) from error
        except (TimeoutError, RuntimeError) as error:
            if self.failure is not None:  # another thread has found why, and aborted the connections
                raise PeerError(self.failure) from error
            waited_s = time.monotonic() - began
            description = f"rank {self.rank} waited {waited_s:.1f} s for {what} with {format_ranks(peers)}"
            raise self.fail(f"{description}: {self._find_cause(error, waited_s)}") from error

    def _find_cause(self, error: Exception, waited_s: float) -> str:
        stopped = self.abort_reason_anywhere()
        if stopped is not None:
            return f"stopped because of {stopped}"
        if isinstance(error, TimeoutError) or waited_s >= 0.99 * self.timeout_s:
            return f"the timeout of {self.timeout_s:.1f} s has passed; " + (
                self._processes.describe_stopped()
                or "every member must arrive within it: check what the others did instead, or raise the timeout if "
                "they are only slow"
            )
        end = time.monotonic() + (REASON_WAIT_S if self.is_subfabric else EXIT_WAIT_S)
        while True:
            exited = next(filter(None, (fabric.exited_peer() for fabric in (self, *self.linked_fabrics))), None)
            if exited is not None:
                return exited
            stopped = self.abort_reason_anywhere()
            if stopped is not None:
                return f"stopped because of {stopped}"
            if time.monotonic() >= end:
                return self.describe_error(error)
            time.sleep(POLL_S)

    def abort_reason_anywhere(self) -> str | None:
        """Return :meth:`abort_reason` of this fabric or of a linked one."""
        return next(filter(None, (fabric.abort_reason() for fabric in (self, *self.linked_fabrics))), None)

    def exited_peer(self) -> str | None:
        """Return a text that names a rank whose process has ended; None if the transport knows of none."""
        return None

    def exited_rank(self) -> int | None:
        """Return a rank of this host whose process has ended; None if the transport knows of none."""
        return self._processes.exited_rank()

    def describe_stopped(self) -> str:
        """Return the error text for the first rank of this host that is stopped; empty if it knows of none."""
        return self._processes.describe_stopped()

    @abstractmethod
    def abort_reason(self) -> str | None:
        """Return "rank 2: reason" of the first rank that aborted, unless it is this one; None otherwise."""

    def fail(self, text: str) -> PeerError:
        """Mark the fabric as failed, broadcast the text, and return the error."""
        text = escape_surrogates(text)  # it may be that of a user's error
        for fabric in (self, *self.linked_fabrics):
            fabric.failure = fabric.failure or text
            fabric.broadcast_abort(text)
        self.failure = text
        return PeerError(text)

    def peers_of(self, group: Sequence[int]) -> list[int]:
        """Return the members except this rank."""
        return [member for member in group if member != self.rank]
