"""Buffers for received tensors: a pool of reusable memory, and shared memory between processes of one host.

The pool reuses large buffers once no tensor refers to them; new memory costs about as much as receiving into it,
because the kernel has to find and clear every page.

Shared memory: the sender owns anonymous files (memfd) and copies tensors into them; the frame then carries the buffer's
number only::

    sender                                             receiver
      | -- SHM_OFFER (fd, number, size) -------------->  | maps /proc/<pid>/fd/<fd>
      | <------------------------ SHM_RELEASE (number) - | buffer is mapped, and free
      | write tensors
      | -- SHM_PAYLOAD (number) ---------------------->  | tensors are views of the buffer
      | <------------------------ SHM_RELEASE (number) - | last tensor was dropped: free again

Whatever fails (no memory, a process that may not be inspected) falls back to the socket.
"""

from __future__ import annotations

import ctypes
import mmap
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
from counterpoint.rpc.segments import SegmentMapping, create_segment, open_segment
from counterpoint.rpc.tensor_codec import padded_size
from counterpoint.tensor_bytes import as_bytes

LARGE_BYTES = 1 << 18
UNHELD_REFCOUNT = (
    3  # reference count of memory without tensors: the list, the loop variable, and getrefcount's argument
)


class ReceiveBuffer:
    """Memory for the body of one frame.

    Args:
        store: the underlying memory, kept alive by tensors on it.
        num_bytes: how much of it is used.
    """

    __slots__ = ("_store", "memory")

    def __init__(self, store: bytearray | mmap.mmap | ctypes.Array[ctypes.c_char], num_bytes: int) -> None:
        self._store = store
        self.memory = memoryview(store)[:num_bytes]

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], start: int) -> Tensor:
        """Return a tensor view of the bytes from ``start`` on."""
        num_bytes = prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(tuple(shape), dtype=dtype)
        flat = torch.frombuffer(self._store, dtype=torch.uint8, count=num_bytes, offset=start)
        return flat.view(dtype).view(tuple(shape))


