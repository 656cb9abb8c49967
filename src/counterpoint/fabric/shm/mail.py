"""Messages between two ranks of one host: a frame's bytes in order, through a pipe in shared memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from ctypes import CDLL
from typing import TypeAlias

import torch
from torch import Tensor

from counterpoint.errors import PeerError
from counterpoint.fabric.fingerprint import message_fingerprint
from counterpoint.fabric.frames import PREFIX_BYTES, Frame, Kind, Stamp, decode, encode, read_prefix
from counterpoint.fabric.shm.memory import int_array
from counterpoint.fabric.shm.native import Status

Pump: TypeAlias = Callable[[Callable[[], int]], int]


class ShmMail:
    """The messages of one rank.

    Args:
        library: the native part.
        world: its handle.
        rank: the own rank.
        job: the job's number.
        generation: of its ranks.
    """

    def __init__(self, library: CDLL, world: int, rank: int, job: int, generation: int) -> None:
        self._library = library
        self._world = world
        self._rank = rank
        self._job = job
        self._generation = generation
        self._num_sent: defaultdict[int, int] = defaultdict(int)
        self._num_received: defaultdict[int, int] = defaultdict(int)

    def send(self, peer: int, label: str, tensors: Sequence[Tensor], pump: Pump) -> None:
        """The tensors are in the pipe, but for what the peer has taken out already."""
        print_ = message_fingerprint(label, tensors)
        stamp = Stamp(Kind.MESSAGE, self._job, self._generation, self._rank, self._num_sent[peer], print_)
        self._num_sent[peer] += 1
        self._move(self._library.cp_send, peer, encode(stamp, label, tensors), pump)

    def recv(self, peer: int, pump: Pump) -> Frame:
        """Return the peer's next message.

        Raises:
            PeerError: it is damaged, of another job, or one before it is lost.
        """
        first = torch.empty(PREFIX_BYTES, dtype=torch.uint8)
        self._move(self._library.cp_recv, peer, first, pump)
        whole = torch.empty(read_prefix(first).frame_bytes, dtype=torch.uint8)
        whole[:PREFIX_BYTES] = first
        self._move(self._library.cp_recv, peer, whole[PREFIX_BYTES:], pump)
        frame = decode(whole)
        expected = Stamp(
            Kind.MESSAGE, self._job, self._generation, peer, self._num_received[peer],
            message_fingerprint(frame.label, frame.tensors),
        )  # fmt: skip
        if frame.stamp != expected:
            raise PeerError(
                f"rank {self._rank} received {frame.stamp} for {frame.label} where {expected} should have come from "
                f"rank {peer}; messages come complete and in order, from ranks of one job"
            )
        self._num_received[peer] += 1
        return frame

    def recv_any(self, peers: Sequence[int], pump: Pump) -> tuple[int, Frame]:
        """Return one of the peers and its next message."""
        listed = int_array(tuple(peers))
        index = pump(lambda: int(self._library.cp_await_any(self._world, listed, len(peers))))
        return peers[index], self.recv(peers[index], pump)

    def _move(self, call: Callable[..., int], peer: int, raw: Tensor, pump: Pump) -> None:
        """All bytes have been put into the pipe, or come out of it; the deadline begins anew whenever some have."""
        done, size, address = 0, len(raw), raw.data_ptr()

        def go() -> int:
            moved = int(call(self._world, peer, address + done, size - done))
            return Status.NOT_YET if moved == 0 else moved

        while done < size:
            done += pump(go)
