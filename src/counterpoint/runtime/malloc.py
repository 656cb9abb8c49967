"""Keep memory that a step frees inside the process, through glibc's ``mallopt``.

Each step needs the same buffers as the step before. By default glibc maps large buffers and unmaps them when freed, so
every step pays again for page faults and for clearing pages, which can take longer than the computation on them. The
setting applies to the whole process, so it is made only while training, from the second step on: memory freed by
building and by the first step is returned to the kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache

MALLOPT_PARAMETERS = {"M_TRIM_THRESHOLD": -1, "M_MMAP_THRESHOLD": -3, "M_MMAP_MAX": -4}
"""Parameter numbers of glibc's ``mallopt``."""
RETAIN_FREED = {"M_MMAP_MAX": 0, "M_TRIM_THRESHOLD": -1}
"""No block is mapped separately, and the heap never shrinks."""
RETURN_FREED = {"M_MMAP_MAX": 65_536, "M_MMAP_THRESHOLD": 32 << 20, "M_TRIM_THRESHOLD": 64 << 20}
"""The values that glibc's dynamic thresholds reach after a block of 32 MiB was freed, as in any training process."""
MMAP_SEPARATELY = {"M_MMAP_MAX": 65_536, "M_MMAP_THRESHOLD": 64 << 10}
"""Blocks of 64 KiB and more are mapped separately."""
RETURN_AT_ONCE = {"M_MMAP_MAX": 65_536, "M_MMAP_THRESHOLD": 1 << 20}
"""Blocks of 1 MiB and more are mapped separately, so that a process has no more of them than it uses."""


class MallocHeap:
    """The glibc heap of this process.

    Args:
        tune: ``mallopt``: sets a parameter to a number.
        trim: ``malloc_trim``: returns freed pages to the kernel.
    """

    def __init__(self, tune: Callable[[int, int], object], trim: Callable[[], object]) -> None:
        self._tune, self._trim = tune, trim
        self.num_holders = 0  # trainings in progress, of which there may be several
        self.num_returning = 0  # those that want freed memory to be returned at once

    def retain(self) -> None:
        """Keep freed memory in the process until the caller calls :meth:`restore`."""
        self.num_holders += 1
        if self.num_holders == 1:
            self._trim()
            self._set(RETAIN_FREED)

    def restore(self) -> None:
        """Return freed memory to the kernel again, retained memory at once, unless another caller still retains it."""
        self.num_holders -= 1
        if self.num_holders == 0:
            self._set(self._between())
            self._trim()

    def return_at_once(self) -> None:
        """Return large blocks when they are freed, until :meth:`end_return`, unless another caller retains memory."""
        self.num_returning += 1
        if self.num_holders == 0:
            self._set(RETURN_AT_ONCE)

    def end_return(self) -> None:
        """Treat large blocks as others again, unless another caller wants them to be returned."""
        self.num_returning -= 1
        if self.num_holders == 0:
            self._set(self._between())

    def _between(self) -> Mapping[str, int]:
        return RETURN_AT_ONCE if self.num_returning else RETURN_FREED

    @contextmanager
    def mmap_separately(self) -> Iterator[None]:
        """Map large blocks that are allocated inside each on its own, outside the heap.

        Long-lived blocks between short-lived ones would fragment the heap, so that the next step's buffers do not fit.
        """
        self._set(MMAP_SEPARATELY)
        try:
            yield
        finally:
            self._set(RETAIN_FREED if self.num_holders else self._between())

    def _set(self, values: Mapping[str, int]) -> None:
        for name, value in values.items():
            self._tune(MALLOPT_PARAMETERS[name], value)


@cache
def heap_of_process() -> MallocHeap | None:
    """Return this process's heap; None if its C library is not glibc."""
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - raises AttributeError if it is not glibc
        tune, trim = library.mallopt, library.malloc_trim
    except (OSError, TypeError, AttributeError):
        return None
    trim.argtypes = (ctypes.c_size_t,)
    return MallocHeap(tune, lambda: trim(0))
