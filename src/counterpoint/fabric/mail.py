"""Messages between two ranks on gloo: one piece of fixed length that says how long the rest is, then the rest."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Thread

import torch
from torch import Tensor

from counterpoint.fabric.frames import Frame, decode, encode, read_prefix
from counterpoint.fabric.gloo import GLOO_TIMEOUT, Gloo, GlooWork
from counterpoint.fabric.stamps import Stamps

FIRST, REST = 1, 2  # gloo's tags for the two pieces
FIRST_BYTES = 1024
MAX_FLYING = 64  # messages per peer that have been sent and not been seen to arrive
MAX_FLYING_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Flight:
    """A message under way, whose bytes must live until it has arrived."""

    pieces: list[Tensor]
    works: list[GlooWork]

    @property
    def num_bytes(self) -> int:
        """Memory it keeps."""
        return sum(map(len, self.pieces))


class Catch:
    """A receive from whoever sends first, held by a thread: gloo can neither be asked whether one is over nor end it.

    Args:
        gloo: the connection; no other receive of first pieces may be started on it until this one is over.
    """

    def __init__(self, gloo: Gloo) -> None:
        self._first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
        self._work = gloo.recv_anysource([self._first], FIRST)
        self._error: RuntimeError | None = None
        self._over = Event()
        Thread(target=self._hold, name="catch", daemon=True).start()

    def is_over(self, seconds: float) -> bool:
        """Whether it is over, or has come to be within so long."""
        return self._over.wait(seconds)

    def taken(self) -> tuple[int, Tensor]:
        """Return the sender and the first piece, once it is over; a RuntimeError where the connection has ended."""
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        return self._work._source_rank(), self._first  # noqa: SLF001 - its public twin is deprecated

    def _hold(self) -> None:
        try:
            self._work.wait(GLOO_TIMEOUT)
        except RuntimeError as error:
            self._error = error
        self._over.set()


class Mail:
    """The messages of one rank.

    All methods raise RuntimeError where a connection is broken or a wait has expired: gloo does not tell them apart.
    """

    def __init__(self, rank: int, job: int, generation: int, gloo: Gloo) -> None:
        self._stamps = Stamps(rank, job, generation)
        self._gloo = gloo
        self._flying: defaultdict[int, deque[Flight]] = defaultdict(deque)
        self._kept: defaultdict[int, deque[Frame]] = defaultdict(deque)
        self._catch: Catch | None = None

    def send(self, peer: int, label: str, tensors: Sequence[Tensor], deadline_s: float) -> None:
        """A copy of the tensors is under way; where very much is already, the oldest has arrived first."""
        frame = encode(self._stamps.following(peer, label, tensors), label, tensors)
        self._make_room(peer, len(frame), deadline_s)
        if len(frame) <= FIRST_BYTES:
            first = torch.zeros(FIRST_BYTES, dtype=torch.uint8)
            first[: len(frame)] = frame
            pieces = [first]
        else:
            pieces = [frame[:FIRST_BYTES], frame[FIRST_BYTES:]]
        works = [self._gloo.send([piece], peer, tag) for piece, tag in zip(pieces, (FIRST, REST), strict=False)]
        self._flying[peer].append(Flight(pieces, works))

    def recv(self, peer: int, deadline_s: float) -> Frame:
        """Return the peer's next message; a PeerError where it is damaged, of another job, or one before it is lost."""
        while self._catch is not None and not self._kept[peer]:
            self._keep_caught(deadline_s)
        if self._kept[peer]:
            return self._kept[peer].popleft()
        first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
        self._gloo.recv([first], peer, FIRST).wait(timedelta(seconds=deadline_s))
        return self._complete(peer, first, deadline_s)

    def recv_any(self, peers: Sequence[int], deadline_s: float) -> tuple[int, Frame]:
        """Return one of the peers and its next message, as :meth:`recv`; messages of others are kept for later."""
        while True:
            found = self._kept_of(peers)
            if found is not None:
                return found
            if self._catch is not None:
                self._keep_caught(deadline_s)
                continue
            first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
            work = self._gloo.recv_anysource([first], FIRST)
            work.wait(timedelta(seconds=deadline_s))
            sender = work._source_rank()  # noqa: SLF001 - its public twin is deprecated
            self._kept[sender].append(self._complete(sender, first, deadline_s))

    def recv_soon(self, peers: Sequence[int], seconds: float, deadline_s: float) -> tuple[int, Frame] | None:
        """Return one of the peers and its next message, as :meth:`recv`; None where none has begun within so long."""
        found = self._kept_of(peers)
        if found is not None:
            return found
        self._catch = self._catch or Catch(self._gloo)
        if self._catch.is_over(seconds):
            self._keep_caught(deadline_s)
        return self._kept_of(peers)

    def _kept_of(self, peers: Sequence[int]) -> tuple[int, Frame] | None:
        return next(((peer, self._kept[peer].popleft()) for peer in peers if self._kept[peer]), None)

    def _keep_caught(self, deadline_s: float) -> None:
        """The message that a thread waits for is kept; a TimeoutError where it does not come."""
        if self._catch is None or not self._catch.is_over(deadline_s):
            raise TimeoutError
        sender, first = self._catch.taken()
        self._catch = None
        self._kept[sender].append(self._complete(sender, first, deadline_s))

    def flush(self, deadline_s: float) -> None:
        """All that was sent has left this rank."""
        for flights in self._flying.values():
            while flights:
                self._land(flights, deadline_s)

    @property
    def is_quiet(self) -> bool:
        """Nothing is under way, and no thread waits for anything."""
        return self._catch is None and not any(self._flying.values())

    def _make_room(self, peer: int, num_bytes: int, deadline_s: float) -> None:
        flights = self._flying[peer]
        while flights and (
            len(flights) >= MAX_FLYING or num_bytes + sum(f.num_bytes for f in flights) > MAX_FLYING_BYTES
        ):
            self._land(flights, deadline_s)

    def _land(self, flights: deque[Flight], deadline_s: float) -> None:
        for work in flights[0].works:
            work.wait(timedelta(seconds=deadline_s))
        flights.popleft()

    def _complete(self, peer: int, first: Tensor, deadline_s: float) -> Frame:
        """Return the message that begins with these bytes, verified.

        Raises:
            PeerError: it is damaged, or of another job, or one before it is lost.
        """
        num_bytes = read_prefix(first).frame_bytes
        if num_bytes <= FIRST_BYTES:
            whole = first[:num_bytes]
        else:
            whole = torch.empty(num_bytes, dtype=torch.uint8)
            whole[:FIRST_BYTES] = first
            self._gloo.recv([whole[FIRST_BYTES:]], peer, REST).wait(timedelta(seconds=deadline_s))
        frame = decode(whole)
        self._stamps.verify(peer, frame)
        return frame
