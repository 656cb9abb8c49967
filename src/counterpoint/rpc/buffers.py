"""Memory to receive into: large rooms are used again when nobody holds a tensor of them any more.

New memory costs about as much as what is received into it, because the kernel has to find and clear every page.

Tensors between processes of one host without a socket: the sender lays them down where the receiver can see them.

A shelf is a nameless file in memory that one side has made and lends, letter by letter, to the other. It is offered
first; from when the other side has found it, large letters are copied onto it and only told of on the connection. The
receiver's tensors are on the shelf; when nobody holds one of them any more, the shelf is given back. Whatever does not
work, such as no memory or a process that may not be looked at, leaves letters on the socket.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

import torch
from torch import Tensor

from counterpoint.errors import PeerError, ProtocolError
from counterpoint.fabric.frames import padded_size
from counterpoint.fabric.shm.segments import SegmentMapping, create_segment, map_file

LARGE_BYTES = 1 << 18
UNHELD_REFCOUNT = 3  # references to memory that no tensor holds: the list's, the one that asks, and the question's own


class ReceiveBuffer:
    """Memory for the body of one frame.

    Args:
        store: what holds it; tensors keep it alive.
        num_bytes: how much of it.
    """

    __slots__ = ("_store", "memory")

    def __init__(self, store: bytearray | mmap.mmap | ctypes.Array[ctypes.c_char], num_bytes: int) -> None:
        self._store = store
        self.memory = memoryview(store)[:num_bytes]

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], start: int) -> Tensor:
        """Return a tensor of the bytes from ``start`` on, in this memory."""
        num_bytes = prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(tuple(shape), dtype=dtype)
        flat = torch.frombuffer(self._store, dtype=torch.uint8, count=num_bytes, offset=start)
        return flat.view(dtype).view(tuple(shape))


class ReceiveBufferPool:
    """Gives rooms.

    Args:
        kept_bytes: how much of large ones is kept for later, held or not.
    """

    def __init__(self, kept_bytes: int = 1 << 28) -> None:
        self._kept_bytes = kept_bytes
        self._kept: list[mmap.mmap] = []

    def allocate(self, num_bytes: int) -> ReceiveBuffer:
        """Return a room of this size; what is in it is not defined.

        Raises:
            ProtocolError: there is no memory for it.
        """
        if num_bytes < LARGE_BYTES:
            return ReceiveBuffer(bytearray(num_bytes), num_bytes)
        for store in self._kept:
            if num_bytes <= len(store) <= 2 * num_bytes and sys.getrefcount(store) == UNHELD_REFCOUNT:
                self._kept.remove(store)
                self._kept.append(store)
                return ReceiveBuffer(store, num_bytes)
        try:
            store = mmap.mmap(-1, -(-num_bytes // LARGE_BYTES) * LARGE_BYTES)  # a little more may come next time
        except OSError as error:
            raise ProtocolError(
                f"a letter of {num_bytes} bytes came, for which there is no memory here ({error.strerror}); send it in "
                "parts, or give this process more"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            store.madvise(mmap.MADV_HUGEPAGE)
        self._keep(store)
        return ReceiveBuffer(store, num_bytes)

    def _keep(self, store: mmap.mmap) -> None:
        """It is kept, in the place of those that have not been used for longest."""
        self._kept.append(store)
        while len(self._kept) > 1 and sum(map(len, self._kept)) > self._kept_bytes:
            del self._kept[0]


MIN_SHARED_BYTES: Final = 1 << 18  # from here on a copy and a word are less than a way through the socket
MAX_SHARED_BUFFERS: Final = 8
MAX_KEPT_BYTES: Final = 1 << 30


class SharedBuffer:
    """Memory of this process that the other side may borrow.

    Args:
        mapping: what :func:`counterpoint.fabric.shm.segments.create` gave.
    """

    def __init__(self, mapping: SegmentMapping) -> None:
        self.mapping = mapping
        self.number = os.fstat(mapping.fd).st_ino
        self.num_bytes = len(mapping.memory)
        self.is_free = False

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Copies of the tensors are on the shelf, one behind the other."""
        flat, start = torch.frombuffer(self.mapping.memory, dtype=torch.uint8), 0
        for tensor in tensors:
            raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
            flat[start : start + len(raw)].copy_(raw)
            start += padded_size(len(raw))


