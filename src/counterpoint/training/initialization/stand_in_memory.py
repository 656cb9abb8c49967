"""Memory of the right size for parameters whose values only ranks have: a few random pages, mapped again and again.

Before ranks are built, a model is traced, and run on a few samples to see whether samples are independent, which no
zeros would show. So a parameter has random values of the size of an initializer's; but however large it is, it has the
memory of one file in memory, ``NUM_PAGES`` pages for each dtype and scale, which is mapped over its addresses::

    addresses of a weight   | pages 0 to 1020 | pages 0 to 1020 | pages 0 to ...
    memory                  | pages 0 to 1020 |

A write gets a page of its own. The number of pages is a prime, so that rows of a matrix repeat late.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
NUM_PAGES = 1021
MIN_BYTES = 64 << 10
"""The size from which a tensor is worth a mapping of its own."""
MAP_FIXED = 0x10
"""Of Linux; the module ``mmap`` does not have it."""


class StandInMemory:
    """Makes tensors that share a few random pages.

    Example:
        >>> with StandInMemory() as memory:
        ...     weight = memory.make_tensor(torch.empty(1 << 15, 1 << 15, device="meta"))  # 4 GiB
        >>> 0 < float(weight[-1].abs().max()) < 0.02
        True
    """

    def __init__(self) -> None:
        self._descriptors: dict[tuple[torch.dtype, int, bool], int] = {}

    def make_tensor(self, like: Tensor) -> Tensor:
        """Return a contiguous tensor on the CPU, of a tensor's shape and dtype, with random values.

        Args:
            like: on any device; with one dim the values are between 0.5 and 1.5, else they have about the variance
                1 / fan-in.
        """
        is_vector, fan_in = like.dim() < 2, math.prod(like.shape[1:])
        exponent = 0 if is_vector else round(math.log2(math.sqrt(3 / max(fan_in, 1))))
        num_bytes = like.numel() * like.element_size()
        if num_bytes < MIN_BYTES or not like.is_floating_point():
            return draw_values(like.numel(), like.dtype, exponent, is_positive=is_vector).view(like.shape)
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _map_repeatedly(memory, num_bytes, self._open_pages(like.dtype, exponent, is_positive=is_vector))
        return torch.frombuffer(memory, dtype=like.dtype, count=like.numel()).view(like.shape)

    def _open_pages(self, dtype: torch.dtype, exponent: int, *, is_positive: bool) -> int:
        """Return the descriptor of a file in memory with random values."""
        key = (dtype, exponent, is_positive)
        if key not in self._descriptors:
            values = draw_values(NUM_PAGES * PAGE // dtype.itemsize, dtype, exponent, is_positive=is_positive)
            self._descriptors[key] = os.memfd_create("stand-in weights", os.MFD_CLOEXEC)
            os.write(self._descriptors[key], values.view(torch.uint8).numpy().data)
        return self._descriptors[key]

    def __enter__(self) -> StandInMemory:
        """Make tensors in a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)  # the pages stay as long as a tensor that has them


def draw_values(count: int, dtype: torch.dtype, exponent: int, *, is_positive: bool) -> Tensor:
    """Return random values, the same in every process.

    Args:
        count: how many.
        dtype: of them.
        exponent: of the power of 2 that bounds them.
        is_positive: whether they are between 0.5 and 1.5 instead.
    """
    generator = torch.Generator().manual_seed(exponent & 0xFFFF)
    values = torch.rand(count, generator=generator)
    values = values + 0.5 if is_positive else (2 * values - 1) * 2.0**exponent
    return values.to(dtype)


def _map_repeatedly(memory: mmap.mmap, num_bytes: int, descriptor: int) -> None:
    """Map a file over the addresses of a mapping again and again, until the system has no more mappings to give."""
    library = ctypes.CDLL(None)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for offset in range(0, num_bytes, NUM_PAGES * PAGE):
        length = min(NUM_PAGES * PAGE, num_bytes - offset)
        flags = mmap.MAP_PRIVATE | MAP_FIXED
        library.mmap(start + offset, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
