"""Point-to-point messages of ranks of one host: frames, as bytes in a shared memory pipe per pair of ranks."""

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

MAX_RECEIVED_BYTES = 256 << 20  # of messages received while this rank waited for something else
FRAME_REST_WAIT_NS = 1_000_000  # wait for the rest of a frame that has started to arrive

PollUntil: TypeAlias = Callable[[Callable[[], int]], int]


class IncomingMessage:
    """The partially received frame of one peer; read by one thread at a time."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._begin()

    def _begin(self) -> None:
        self._raw = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._num_read = 0
        self._is_header = True

    @property
    def has_started(self) -> bool:
        """Whether a part of it has been received."""
        return self._num_read > 0

    def read(self, call: Callable[[int, int], int]) -> int:
        """Read more; return the number of bytes, or the status of ``call(address, num_bytes)``."""
        moved = call(self._raw.data_ptr() + self._num_read, len(self._raw) - self._num_read)
        self._num_read += max(moved, 0)
        if self._is_header and self._num_read == HEADER_BYTES:
            whole = torch.empty(read_header(self._raw).frame_bytes, dtype=torch.uint8)
            whole[:HEADER_BYTES] = self._raw
            self._raw, self._is_header = whole, False
        return moved

    def pop(self) -> Tensor | None:
        """Return the frame's bytes and start the next one; None if it is incomplete."""
        if self._is_header or self._num_read < len(self._raw):
            return None
        whole = self._raw
        self._begin()
        return whole


class ShmP2P:
    """The messages of one rank.

    A rank that waits for space in a pipe, a message or a collective receives incoming messages during the wait. So
    two ranks may send each other more than a pipe holds before they receive, and no sender waits for a rank that waits
    for another.

    Args:
        library: the native library.
        host: handle of the host context.
        local_ranks: the ranks of this host; the library uses indices into it.
        sequencer: of the own rank.
    """

    def __init__(self, library: CDLL, host: int, local_ranks: Group, sequencer: MessageSequencer) -> None:
        self._library = library
        self._host = host
        self._indices = {rank: index for index, rank in enumerate(local_ranks)}
        self._sequencer = sequencer
        self._incoming = {rank: IncomingMessage() for rank in local_ranks}
        self._received: dict[int, deque[Frame]] = {rank: deque() for rank in local_ranks}

    def send(self, peer: int, label: str, tensors: Sequence[Tensor], poll_until: PollUntil) -> None:
        """Write the frame to the peer's pipe."""
        for part in encode_parts(self._sequencer.next_header(peer, label, tensors), label, tensors):
            self._write(part, peer, poll_until)

    def _write(self, raw: Tensor, peer: int, poll_until: PollUntil) -> None:
        num_written, size, address, index = 0, len(raw), raw.data_ptr(), self._indices[peer]

        def write_some() -> int:
            can_receive = self._received_bytes < MAX_RECEIVED_BYTES
            moved = int(
                self._library.cp_send(self._host, index, address + num_written, size - num_written, int(can_receive))
            )
            if moved == 0 and can_receive:
                self.drain_incoming()
            return NativeStatus.NOT_YET if moved == 0 else moved

        while num_written < size:  # the timeout starts again whenever bytes have moved
            num_written += poll_until(write_some)

    @property
    def _received_bytes(self) -> int:
        """Memory of received messages."""
        return sum(frame_bytes(frame) for received in self._received.values() for frame in list(received))

    def recv(self, peer: int, poll_until: PollUntil) -> Frame:
        """Return the peer's next message.

        Raises:
            PeerError: it is damaged, of another job, or out of sequence.
        """
        while not self._received[peer]:
            poll_until(lambda: self._read(peer, SLICE_NS))
        return self._received[peer].popleft()

    def recv_any(self, peers: Sequence[int], poll_until: PollUntil) -> tuple[int, Frame]:
        """Return one of the peers and its next message."""
        sender = poll_until(lambda: self.wait_any(peers, SLICE_NS))
        return sender, self.recv(sender, poll_until)

    def wait_any(self, peers: Sequence[int], slice_ns: int) -> int:
        """Return a peer that has sent something, or a status of the library if none has within ``slice_ns``."""
        peer_with_message = next((peer for peer in peers if self._received[peer]), None)
        if peer_with_message is not None:
            return peer_with_message
        indices = int_array(tuple(self._indices[peer] for peer in peers))
        index = int(self._library.cp_await_any(self._host, indices, len(peers), slice_ns))
        return peers[index] if index >= 0 else index

    def _read(self, peer: int, slice_ns: int) -> int:
        """Read from the peer's pipe for at most ``slice_ns``; keep a complete, verified frame."""
        incoming = self._incoming[peer]
        with incoming.lock:
            if self._received[peer]:
                return 0
            return self._read_on(peer, incoming, slice_ns)

    def _read_on(self, peer: int, incoming: IncomingMessage, slice_ns: int) -> int:
        index = self._indices[peer]
        moved = incoming.read(lambda to, size: int(self._library.cp_recv(self._host, index, to, size, slice_ns)))
        raw = incoming.pop()
        if raw is not None:
            frame = decode(raw)
            self._sequencer.verify(peer, frame)
            self._received[peer].append(frame)
        return NativeStatus.NOT_YET if moved == 0 else moved

    def drain_incoming(self) -> None:
        """Receive what is in the pipes to this rank, except those that another thread is reading."""
        for peer, incoming in self._incoming.items():
            if self._received_bytes < MAX_RECEIVED_BYTES and incoming.lock.acquire(blocking=False):
                try:
                    while self._read_on(peer, incoming, FRAME_REST_WAIT_NS if incoming.has_started else 0) > 0:
                        pass
                finally:
                    incoming.lock.release()


def frame_bytes(frame: Frame) -> int:
    """Return the memory of the frame's tensors."""
    return sum(tensor.nbytes for tensor in frame.tensors)
