"""What the C library does with memory that a step frees: it is kept for the next step.

A step asks for the same buffers as the one before. glibc takes large ones from the kernel, and gives them back as soon
as they are freed; so every step pays again for pages that are made, cleared and mapped, which can take longer than the
computation in them. glibc can be told to keep what is freed. That is true of the whole process, and so it is only done
while training, from the second step on: what building and a first step leave behind is given back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache

MALLOPT_PARAMETERS = {"M_TRIM_THRESHOLD": -1, "M_MMAP_THRESHOLD": -3, "M_MMAP_MAX": -4}
"""The numbers by which glibc's ``mallopt`` knows them."""
RETAIN_FREED = {"M_MMAP_MAX": 0, "M_TRIM_THRESHOLD": -1}
"""Nothing is mapped apart, and the heap never shrinks."""
RETURN_FREED = {"M_MMAP_MAX": 65_536, "M_MMAP_THRESHOLD": 32 << 20, "M_TRIM_THRESHOLD": 64 << 20}
"""What glibc itself comes to in a process that has freed a block of 32 MiB, as any that trains has."""
MMAP_SEPARATELY = {"M_MMAP_MAX": 65_536, "M_MMAP_THRESHOLD": 64 << 10}
"""Blocks of 64 KiB and more are mapped each on its own."""


class MallocHeap:
    """The memory that this process's C library looks after.

    Args:
        tune: sets one of the library's parameters to a number.
        trim: gives freed pages back to the kernel.
    """

    def __init__(self, tune: Callable[[int, int], object], trim: Callable[[], object]) -> None:
        self._tune, self._trim = tune, trim
        self.num_holders = 0  # trainings under way; one may begin before another has ended

    def retain(self) -> None:
        """Freed memory stays with the process, until whoever has called this calls :meth:`give_back`."""
        self.num_holders += 1
        if self.num_holders == 1:
            self._trim()
            self._set(RETAIN_FREED)

    def restore(self) -> None:
        """Freed memory goes back to the kernel again, that which was kept at once; if nobody else wants it kept."""
        self.num_holders -= 1
        if self.num_holders == 0:
            self._set(RETURN_FREED)
            self._trim()

    @contextmanager
    def mmap_separately(self) -> Iterator[None]:
        """What is made inside, and stays as long as a training, lies beside the heap.

        Among what steps free it would keep the free places between too small for what the next step asks for.
        """
        self._set(MMAP_SEPARATELY)
        try:
            yield
        finally:
            self._set(RETAIN_FREED if self.num_holders else RETURN_FREED)

    def _set(self, values: Mapping[str, int]) -> None:
        for name, value in values.items():
            self._tune(MALLOPT_PARAMETERS[name], value)


@cache
def process_heap() -> MallocHeap | None:
    """Return this process's heap; None where its C library is not glibc."""
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - asked for to see whether it is there
        tune, trim = library.mallopt, library.malloc_trim
    except (OSError, TypeError, AttributeError):
        return None
    trim.argtypes = (ctypes.c_size_t,)
    return MallocHeap(tune, lambda: trim(0))
