"""Memory that collectives work in: what one has done with the next one takes.

A step asks for the same memory as the one before. What a thread beside the first one asks for in large blocks, glibc
has from the kernel, page by page, and gives it back as soon as it is freed, whatever else it was told to keep.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import Final

import torch
from torch import Tensor

LARGE_BYTES: Final = 1 << 16
"""Smaller memory is not worth the looking for it."""
MOST_TOO_LARGE: Final = 2
"""Memory is taken for what needs at least this part of it."""


class Workspace:
    """Memory of one fabric, for whatever thread goes on with its collectives; at most what was in use at once."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []  # the one that was given back first comes first
        self._lent_bytes = self._most_bytes = 0
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """Memory that waits for another collective."""
        return sum(one.numel() for one in self._free)

    def take(self, num_bytes: int) -> Tensor:
        """Return so many bytes or more, flat; what is in them is not defined."""
        with self._lock:
            fitting = [
                at for at, one in enumerate(self._free) if num_bytes <= one.numel() <= MOST_TOO_LARGE * num_bytes
            ]
            least = min(fitting, key=lambda at: self._free[at].numel(), default=None)
            found = torch.empty(num_bytes, dtype=torch.uint8) if least is None else self._free.pop(least)
            self._lent_bytes += found.numel()
            self._most_bytes = max(self._most_bytes, self._lent_bytes)
            return found

    def give_back(self, taken: Iterable[Tensor]) -> None:
        """Others can have this memory, which nobody looks at any more."""
        with self._lock:
            for one in taken:
                self._lent_bytes -= one.numel()
                self._free.append(one)
            while self.num_bytes + self._lent_bytes > self._most_bytes:
                del self._free[0]


class Desk:
    """What one collective works in, until it is cleared.

    Args:
        workspace: where its memory is from.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._taken: list[Tensor] = []

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor, of which nothing may be seen once the desk is cleared."""
        num_bytes = num_elements * dtype.itemsize
        if num_bytes < LARGE_BYTES:
            return torch.empty(num_elements, dtype=dtype)
        self._taken.append(self._workspace.take(num_bytes))
        return self._taken[-1][:num_bytes].view(dtype)

    def clear(self) -> None:
        """The collective is complete, and the next one has its memory."""
        self._workspace.give_back(self._taken)
        self._taken.clear()
