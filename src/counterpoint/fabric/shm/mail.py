"""Messages between two ranks of one host: a frame's bytes in order, through a pipe in shared memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from ctypes import CDLL
from threading import Lock
from typing import TypeAlias

import torch
from torch import Tensor

from counterpoint.fabric.fabric import Group
from counterpoint.fabric.frames import PREFIX_BYTES, Frame, decode, pieces_of, read_prefix
from counterpoint.fabric.shm.memory import int_array
from counterpoint.fabric.shm.native import SLICE_NS, Status
from counterpoint.fabric.stamps import Stamps

MAX_KEPT_BYTES = 256 << 20  # of messages that have been taken out of the pipes while this rank was waiting
REST_NS = 1_000_000  # so long is the rest of a message waited for that has begun to come

Pump: TypeAlias = Callable[[Callable[[], int]], int]


class Arrival:
    """The message that is coming from one peer, as far as it has come; one thread reads it at a time."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._begin()

    def _begin(self) -> None:
        self._raw = torch.empty(PREFIX_BYTES, dtype=torch.uint8)
        self._num_read = 0
        self._is_prefix = True

    @property
    def has_begun(self) -> bool:
        """Whether a part of it is here."""
        return self._num_read > 0

    def read(self, call: Callable[[int, int], int]) -> int:
        """Read on; return how many bytes have come, or the status of ``call(address, num_bytes)``."""
        moved = call(self._raw.data_ptr() + self._num_read, len(self._raw) - self._num_read)
        self._num_read += max(moved, 0)
        if self._is_prefix and self._num_read == PREFIX_BYTES:
            whole = torch.empty(read_prefix(self._raw).frame_bytes, dtype=torch.uint8)
            whole[:PREFIX_BYTES] = self._raw
            self._raw, self._is_prefix = whole, False
        return moved

    def taken(self) -> Tensor | None:
        """Return the whole frame, and begin the next; None where it has not all come."""
        if self._is_prefix or self._num_read < len(self._raw):
            return None
        whole = self._raw
        self._begin()
        return whole


class ShmMail:
    """The messages of one rank.

    A rank that waits, for room in a pipe, a message or a collective, takes out what others have sent to it meanwhile:
    so two ranks may send each other more than a pipe holds, and receive afterwards, and nobody who sends waits for one
    that waits for somebody else.

    Args:
        library: the native part.
        world: its handle.
        here: the ranks of this host; the library counts them from 0.
        stamps: of the own rank.
    """

    def __init__(self, library: CDLL, world: int, here: Group, stamps: Stamps) -> None:
        self._library = library
        self._world = world
        self._places = {rank: place for place, rank in enumerate(here)}
        self._stamps = stamps
        self._arrivals = {rank: Arrival() for rank in here}
        self._kept: dict[int, deque[Frame]] = {rank: deque() for rank in here}

    def send(self, peer: int, label: str, tensors: Sequence[Tensor], pump: Pump) -> None:
        """The tensors are in the pipe, but for what the peer has taken out already."""
        for piece in pieces_of(self._stamps.following(peer, label, tensors), label, tensors):
            self._write(piece, peer, pump)

    def _write(self, raw: Tensor, peer: int, pump: Pump) -> None:
        done, size, address, place = 0, len(raw), raw.data_ptr(), self._places[peer]

        def go() -> int:
            listens = self._kept_bytes < MAX_KEPT_BYTES
            moved = int(self._library.cp_send(self._world, place, address + done, size - done, int(listens)))
            if moved == 0 and listens:
                self.take_in()
            return Status.NOT_YET if moved == 0 else moved

        while done < size:  # the deadline begins anew whenever some bytes have moved
            done += pump(go)

    @property
    def _kept_bytes(self) -> int:
        """How much memory is kept, by any thread."""
        return sum(bytes_of(frame) for kept in self._kept.values() for frame in list(kept))

    def recv(self, peer: int, pump: Pump) -> Frame:
        """Return the peer's next message.

        Raises:
            PeerError: it is damaged, of another job, or one before it is lost.
        """
        while not self._kept[peer]:
            pump(lambda: self._read(peer, SLICE_NS))
        return self._kept[peer].popleft()

    def recv_any(self, peers: Sequence[int], pump: Pump) -> tuple[int, Frame]:
        """Return one of the peers and its next message."""
        sender = pump(lambda: self.await_any(peers, SLICE_NS))
        return sender, self.recv(sender, pump)

    def await_any(self, peers: Sequence[int], slice_ns: int) -> int:
        """Return which peer has sent what can be received, or a status of the library where none has within so long."""
        kept = next((peer for peer in peers if self._kept[peer]), None)
        if kept is not None:
            return kept
        listed = int_array(tuple(self._places[peer] for peer in peers))
        index = int(self._library.cp_await_any(self._world, listed, len(peers), slice_ns))
        return peers[index] if index >= 0 else index

    def _read(self, peer: int, slice_ns: int) -> int:
        """Read on from the peer's pipe within the slice; a frame that has come is kept, its bytes are verified."""
        arrival = self._arrivals[peer]
        with arrival.lock:
            if self._kept[peer]:
                return 0
            return self._read_on(peer, arrival, slice_ns)

    def _read_on(self, peer: int, arrival: Arrival, slice_ns: int) -> int:
        place = self._places[peer]
        moved = arrival.read(lambda to, size: int(self._library.cp_recv(self._world, place, to, size, slice_ns)))
        raw = arrival.taken()
        if raw is not None:
            frame = decode(raw)
            self._stamps.verify(peer, frame)
            self._kept[peer].append(frame)
        return Status.NOT_YET if moved == 0 else moved

    def take_in(self) -> None:
        """What lies in the pipes to this rank is kept here, but for those that another thread is reading."""
        for peer, arrival in self._arrivals.items():
            if self._kept_bytes < MAX_KEPT_BYTES and arrival.lock.acquire(blocking=False):
                try:
                    while self._read_on(peer, arrival, REST_NS if arrival.has_begun else 0) > 0:
                        pass
                finally:
                    arrival.lock.release()


def bytes_of(frame: Frame) -> int:
    """Return how much memory its tensors take."""
    return sum(tensor.nbytes for tensor in frame.tensors)
