"""A run has the C library keep the memory that its steps free, unless somebody else has a say in that."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from counterpoint.launchers.variables import allocator_variables
from counterpoint.runtime.heap import heap


class Keeping:
    """One run's wish that freed memory is kept.

    Args:
        wanted: whether the run has it; nothing is changed all the same where the user has set up the allocator.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._heap = heap() if wanted and not allocator_variables() else None
        self._is_on = False

    def begin(self) -> None:
        """From now on freed memory is kept."""
        if self._heap is not None and not self._is_on:
            self._is_on = True
            self._heap.keep()

    def end(self) -> None:
        """It is given back, unless another run of this process wants it kept."""
        if self._heap is not None and self._is_on:
            self._is_on = False
            self._heap.give_back()

    def apart(self) -> AbstractContextManager[None]:
        """Return in what to make memory that stays as long as the run."""
        return nullcontext() if self._heap is None else self._heap.apart()