class ReceiveBufferPool:
    """Pool of receive buffers.

    Args:
        kept_bytes: how much large memory to keep for reuse, in use or not.
    """

    def __init__(self, kept_bytes: int = 1 << 28) -> None:
        self._kept_bytes = kept_bytes
        self._kept: list[mmap.mmap] = []

    def allocate(self, num_bytes: int) -> ReceiveBuffer:
        """Return an uninitialized buffer of this size.

        Raises:
            ProtocolError: there is not enough memory.
        """
        if num_bytes < LARGE_BYTES:
            return ReceiveBuffer(bytearray(num_bytes), num_bytes)
        for store in self._kept:
            if num_bytes <= len(store) <= 2 * num_bytes and sys.getrefcount(store) == UNHELD_REFCOUNT:
                self._kept.remove(store)
                self._kept.append(store)
                return ReceiveBuffer(store, num_bytes)
        try:
            store = mmap.mmap(
                -1, -(-num_bytes // LARGE_BYTES) * LARGE_BYTES
            )  # rounded up: the next message may be a little larger
        except OSError as error:
            raise ProtocolError(
                f"a message of {num_bytes} bytes arrived, but there is not enough memory ({error.strerror}); send it "
                "in parts, or give this process more"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            store.madvise(mmap.MADV_HUGEPAGE)
        self._keep(store)
        return ReceiveBuffer(store, num_bytes)

    def _keep(self, store: mmap.mmap) -> None:
        """Keep memory for reuse, in place of the least recently used."""
        self._kept.append(store)
        while len(self._kept) > 1 and sum(map(len, self._kept)) > self._kept_bytes:
            del self._kept[0]


MIN_SHARED_BYTES: Final = 1 << 18  # from this size on, a copy into shared memory is faster than the socket
MAX_SHARED_BUFFERS: Final = 8
MAX_KEPT_BYTES: Final = 1 << 30


class SharedBuffer:
    """Shared memory of this process, on loan to the peer one message at a time.

    Args:
        mapping: what :func:`counterpoint.rpc.segments.create` returned.
    """

    def __init__(self, mapping: SegmentMapping) -> None:
        self.mapping = mapping
        self.number = mapping.inode
        self.num_bytes = len(mapping.memory)
        self.is_free = False

    def write(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors into the buffer, each padded."""
        flat, start = torch.frombuffer(self.mapping.memory, dtype=torch.uint8), 0
        for tensor in tensors:
            raw = as_bytes(tensor)
            flat[start : start + len(raw)].copy_(raw)
            start += padded_size(len(raw))


class OwnedBuffers:
    """Shared buffers that this process owns."""

    def __init__(self) -> None:
        self._buffers: dict[int, SharedBuffer] = {}

    def acquire(self, num_bytes: int) -> SharedBuffer | None:
        """Return a free buffer that is large enough and at most twice as large; it is then in use."""
        for buffer in self._buffers.values():
            if buffer.is_free and num_bytes <= buffer.num_bytes <= 2 * num_bytes:
                buffer.is_free = False
                return buffer
        return None

    def create(self, num_bytes: int) -> SharedBuffer | None:
        """Return a new buffer to be offered; None if there are two of the size, too many, or no memory."""
        buffers, size = list(self._buffers.values()), 1 << (num_bytes - 1).bit_length()
        if len(buffers) >= MAX_SHARED_BUFFERS or sum(buffer.num_bytes for buffer in buffers) + size > MAX_KEPT_BYTES:
            return None
        if sum(buffer.num_bytes == size for buffer in buffers) == 2:
            return None
        try:
            buffer = SharedBuffer(create_segment("counterpoint rpc", size, allocate=True))
        except PeerError:  # no memory: the socket needs none
            return None
        self._buffers[buffer.number] = buffer
        return buffer

    def release(self, number: int) -> None:
        """Mark a buffer as free: the peer has mapped it, or dropped the tensors in it.

        Raises:
            ProtocolError: it is not in use.
        """
        buffer = self._buffers.get(number)
        if buffer is None or buffer.is_free:
            raise ProtocolError(f"shared buffer {number} was released but is not in use; check the peer's version")
        buffer.is_free = True

    def close(self) -> None:
        """Release all buffers; the peer keeps what it has mapped."""
        for buffer in self._buffers.values():
            buffer.mapping.close_file()
        self._buffers.clear()


class PeerBuffers:
    """Shared buffers that the peer owns.

    Args:
        pid: process id of the peer, as the kernel reports it.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._mapped: dict[int, mmap.mmap] = {}
        self._released: deque[int] = deque()  # any thread may drop the last tensor

    def open(self, fd: int, number: int, num_bytes: int) -> bool:
        """Map a buffer that the peer offered; tell whether it worked.

        Args:
            fd: the peer's file descriptor.
            number: of the file (inode).
            num_bytes: its size.

        Raises:
            ProtocolError: it was offered before, there are too many, or it is too large.
        """
        if number in self._mapped or len(self._mapped) >= MAX_SHARED_BUFFERS or not 0 < num_bytes <= MAX_KEPT_BYTES:
            raise ProtocolError(
                f"shared buffer {number} of {num_bytes} bytes was offered, which is one too many or too large"
            )
        try:
            self._mapped[number] = open_segment(self._pid, fd, number, num_bytes).memory
        except OSError:  # it may not be inspected, or is not what was offered
            return False
        return True

    def view(self, number: int, num_bytes: int) -> ctypes.Array[ctypes.c_char]:
        """Return the memory of a buffer; once nothing refers to it, :meth:`take_released` returns the buffer.

        Raises:
            ProtocolError: it is not mapped, or too small.
        """
        memory = self._mapped.get(number)
        if memory is None or num_bytes > len(memory):
            raise ProtocolError(f"a message refers to shared buffer {number}, which is not mapped or too small")
        store = (ctypes.c_char * num_bytes).from_buffer(memory)
        weakref.finalize(store, self._released.append, number).atexit = False
        return store

    @property
    def has_released(self) -> bool:
        """Whether there are buffers that nothing refers to any more."""
        return bool(self._released)

    def take_released(self) -> Iterator[int]:
        """Yield each of them once."""
        while self._released:
            yield self._released.popleft()


@dataclass(frozen=True, slots=True)
class SharedBuffers:
    """Shared buffers of both ends of a connection.

    Args:
        peer: owned by the peer.
        own: owned by this process.
    """

    peer: PeerBuffers
    own: OwnedBuffers = field(default_factory=OwnedBuffers)
