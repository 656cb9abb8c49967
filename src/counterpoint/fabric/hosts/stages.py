"""A collective of several stages that follow each other while their rank computes.

All stages of one group that use the same connection must be started in one order on all members. So stages of one
number use the same connection in each collective, and none is started before the collective before has started its own
of that number.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from math import inf
from threading import Lock
from typing import Protocol

from counterpoint.fabric.gloo import GlooWork
from counterpoint.fabric.lanes import SLICE_S, wait_for

LOOK_S = 0.01  # so long a wait for one stage may keep from looking at the others


class Pending(Protocol):
    """A stage that has been started."""

    def is_over(self) -> bool:
        """Whether it is complete; a PeerError or a RuntimeError where it cannot be."""

    def pause(self, seconds: float) -> None:
        """It is over in whatever way, or so much time has passed."""


Stage = Callable[[], Pending | None]


class OnWire:
    """What has been started on a connection, and what is to be done after it."""

    def __init__(self, works: Sequence[GlooWork], after: Callable[[], object] | None = None) -> None:
        self._works = works
        self._after = after

    def is_over(self) -> bool:
        """Whether all is complete."""
        if not all(work.is_completed() for work in self._works):
            return False
        for work in self._works:
            wait_for(work, SLICE_S)  # raises what went wrong
        if self._after is not None:
            self._after()
            self._after = None
        return True

    def pause(self, seconds: float) -> None:
        """It is over in whatever way, or so much time has passed."""
        for work in self._works:
            if not work.is_completed():
                try:
                    work.wait(timedelta(seconds=seconds))
                except RuntimeError:
                    return


class Stages:
    """One collective of a route; it can be waited for as gloo's works are.

    Args:
        route: what it is one of.
        stages: what to start, one after the other; None as a result says that there is nothing to wait for.
    """

    def __init__(self, route: Route, stages: Sequence[Stage]) -> None:
        self._route = route
        self._stages = deque(stages)
        self.num_started = 0
        self.pending: Pending | None = None
        self.over = False
        self._error: Exception | None = None

    def advance(self, most: float) -> None:
        """Whatever can go on without waiting has gone on, but no more than so many stages have been started."""
        try:
            while self.pending is None or self.pending.is_over():
                self.pending = None
                if not self._stages:
                    self.over = True
                if self.over or self.num_started >= most:
                    return
                self.num_started += 1
                self.pending = self._stages.popleft()()
        except Exception as error:  # noqa: BLE001 - whoever waits for the collective raises it
            self._error, self.pending, self.over = error, None, True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self.over

    def wait(self, timeout: timedelta) -> bool:
        """It is complete; a RuntimeError where it is not by then."""
        end = time.monotonic() + timeout.total_seconds()
        self._route.advance()
        while not self.is_completed():
            left = end - time.monotonic()
            if left <= 0:
                raise RuntimeError("not yet")
            self._route.pause(min(left, LOOK_S))
            self._route.advance()
        if self._error is not None:
            raise self._error
        return True


class Route:
    """The collectives of one group that have been launched and are not over."""

    def __init__(self) -> None:
        self._works: deque[Stages] = deque()
        self._lock = Lock()

    def add(self, stages: Sequence[Stage]) -> Stages:
        """Return the collective, its first stage started."""
        work = Stages(self, stages)
        with self._lock:
            self._works.append(work)
        self.advance()
        return work

    def advance(self) -> bool:
        """Whatever can go on without waiting has gone on; return whether anything is left."""
        with self._lock:
            most = inf
            for work in self._works:
                work.advance(most)
                most = inf if work.over else work.num_started
            self._works = deque(work for work in self._works if not work.over)
            return bool(self._works)

    def pause(self, seconds: float) -> None:
        """The oldest stage under way is over, or so much time has passed."""
        pending = next((work.pending for work in list(self._works) if work.pending is not None), None)
        if pending is not None:
            pending.pause(seconds)
