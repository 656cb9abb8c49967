"""Thread that finds out why collectives of process groups are not complete.

A process group reports neither who is missing nor that members started different collectives; NCCL does not even
report that a member is gone. The thread runs only while something is pending::

    pending for 0.2 s    has a rank posted why it aborts? has a process of this host ended? (for a device)
    pending for 1 s      compare what all members of the group have started, over the store
    the timeout          (for a device; a host's own wait has a timeout) name the members that have not started it
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

PAUSE_S: Final = 0.2
IDLE_WAIT_S: Final = 1.0


class Watchdog:
    """Calls ``check`` repeatedly while it returns True, which means that something is pending.

    Args:
        check: what to do.
    """

    def __init__(self, check: Callable[[], bool]) -> None:
        self._check = check
        self._pending = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="counterpoint watchdog", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Make it check soon, and again while something is pending."""
        if not self._pending.is_set():
            self._pending.set()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._pending.set()
        if self._thread is not threading.current_thread():
            self._thread.join(IDLE_WAIT_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._pending.wait()
            self._pending.clear()
            while not self._closed.wait(PAUSE_S) and self._check():
                pass
