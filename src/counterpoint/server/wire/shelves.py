"""Tensors between processes of one host without a socket: the sender lays them down where the receiver can see them.

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
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from counterpoint.errors import PeerError, ProtocolError
from counterpoint.fabric.frames import padded
from counterpoint.fabric.shm.segments import Mapping, create, mapped

SHARED_BYTES: Final = 1 << 18  # from here on a copy and a word are less than a way through the socket
MAX_SHELVES: Final = 8
MAX_KEPT_BYTES: Final = 1 << 30


class Shelf:
    """Memory of this process that the other side may borrow.

    Args:
        mapping: what :func:`counterpoint.fabric.shm.segments.create` gave.
    """

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.number = os.fstat(mapping.fd).st_ino
        self.num_bytes = len(mapping.memory)
        self.is_free = False

    def lay_down(self, tensors: Sequence[Tensor]) -> None:
        """Copies of the tensors are on the shelf, one behind the other."""
        flat, start = torch.frombuffer(self.mapping.memory, dtype=torch.uint8), 0
        for tensor in tensors:
            raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
            flat[start : start + len(raw)].copy_(raw)
            start += padded(len(raw))


class Lending:
    """The shelves of this side."""

    def __init__(self) -> None:
        self._shelves: dict[int, Shelf] = {}

    def take(self, num_bytes: int) -> Shelf | None:
        """Return a free shelf that is large enough and not much larger; it is lent."""
        for shelf in self._shelves.values():
            if shelf.is_free and num_bytes <= shelf.num_bytes <= 2 * num_bytes:
                shelf.is_free = False
                return shelf
        return None

    def make(self, num_bytes: int) -> Shelf | None:
        """Return a new shelf to be offered; None where there are two of the size, or many, or no memory."""
        kept, size = list(self._shelves.values()), 1 << (num_bytes - 1).bit_length()
        if len(kept) >= MAX_SHELVES or sum(shelf.num_bytes for shelf in kept) + size > MAX_KEPT_BYTES:
            return None
        if sum(shelf.num_bytes == size for shelf in kept) == 2:
            return None
        try:
            shelf = Shelf(create("counterpoint shelf", size, fill=True))
        except PeerError:  # no memory: the socket needs none
            return None
        self._shelves[shelf.number] = shelf
        return shelf

    def take_back(self, number: int) -> None:
        """The other side has found the shelf, or needs it no more.

        Raises:
            ProtocolError: it has not been lent.
        """
        shelf = self._shelves.get(number)
        if shelf is None or shelf.is_free:
            raise ProtocolError(f"shelf {number} is given back, which was not lent; look at what the other side runs")
        shelf.is_free = True

    def close(self) -> None:
        """Nobody can find the shelves any more; what the other side has found it keeps."""
        for shelf in self._shelves.values():
            shelf.mapping.forget_file()
        self._shelves.clear()


class Borrowing:
    """The shelves of the other side.

    Args:
        process: the other side's number, as the kernel says.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self._found: dict[int, mmap.mmap] = {}
        self._returned: deque[int] = deque()  # any thread may drop the last tensor

    def find(self, fd: int, number: int, num_bytes: int) -> bool:
        """Tell whether this side can see a shelf that was offered.

        Args:
            fd: the other side's descriptor.
            number: of the file.
            num_bytes: its size.

        Raises:
            ProtocolError: it was offered before, or there are too many.
        """
        if number in self._found or len(self._found) >= MAX_SHELVES or not 0 < num_bytes <= MAX_KEPT_BYTES:
            raise ProtocolError(f"shelf {number} of {num_bytes} bytes is offered, being one too many or too large")
        try:
            own = os.open(f"/proc/{self._process}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:  # it may not be looked at
            return False
        try:
            self._found[number] = _sealed(own, number, num_bytes)
        except OSError:
            return False
        finally:
            os.close(own)
        return True

    def store(self, number: int, num_bytes: int) -> ctypes.Array[ctypes.c_char]:
        """Return the memory of a shelf; when nothing holds it any more, :meth:`returned` names the shelf.

        Raises:
            ProtocolError: it has not been found, or is not so large.
        """
        memory = self._found.get(number)
        if memory is None or num_bytes > len(memory):
            raise ProtocolError(f"a letter lies on shelf {number}, which was not found here or is too small")
        store = (ctypes.c_char * num_bytes).from_buffer(memory)
        weakref.finalize(store, self._returned.append, number).atexit = False
        return store

    @property
    def has_returned(self) -> bool:
        """There are shelves that nobody holds a tensor of any more."""
        return bool(self._returned)

    def returned(self) -> Iterator[int]:
        """Yield each of them once."""
        while self._returned:
            yield self._returned.popleft()


@dataclass(frozen=True, slots=True)
class Shared:
    """What the two sides of a connection lend each other.

    Args:
        borrowing: from the other side.
        lending: to the other side.
    """

    borrowing: Borrowing
    lending: Lending = field(default_factory=Lending)


def _sealed(fd: int, number: int, num_bytes: int) -> mmap.mmap:
    """Return the file in memory.

    Raises:
        OSError: it is not the one that was offered, or could become smaller while it is read.
    """
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_ino != number or found.st_size < num_bytes:
        raise OSError("another file")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise OSError("not sealed")
    return mapped(fd, num_bytes)
