"""Messages between two ranks on gloo: one piece of fixed length that says how long the rest is, then the rest."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from counterpoint.fabric.frames import Frame, decode, encode, read_prefix
from counterpoint.fabric.gloo import Gloo, GlooWork
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


class Mail:
    """The messages of one rank.

    All methods raise RuntimeError where a connection is broken or a wait has expired: gloo does not tell them apart.
    """

    def __init__(self, rank: int, job: int, generation: int, gloo: Gloo) -> None:
        self._stamps = Stamps(rank, job, generation)
        self._gloo = gloo
        self._flying: defaultdict[int, deque[Flight]] = defaultdict(deque)
        self._kept: defaultdict[int, deque[Frame]] = defaultdict(deque)

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
        if self._kept[peer]:
            return self._kept[peer].popleft()
        first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
        self._gloo.recv([first], peer, FIRST).wait(timedelta(seconds=deadline_s))
        return self._complete(peer, first, deadline_s)

    def recv_any(self, peers: Sequence[int], deadline_s: float) -> tuple[int, Frame]:
        """Return one of the peers and its next message, as :meth:`recv`; messages of others are kept for later."""
        while True:
            for peer in peers:
                if self._kept[peer]:
                    return peer, self._kept[peer].popleft()
            first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
            work = self._gloo.recv_anysource([first], FIRST)
            work.wait(timedelta(seconds=deadline_s))
            sender = work._source_rank()  # noqa: SLF001 - its public twin is deprecated
            self._kept[sender].append(self._complete(sender, first, deadline_s))

    def flush(self, deadline_s: float) -> None:
        """All that was sent has left this rank."""
        for flights in self._flying.values():
            while flights:
                self._land(flights, deadline_s)

    @property
    def is_quiet(self) -> bool:
        """Nothing is under way."""
        return not any(self._flying.values())

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
