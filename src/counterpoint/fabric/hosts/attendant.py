"""A thread that takes in what ranks of this host send, while this rank waits for ranks elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

PAUSE_S = 0.02
"""A wait that lasts longer is attended to, so often."""
NAP_S = 1.0


class Attendant:
    """While it is entered, by any thread and as often as one likes, ``take_in`` is called again and again.

    A rank that waits in shared memory takes in messages by itself. One that waits in a socket cannot, and whoever sends
    it more than a pipe holds would wait for it: in a circle, where that rank is what it waits for.

    Args:
        take_in: takes in what has come, and waits for nothing.
    """

    def __init__(self, take_in: Callable[[], None]) -> None:
        self._take_in = take_in
        self._lock = threading.Lock()
        self._num_waits = 0
        self._is_needed = threading.Event()
        self._closed = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._live, name="attendant", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        """A wait begins."""
        with self._lock:
            self._num_waits += 1
            self._is_needed.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """A wait has ended; what went wrong with a message that came meanwhile is raised where nothing else was."""
        with self._lock:
            self._num_waits -= 1
            if not self._num_waits:
                self._is_needed.clear()
        if error is None and self._error is not None:
            raise self._error

    def close(self) -> None:
        """Its thread is gone."""
        self._closed.set()
        self._is_needed.set()
        self._thread.join(NAP_S)

    def _live(self) -> None:
        while not self._closed.is_set():
            if self._is_needed.wait(NAP_S) and not self._closed.wait(PAUSE_S) and self._is_needed.is_set():
                try:
                    self._take_in()
                except Exception as error:  # noqa: BLE001 - whoever waits raises it
                    self._error = error
                    return