class OwnedBuffers:
    """The shelves of this side."""

    def __init__(self) -> None:
        self._buffers: dict[int, SharedBuffer] = {}

    def acquire(self, num_bytes: int) -> SharedBuffer | None:
        """Return a free shelf that is large enough and not much larger; it is lent."""
        for shelf in self._buffers.values():
            if shelf.is_free and num_bytes <= shelf.num_bytes <= 2 * num_bytes:
                shelf.is_free = False
                return shelf
        return None

    def create(self, num_bytes: int) -> SharedBuffer | None:
        """Return a new shelf to be offered; None where there are two of the size, or many, or no memory."""
        kept, size = list(self._buffers.values()), 1 << (num_bytes - 1).bit_length()
        if len(kept) >= MAX_SHARED_BUFFERS or sum(shelf.num_bytes for shelf in kept) + size > MAX_KEPT_BYTES:
            return None
        if sum(shelf.num_bytes == size for shelf in kept) == 2:
            return None
        try:
            shelf = SharedBuffer(create_segment("counterpoint shelf", size, allocate=True))
        except PeerError:  # no memory: the socket needs none
            return None
        self._buffers[shelf.number] = shelf
        return shelf

    def release(self, number: int) -> None:
        """The other side has found the shelf, or needs it no more.

        Raises:
            ProtocolError: it has not been lent.
        """
        shelf = self._buffers.get(number)
        if shelf is None or shelf.is_free:
            raise ProtocolError(f"shelf {number} is given back, which was not lent; look at what the other side runs")
        shelf.is_free = True

    def close(self) -> None:
        """Nobody can find the shelves any more; what the other side has found it keeps."""
        for shelf in self._buffers.values():
            shelf.mapping.close_file()
        self._buffers.clear()


class PeerBuffers:
    """The shelves of the other side.

    Args:
        process: the other side's number, as the kernel says.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._mapped: dict[int, mmap.mmap] = {}
        self._released: deque[int] = deque()  # any thread may drop the last tensor

    def open(self, fd: int, number: int, num_bytes: int) -> bool:
        """Tell whether this side can see a shelf that was offered.

        Args:
            fd: the other side's descriptor.
            number: of the file.
            num_bytes: its size.

        Raises:
            ProtocolError: it was offered before, or there are too many.
        """
        if number in self._mapped or len(self._mapped) >= MAX_SHARED_BUFFERS or not 0 < num_bytes <= MAX_KEPT_BYTES:
            raise ProtocolError(f"shelf {number} of {num_bytes} bytes is offered, being one too many or too large")
        try:
            own = os.open(f"/proc/{self._pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:  # it may not be looked at
            return False
        try:
            self._mapped[number] = _map_sealed(own, number, num_bytes)
        except OSError:
            return False
        finally:
            os.close(own)
        return True

    def view(self, number: int, num_bytes: int) -> ctypes.Array[ctypes.c_char]:
        """Return the memory of a shelf; when nothing holds it any more, :meth:`returned` names the shelf.

        Raises:
            ProtocolError: it has not been found, or is not so large.
        """
        memory = self._mapped.get(number)
        if memory is None or num_bytes > len(memory):
            raise ProtocolError(f"a letter lies on shelf {number}, which was not found here or is too small")
        store = (ctypes.c_char * num_bytes).from_buffer(memory)
        weakref.finalize(store, self._released.append, number).atexit = False
        return store

    @property
    def has_released(self) -> bool:
        """There are shelves that nobody holds a tensor of any more."""
        return bool(self._released)

    def take_released(self) -> Iterator[int]:
        """Yield each of them once."""
        while self._released:
            yield self._released.popleft()


@dataclass(frozen=True, slots=True)
class SharedBuffers:
    """What the two sides of a connection lend each other.

    Args:
        borrowing: from the other side.
        lending: to the other side.
    """

    peer: PeerBuffers
    own: OwnedBuffers = field(default_factory=OwnedBuffers)


def _map_sealed(fd: int, number: int, num_bytes: int) -> mmap.mmap:
    """Return the file in memory.

    Raises:
        OSError: it is not the one that was offered, or could become smaller while it is read.
    """
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_ino != number or found.st_size < num_bytes:
        raise OSError("another file")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise OSError("not sealed")
    return map_file(fd, num_bytes)
