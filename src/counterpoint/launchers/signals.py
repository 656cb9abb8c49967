"""Signals that ask a process to end: collected instead of ending it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Literal

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Ask a training run to stop after a step: what schedulers send before they kill, and by custom before a preemption."""


@contextmanager
def collect_signals(
    numbers: Sequence[signal.Signals] = ENDING_SIGNALS,
    received: list[int] | None = None,
    *,
    replaced: Literal["handlers", "defaults"] = "handlers",
) -> Iterator[list[int]]:
    """Collect signals that would end this process in the yielded list; only the main thread can do that.

    Signals that are ignored stay ignored.

    Args:
        numbers: the signals.
        received: the list to collect them in.
        replaced: whether ``handlers`` of this process's own program are replaced as well, or ``defaults`` only.
    """
    received = [] if received is None else received

    def record(number: int, frame: FrameType | None) -> None:
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    handlers = {number: signal.getsignal(number) for number in numbers}
    kept = {signal.SIG_IGN, None}  # None: not installed from Python
    changed = {
        number: handler
        for number, handler in handlers.items()
        if handler not in kept and (replaced == "handlers" or handler == signal.SIG_DFL)
    }
    for number in changed:
        signal.signal(number, record)
    try:
        yield received
    finally:
        for number, handler in changed.items():
            signal.signal(number, handler)


def ignore_stop_signals() -> None:
    """Ignore signals that ask a training run to stop where they would end this process at once: its run has stopped.

    A scheduler may send several of them, and the last one must not decide how a process ends that ends anyway.
    """
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, signal.SIG_IGN)
