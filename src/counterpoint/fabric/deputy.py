"""A thread that lets collectives go on while their rank computes or waits for something else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MIN_PAUSE_S, MAX_PAUSE_S = 0.001, 0.004  # between two looks; longer where the last ones found nothing to do
MAX_IDLE_LOOKS = 50  # then it sleeps until it is woken; before, waking it costs nothing
NAP_S = 1.0


class Deputy:
    """Calls ``advance`` again and again, for as long as that returns that something is left to do."""

    def __init__(self, advance: Callable[[], bool]) -> None:
        self._advance = advance
        self._woken = threading.Event()
        self._sleeps = False
        self._closed = False
        self._thread = threading.Thread(target=self._live, name="deputy", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """It looks again soon."""
        if self._sleeps:
            self._woken.set()

    def close(self) -> None:
        """Its thread is gone."""
        self._closed = True
        self._woken.set()
        self._thread.join(NAP_S)

    def _live(self) -> None:
        num_idle_looks = 0
        while not self._closed:
            time.sleep(min(MIN_PAUSE_S * (1 + num_idle_looks), MAX_PAUSE_S))
            num_idle_looks = 0 if self._advance() else num_idle_looks + 1
            if num_idle_looks > MAX_IDLE_LOOKS:
                self._sleeps = True
                if not self._advance():  # again, for what came before `wake` could see that it sleeps
                    self._woken.wait(NAP_S)
                self._sleeps = False
                self._woken.clear()
                num_idle_looks = 0
