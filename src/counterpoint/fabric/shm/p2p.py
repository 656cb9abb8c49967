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
from counterpoint.fabric.frames import HEADER_BYTES, Frame, MessageSequencer, decode, encode_parts, read_header
from counterpoint.fabric.shm.memory import int_array
from counterpoint.fabric.shm.native import SLICE_NS, NativeStatus

MAX_RECEIVED_BYTES = 256 << 20  # of messages that have been taken out of the pipes while this rank was waiting
FRAME_REST_WAIT_NS = 1_000_000  # so long is the rest of a message waited for that has begun to come

PollUntil: TypeAlias = Callable[[Callable[[], int]], int]


class IncomingMessage:
    """The message that is coming from one peer, as far as it has come; one thread reads it at a time."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._begin()

    def _begin(self) -> None:
        self._raw = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._num_read = 0
        self._is_header = True

    @property
    def has_started(self) -> bool:
        """Whether a part of it is here."""
        return self._num_read > 0

    def read(self, call: Callable[[int, int], int]) -> int:
        """Read on; return how many bytes have come, or the status of ``call(address, num_bytes)``."""
        moved = call(self._raw.data_ptr() + self._num_read, len(self._raw) - self._num_read)
        self._num_read += max(moved, 0)
        if self._is_header and self._num_read == HEADER_BYTES:
            whole = torch.empty(read_header(self._raw).frame_bytes, dtype=torch.uint8)
            whole[:HEADER_BYTES] = self._raw
            self._raw, self._is_header = whole, False
        return moved

    def pop(self) -> Tensor | None:
        """Return the whole frame, and begin the next; None where it has not all come."""
        if self._is_header or self._num_read < len(self._raw):
            return None
        whole = self._raw
        self._begin()
        return whole


class ShmP2P:
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

    def __init__(self, library: CDLL, world: int, local_ranks: Group, sequencer: MessageSequencer) -> None:
        self._library = library
        self._world = world
        self._places = {rank: place for place, rank in enumerate(local_ranks)}
        self._sequencer = sequencer
        self._incoming = {rank: IncomingMessage() for rank in local_ranks}
        self._received: dict[int, deque[Frame]] = {rank: deque() for rank in local_ranks}

    def send(self, peer: int, label: str, tensors: Sequence[Tensor], poll_until: PollUntil) -> None:
        """The tensors are in the pipe, but for what the peer has taken out already."""
        for piece in encode_parts(self._sequencer.next_header(peer, label, tensors), label, tensors):
            self._write(piece, peer, poll_until)

    def _write(self, raw: Tensor, peer: int, poll_until: PollUntil) -> None:
        done, size, address, place = 0, len(raw), raw.data_ptr(), self._places[peer]

        def go() -> int:
            listens = self._received_bytes < MAX_RECEIVED_BYTES
            moved = int(self._library.cp_send(self._world, place, address + done, size - done, int(listens)))
            if moved == 0 and listens:
                self.drain_incoming()
            return NativeStatus.NOT_YET if moved == 0 else moved

        while done < size:  # the deadline begins anew whenever some bytes have moved
            done += poll_until(go)

    @property
    def _received_bytes(self) -> int:
        """How much memory is kept, by any thread."""
        return sum(frame_bytes(frame) for kept in self._received.values() for frame in list(kept))

    def recv(self, peer: int, poll_until: PollUntil) -> Frame:
        """Return the peer's next message.

        Raises:
            PeerError: it is damaged, of another job, or one before it is lost.
        """
        while not self._received[peer]:
            poll_until(lambda: self._read(peer, SLICE_NS))
        return self._received[peer].popleft()

    def recv_any(self, peers: Sequence[int], poll_until: PollUntil) -> tuple[int, Frame]:
        """Return one of the peers and its next message."""
        sender = poll_until(lambda: self.wait_any(peers, SLICE_NS))
        return sender, self.recv(sender, poll_until)

    def wait_any(self, peers: Sequence[int], slice_ns: int) -> int:
        """Return which peer has sent what can be received, or a status of the library where none has within so long."""
        kept = next((peer for peer in peers if self._received[peer]), None)
        if kept is not None:
            return kept
        listed = int_array(tuple(self._places[peer] for peer in peers))
        index = int(self._library.cp_await_any(self._world, listed, len(peers), slice_ns))
        return peers[index] if index >= 0 else index

    def _read(self, peer: int, slice_ns: int) -> int:
        """Read on from the peer's pipe within the slice; a frame that has come is kept, its bytes are verified."""
        arrival = self._incoming[peer]
        with arrival.lock:
            if self._received[peer]:
                return 0
            return self._read_on(peer, arrival, slice_ns)

    def _read_on(self, peer: int, incoming: IncomingMessage, slice_ns: int) -> int:
        place = self._places[peer]
        moved = incoming.read(lambda to, size: int(self._library.cp_recv(self._world, place, to, size, slice_ns)))
        raw = incoming.pop()
        if raw is not None:
            frame = decode(raw)
            self._sequencer.verify(peer, frame)
            self._received[peer].append(frame)
        return NativeStatus.NOT_YET if moved == 0 else moved

    def drain_incoming(self) -> None:
        """What lies in the pipes to this rank is kept here, but for those that another thread is reading."""
        for peer, arrival in self._incoming.items():
            if self._received_bytes < MAX_RECEIVED_BYTES and arrival.lock.acquire(blocking=False):
                try:
                    while self._read_on(peer, arrival, FRAME_REST_WAIT_NS if arrival.has_started else 0) > 0:
                        pass
                finally:
                    arrival.lock.release()


def frame_bytes(frame: Frame) -> int:
    """Return how much memory its tensors take."""
    return sum(tensor.nbytes for tensor in frame.tensors)
