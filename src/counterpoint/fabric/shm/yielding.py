"""Ranks of a host with fewer cores than ranks: one that wakes up does not take the core of one that computes.

By default the kernel gives a process that has waited the core of one that has not, at once. Ranks wait for each other
many times in a step, and each change of a core costs what caches have to fetch again; whoever is left to compute until
it waits itself has its part done earlier, which is what the others wait for.
"""

from __future__ import annotations

import os
from contextlib import suppress


class Yielding:
    """The calling thread's way of being scheduled, and that of the threads it starts, until :meth:`end`.

    Where a sandbox forbids to change it, it stays as it is.

    Args:
        num_ranks: of this host.
        num_cores: that they may use.

    Example:
        >>> Yielding(num_ranks=2, num_cores=2).is_on
        False
    """

    def __init__(self, num_ranks: int, num_cores: int) -> None:
        self.is_on = False
        if num_ranks > num_cores and hasattr(os, "SCHED_BATCH"):
            with suppress(OSError):
                if os.sched_getscheduler(0) == os.SCHED_OTHER:
                    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
                    self.is_on = True

    def end(self) -> None:
        """The thread is scheduled as it was before; the thread that has begun calls it."""
        if self.is_on and os.sched_getscheduler(0) == os.SCHED_BATCH:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        self.is_on = False
