"""How long a rank is busy from one commit to the next: all the time in which it does not wait for other ranks.

::

    rank 0   F B |all_reduce| commit U   F B |...
    rank 1   F F F F B B B B |  all_reduce| commit U   F F F F B ...
             '--- busy ----'  '- waits -'   '----- busy ----'

Ranks that wait for a slow one take as long for a step as the slow one does; this figure distinguishes them.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter


class BusyTimer:
    """Measures the busy time of one rank; a few reads of a clock per step, and two per message.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self.counts_pauses = False
        self.since_s = self.stopped_s = clock()
        self.waited_s = 0.0

    def count_pauses(self) -> None:
        """Count the time between two steps, too: that of a rank with its own process, which may read data then."""
        self.counts_pauses = True

    def begin_step(self) -> None:
        """Continue after a pause."""
        if not self.counts_pauses:
            self.since_s += self.clock() - self.stopped_s

    def end_step(self) -> None:
        """Begin a pause."""
        self.stopped_s = self.clock()

    def add_wait(self, seconds: float) -> None:
        """Exclude time in which the rank communicates."""
        self.waited_s += seconds

    def read(self) -> float:
        """Return the busy seconds since :meth:`restart`."""
        return self.clock() - self.since_s - self.waited_s

    def restart(self) -> None:
        """Start a new measurement, after a commit."""
        self.since_s, self.waited_s = self.clock(), 0.0
