"""Messages between two ranks on gloo: one piece of fixed length that says how long the rest is, then the rest."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Thread

import torch
from torch import Tensor

from counterpoint.fabric.c10d import GLOO_TIMEOUT, GlooProcessGroup, GlooWork
from counterpoint.fabric.frames import Frame, MessageSequencer, decode, encode, read_header

FIRST_TAG, REST_TAG = 1, 2  # gloo's tags for the two pieces
FIRST_BYTES = 1024
MAX_PENDING = 64  # messages per peer that have been sent and not been seen to arrive
MAX_PENDING_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class PendingSend:
    """A message under way, whose bytes must live until it has arrived."""

    parts: list[Tensor]
    works: list[GlooWork]

    @property
    def num_bytes(self) -> int:
        """Memory it keeps."""
        return sum(map(len, self.parts))


class AnySourceReceive:
    """A receive from whoever sends first, held by a thread: gloo can neither be asked whether one is over nor end it.

    Args:
        gloo: the connection; no other receive of first pieces may be started on it until this one is over.
    """

    def __init__(self, gloo: GlooProcessGroup) -> None:
        self._first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
        self._work = gloo.recv_anysource([self._first], FIRST_TAG)
        self._error: RuntimeError | None = None
        self._done = Event()
        Thread(target=self._wait, name="catch", daemon=True).start()

    def is_done(self, seconds: float) -> bool:
        """Whether it is over, or has come to be within so long."""
        return self._done.wait(seconds)

    def result(self) -> tuple[int, Tensor]:
        """Return the sender and the first piece, once it is over; a RuntimeError where the connection has ended."""
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        return self._work._source_rank(), self._first  # noqa: SLF001 - its public twin is deprecated

    def _wait(self) -> None:
        try:
            self._work.wait(GLOO_TIMEOUT)
        except RuntimeError as error:
            self._error = error
        self._done.set()


class GlooP2P:
    """The messages of one rank.

    All methods raise RuntimeError where a connection is broken or a wait has expired: gloo does not tell them apart.
    """

    def __init__(self, rank: int, job: int, generation: int, gloo: GlooProcessGroup) -> None:
        self._sequencer = MessageSequencer(rank, job, generation)
        self._gloo = gloo
        self._pending: defaultdict[int, deque[PendingSend]] = defaultdict(deque)
        self._received: defaultdict[int, deque[Frame]] = defaultdict(deque)
        self._any_source: AnySourceReceive | None = None

    def send(self, peer: int, label: str, tensors: Sequence[Tensor], timeout_s: float) -> None:
        """A copy of the tensors is under way; where very much is already, the oldest has arrived first."""
        frame = encode(self._sequencer.next_header(peer, label, tensors), label, tensors)
        self._make_room(peer, len(frame), timeout_s)
        if len(frame) <= FIRST_BYTES:
            first = torch.zeros(FIRST_BYTES, dtype=torch.uint8)
            first[: len(frame)] = frame
            pieces = [first]
        else:
            pieces = [frame[:FIRST_BYTES], frame[FIRST_BYTES:]]
        works = [self._gloo.send([piece], peer, tag) for piece, tag in zip(pieces, (FIRST_TAG, REST_TAG), strict=False)]
        self._pending[peer].append(PendingSend(pieces, works))

    def recv(self, peer: int, timeout_s: float) -> Frame:
        """Return the peer's next message; a PeerError where it is damaged, of another job, or one before it is lost."""
        while self._any_source is not None and not self._received[peer]:
            self._store_any_source(timeout_s)
        if self._received[peer]:
            return self._received[peer].popleft()
        first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
        self._gloo.recv([first], peer, FIRST_TAG).wait(timedelta(seconds=timeout_s))
        return self._complete(peer, first, timeout_s)

    def recv_any(self, peers: Sequence[int], timeout_s: float) -> tuple[int, Frame]:
        """Return one of the peers and its next message, as :meth:`recv`; messages of others are kept for later."""
        while True:
            found = self._pop_received(peers)
            if found is not None:
                return found
            if self._any_source is not None:
                self._store_any_source(timeout_s)
                continue
            first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
            work = self._gloo.recv_anysource([first], FIRST_TAG)
            work.wait(timedelta(seconds=timeout_s))
            sender = work._source_rank()  # noqa: SLF001 - its public twin is deprecated
            self._received[sender].append(self._complete(sender, first, timeout_s))

    def try_recv_any(self, peers: Sequence[int], seconds: float, timeout_s: float) -> tuple[int, Frame] | None:
        """Return one of the peers and its next message, as :meth:`recv`; None where none has begun within so long."""
        found = self._pop_received(peers)
        if found is not None:
            return found
        self._any_source = self._any_source or AnySourceReceive(self._gloo)
        if self._any_source.is_done(seconds):
            self._store_any_source(timeout_s)
        return self._pop_received(peers)

    def _pop_received(self, peers: Sequence[int]) -> tuple[int, Frame] | None:
        return next(((peer, self._received[peer].popleft()) for peer in peers if self._received[peer]), None)

    def _store_any_source(self, timeout_s: float) -> None:
        """The message that a thread waits for is kept; a TimeoutError where it does not come."""
        if self._any_source is None or not self._any_source.is_done(timeout_s):
            raise TimeoutError
        sender, first = self._any_source.result()
        self._any_source = None
        self._received[sender].append(self._complete(sender, first, timeout_s))

    def flush(self, timeout_s: float) -> None:
        """All that was sent has left this rank."""
        for flights in self._pending.values():
            while flights:
                self._wait_oldest(flights, timeout_s)

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, and no thread waits for anything."""
        return self._any_source is None and not any(self._pending.values())

    def _make_room(self, peer: int, num_bytes: int, timeout_s: float) -> None:
        flights = self._pending[peer]
        while flights and (
            len(flights) >= MAX_PENDING or num_bytes + sum(f.num_bytes for f in flights) > MAX_PENDING_BYTES
        ):
            self._wait_oldest(flights, timeout_s)

    def _wait_oldest(self, pending: deque[PendingSend], timeout_s: float) -> None:
        for work in pending[0].works:
            work.wait(timedelta(seconds=timeout_s))
        pending.popleft()

    def _complete(self, peer: int, first: Tensor, timeout_s: float) -> Frame:
        """Return the message that begins with these bytes, verified.

        Raises:
            PeerError: it is damaged, or of another job, or one before it is lost.
        """
        num_bytes = read_header(first).frame_bytes
        if num_bytes <= FIRST_BYTES:
            whole = first[:num_bytes]
        else:
            whole = torch.empty(num_bytes, dtype=torch.uint8)
            whole[:FIRST_BYTES] = first
            self._gloo.recv([whole[FIRST_BYTES:]], peer, REST_TAG).wait(timedelta(seconds=timeout_s))
        frame = decode(whole)
        self._sequencer.verify(peer, frame)
        return frame
