"""What transports between processes have in common: a wait ends well, or as an error that says who waits for whom."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from counterpoint.errors import PeerError
from counterpoint.fabric.fabric import Fabric
from counterpoint.fabric.fingerprint import format_ranks

REASON_WAIT_S = 0.5  # so long a rank that has lost a connection waits for one that knows why
EXIT_WAIT_S = 0.3  # where all can tell: a process closes its connections a moment before it has ended
POLL_S = 0.02


class ProcessFabric(Fabric, ABC):
    """One rank among processes.

    Args:
        rank: the own rank.
        num_ranks: how many there are.
        deadline_s: the longest that any wait may last.
    """

    def __init__(self, rank: int, num_ranks: int, timeout_s: float) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self.failure: str | None = None
        self.is_subfabric = False  # of a fabric with several ways, on some of which ranks may know more
        self.linked_fabrics: tuple[ProcessFabric, ...] = ()  # other ways of this rank, which fail where this one does
        self.while_waiting: AbstractContextManager[None] = nullcontext()  # around every wait

    @abstractmethod
    def broadcast_abort(self, reason: str) -> None:
        """The other ranks learn why this one cannot go on."""

    @abstractmethod
    def describe_error(self, error: Exception) -> str:
        """Say why a wait has failed, other than that its deadline has passed."""

    @contextmanager
    def translate_errors(self, what: str, peers: Sequence[int]) -> Iterator[None]:
        """Whatever goes wrong inside is a PeerError that says who waited for what, and for whom.

        Raises:
            PeerError: it has gone wrong, or had before.
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
            waited_s = time.monotonic() - began
            story = f"rank {self.rank} waited {waited_s:.1f} s for {what} with {format_ranks(peers)}"
            raise self.fail(f"{story}: {self._find_cause(error, waited_s)}") from error

    def _find_cause(self, error: Exception, waited_s: float) -> str:
        stopped = self.abort_reason_anywhere()
        if stopped is not None:
            return f"stopped because of {stopped}"
        if isinstance(error, TimeoutError) or waited_s >= 0.99 * self.timeout_s:
            return (
                f"the deadline of {self.timeout_s:.1f} s has passed; every member must come within it: look at what "
                "the others did instead, or raise the deadline where they are only slow"
            )
        end = time.monotonic() + (REASON_WAIT_S if self.is_subfabric else EXIT_WAIT_S)
        while True:
            ended = next(filter(None, (way.exited_peer() for way in (self, *self.linked_fabrics))), None)
            if ended is not None:
                return ended
            stopped = self.abort_reason_anywhere()
            if stopped is not None:
                return f"stopped because of {stopped}"
            if time.monotonic() >= end:
                return self.describe_error(error)
            time.sleep(POLL_S)

    def abort_reason_anywhere(self) -> str | None:
        """Return what :meth:`stopped` says on this or another way of this rank."""
        return next(filter(None, (way.abort_reason() for way in (self, *self.linked_fabrics))), None)

    def exited_peer(self) -> str | None:
        """Say which rank has ended, where this way can tell; None otherwise."""
        return None

    @abstractmethod
    def abort_reason(self) -> str | None:
        """Return "rank 2: why it stopped" of the first rank that said so, if it was another; None otherwise."""

    def fail(self, text: str) -> PeerError:
        """Return the error; the other ranks can read it."""
        for way in (self, *self.linked_fabrics):
            way.failure = way.failure or text
            way.broadcast_abort(text)
        self.failure = text
        return PeerError(text)

    def peers_of(self, group: Sequence[int]) -> list[int]:
        """Return the members but for this rank."""
        return [member for member in group if member != self.rank]
