"""Memory to receive into: large rooms are used again when nobody holds a tensor of them any more.

New memory costs about as much as what is received into it, because the kernel has to find and clear every page.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from counterpoint.errors import ProtocolError

LARGE_BYTES = 1 << 18
UNHELD = 3  # references to memory that no tensor holds: the list's, the one that asks, and the question's own


class Room:
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


class Rooms:
    """Gives rooms.

    Args:
        kept_bytes: how much of large ones is kept for later, held or not.
    """

    def __init__(self, kept_bytes: int = 1 << 28) -> None:
        self._kept_bytes = kept_bytes
        self._kept: list[mmap.mmap] = []

    def take(self, num_bytes: int) -> Room:
        """Return a room of this size; what is in it is not defined.

        Raises:
            ProtocolError: there is no memory for it.
        """
        if num_bytes < LARGE_BYTES:
            return Room(bytearray(num_bytes), num_bytes)
        for store in self._kept:
            if num_bytes <= len(store) <= 2 * num_bytes and sys.getrefcount(store) == UNHELD:
                self._kept.remove(store)
                self._kept.append(store)
                return Room(store, num_bytes)
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
        return Room(store, num_bytes)

    def _keep(self, store: mmap.mmap) -> None:
        """It is kept, in the place of those that have not been used for longest."""
        self._kept.append(store)
        while len(self._kept) > 1 and sum(map(len, self._kept)) > self._kept_bytes:
            del self._kept[0]
