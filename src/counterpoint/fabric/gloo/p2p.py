"""Point-to-point messages on gloo: a first part of fixed size, which contains the length of the rest, then the rest."""

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

FIRST_TAG, REST_TAG = 1, 2  # gloo's tags of the two parts
FIRST_BYTES = 1024
MAX_PENDING = 64  # messages per peer that were sent and not seen to complete
MAX_PENDING_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class PendingSend:
    """A message being sent; it keeps the buffers alive until gloo has sent them."""

    parts: list[Tensor]
    works: list[GlooWork]

    @property
    def num_bytes(self) -> int:
        """Memory that it keeps."""
        return sum(map(len, self.parts))


class AnySourceReceive:
    """A receive from any source, held by a thread, because gloo can neither poll such a receive nor cancel it.

    Args:
        gloo: the connection; no other receive of a first part may be started on it until this one is done.
    """

    def __init__(self, gloo: GlooProcessGroup) -> None:
        self._first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
        self._work = gloo.recv_anysource([self._first], FIRST_TAG)
        self._error: RuntimeError | None = None
        self._done = Event()
        Thread(target=self._wait, name="counterpoint any-source receive", daemon=True).start()

    def is_done(self, seconds: float) -> bool:
        """Wait at most ``seconds``; return whether the receive is done."""
        return self._done.wait(seconds)

    def result(self) -> tuple[int, Tensor]:
        """Return the sender and the first part, once done; raise RuntimeError if the connection failed."""
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        return self._work._source_rank(), self._first  # noqa: SLF001 - the public method is deprecated

    def _wait(self) -> None:
        try:
            self._work.wait(GLOO_TIMEOUT)
        except RuntimeError as error:
            self._error = error
        self._done.set()


class GlooP2P:
    """The messages of one rank.

    All methods raise RuntimeError for a broken connection and for an expired wait: gloo does not distinguish them.
    """

    def __init__(self, rank: int, job: int, generation: int, gloo: GlooProcessGroup) -> None:
        self._sequencer = MessageSequencer(rank, job, generation)
        self._gloo = gloo
        self._pending: defaultdict[int, deque[PendingSend]] = defaultdict(deque)
        self._received: defaultdict[int, deque[Frame]] = defaultdict(deque)
        self._any_source: AnySourceReceive | None = None

    def send(self, peer: int, label: str, tensors: Sequence[Tensor], timeout_s: float) -> None:
        """Start to send copies of the tensors; if too much is pending, wait for the oldest message first."""
        frame = encode(self._sequencer.next_header(peer, label, tensors), label, tensors)
        self._make_room(peer, len(frame), timeout_s)
        if len(frame) <= FIRST_BYTES:
            first = torch.zeros(FIRST_BYTES, dtype=torch.uint8)
            first[: len(frame)] = frame
            parts = [first]
        else:
            parts = [frame[:FIRST_BYTES], frame[FIRST_BYTES:]]
        works = [self._gloo.send([part], peer, tag) for part, tag in zip(parts, (FIRST_TAG, REST_TAG), strict=False)]
        self._pending[peer].append(PendingSend(parts, works))

    def recv(self, peer: int, timeout_s: float) -> Frame:
        """Return the peer's next message; raise a PeerError if it is damaged, of another job, or out of sequence."""
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
            received = self._pop_received(peers)
            if received is not None:
                return received
            if self._any_source is not None:
                self._store_any_source(timeout_s)
                continue
            first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
            work = self._gloo.recv_anysource([first], FIRST_TAG)
            work.wait(timedelta(seconds=timeout_s))
            sender = work._source_rank()  # noqa: SLF001 - the public method is deprecated
            self._received[sender].append(self._complete(sender, first, timeout_s))

    def try_recv_any(self, peers: Sequence[int], seconds: float, timeout_s: float) -> tuple[int, Frame] | None:
        """Return one of the peers and its next message, as :meth:`recv`; None if none arrives within ``seconds``."""
        received = self._pop_received(peers)
        if received is not None:
            return received
        self._any_source = self._any_source or AnySourceReceive(self._gloo)
        if self._any_source.is_done(seconds):
            self._store_any_source(timeout_s)
        return self._pop_received(peers)

    def _pop_received(self, peers: Sequence[int]) -> tuple[int, Frame] | None:
        return next(((peer, self._received[peer].popleft()) for peer in peers if self._received[peer]), None)

    def _store_any_source(self, timeout_s: float) -> None:
        """Keep the message that the receiving thread waits for; raise TimeoutError if it does not arrive."""
        if self._any_source is None or not self._any_source.is_done(timeout_s):
            raise TimeoutError
        sender, first = self._any_source.result()
        self._any_source = None
        self._received[sender].append(self._complete(sender, first, timeout_s))

    def flush(self, timeout_s: float) -> None:
        """Wait until everything sent has left this rank."""
        for pending in self._pending.values():
            while pending:
                self._wait_oldest(pending, timeout_s)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is pending, and no thread waits for a message."""
        return self._any_source is None and not any(self._pending.values())

    def _make_room(self, peer: int, num_bytes: int, timeout_s: float) -> None:
        pending = self._pending[peer]
        while pending and (
            len(pending) >= MAX_PENDING or num_bytes + sum(send.num_bytes for send in pending) > MAX_PENDING_BYTES
        ):
            self._wait_oldest(pending, timeout_s)

    def _wait_oldest(self, pending: deque[PendingSend], timeout_s: float) -> None:
        for work in pending[0].works:
            work.wait(timedelta(seconds=timeout_s))
        pending.popleft()

    def _complete(self, peer: int, first: Tensor, timeout_s: float) -> Frame:
        """Return the verified message that starts with these bytes.

        Raises:
            PeerError: it is damaged, of another job, or out of sequence.
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
