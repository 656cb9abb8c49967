"""One loop over all connections: who can be read or written, whose deadline has passed, who waits for what.

It turns in the thread of whoever waits, or in one of its own. Everything that happens to a connection happens under the
loop's lock, in whichever thread, so that callbacks never meet themselves.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from types import TracebackType
from typing import Protocol, Self

from counterpoint.errors import PeerError

MAX_PAUSE_S = 0.1  # between two looks at the deadlines: another thread may have set one
YIELD_S = 0.005  # of the loop's own thread while others turn it: so long at most an answer lies that nobody waits for
READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE


class EventHandler(Protocol):
    """What a loop looks after; it adds itself and takes itself out."""

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is to be called, by the loop's clock; infinite if never."""

    def fileno(self) -> int:
        """Return the descriptor of its socket."""

    def on_ready(self, events: int) -> None:
        """The socket can be read or written."""

    def on_timeout(self) -> None:
        """The deadline has passed."""

    def abort(self) -> None:
        """It is gone, at once."""


class EventLoop:
    """Turns until nobody waits any more; everything in it is gone when it is closed.

    Args:
        clock: says how late it is.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self._ran = threading.Condition(self.lock)
        self._yielding = threading.Condition(self.lock)
        self._num_waiters_running = 0  # waiting threads that turn the loop instead of its own
        self._was_run = self._is_thread_running = False
        self._selector = selectors.DefaultSelector()
        self._handlers: dict[EventHandler, int] = {}
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._cork_depth: dict[int, int] = {}  # how deep, by thread
        self._deferred: dict[Callable[[], None], None] = {}

    def watch(self, handler: EventHandler, events: int) -> None:
        """It will hear when its socket can be read or written; 0 for neither."""
        known = self._handlers.get(handler)
        if known == events:
            return
        if events & WRITE:
            self._yielding.notify_all()
        if events and known:
            self._selector.modify(handler.fileno(), events, handler)
        elif events:
            self._selector.register(handler.fileno(), events, handler)
        elif known:
            self._selector.unregister(handler.fileno())
        self._handlers[handler] = events

    def unwatch(self, handler: EventHandler) -> None:
        """It hears nothing any more; its socket may be closed."""
        if self._handlers.pop(handler, 0):
            self._selector.unregister(handler.fileno())

    def run_once(self, timeout_s: float = 0.0) -> None:
        """Whoever could be read or written has been, and whoever was due has been told.

        Args:
            patience_s: how long to wait for somebody, if nobody can.
        """
        with self.lock:
            next_due = min((watched.deadline for watched in self._handlers), default=inf)
        pause_s = min(timeout_s, max(next_due - self.clock(), 0.0), MAX_PAUSE_S)
        found = self._selector.select(pause_s)
        with self.lock:
            for key, events in found:
                if key.data in self._handlers:  # it may have gone meanwhile
                    key.data.ready(events)
            now = self.clock()
            for watched in [each for each in self._handlers if each.deadline <= now]:
                watched.on_timeout()
            self._ran.notify_all()

    @contextmanager
    def cork(self) -> Iterator[None]:
        """What is sent meanwhile leaves in one go at the end, unless a connection has much to send.

        Of blocks inside each other in one thread the end of the outermost one counts.
        """
        thread = threading.get_ident()
        with self.lock:
            depth = self._cork_depth[thread] = self._cork_depth.get(thread, 0) + 1
        try:
            yield
        finally:
            with self.lock:
                try:
                    if depth == 1:
                        self._flush()
                finally:
                    self._cork_depth[thread] = depth - 1
                    if depth == 1:
                        del self._cork_depth[thread]

    def _flush(self) -> None:
        """What was gathered has left, or is about to; called with the lock."""
        while self._deferred:  # messages become letters, and these leave
            deferred, self._deferred = self._deferred, {}
            for flush in deferred:
                flush()

    def defer(self, flush: Callable[[], None]) -> bool:
        """Tell whether what is sent is being gathered; then this will be called at the end, once."""
        if self._cork_depth:
            self._deferred[flush] = None
        return bool(self._cork_depth)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """The condition holds; the loop has turned here, unless it does in its own thread.

        Args:
            holds: the condition.
            deadline_s: the longest that this lasts.
            what: is waited for, for the error.

        Raises:
            PeerError: time is up.
        """
        if not self.wait(condition, timeout_s):
            raise PeerError(f"waited {timeout_s} s for {what}; look at what the other side does instead")

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Tell whether the condition holds, or comes to hold in time; meanwhile the loop turns.

        It turns in the thread that waits, if no other turns it: so an answer wakes that one, not one that wakes it.

        Args:
            holds: the condition.
            deadline_s: the longest that this lasts.
        """
        end = self.clock() + timeout_s
        while True:
            with self.lock:
                self._raise_failure()
                if condition():
                    return True
                self._flush()
                left = end - self.clock()
                if left <= 0:
                    return False
                if self._is_run_elsewhere:
                    self._was_run = True  # the loop's own thread steps aside after this turn
                    self._ran.wait(min(left, 1.0))
                    continue
                self._num_waiters_running += 1
            try:
                self.run_once(left)
            finally:
                with self.lock:
                    self._num_waiters_running -= 1
                    self._was_run = True
                    self._ran.notify_all()

    @property
    def _is_run_elsewhere(self) -> bool:
        """Whether another thread turns the loop, or has to; asked with the lock."""
        if self._thread is None or self._thread is threading.current_thread():
            return False
        return self._is_thread_running or self._num_waiters_running > 0

    def start(self) -> None:
        """It turns in a thread of its own until it is closed."""
        self._thread = threading.Thread(target=self._run, name="counterpoint wire", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_stopping:
            with self.lock:
                self._yield_to_waiters()
                self._is_thread_running = True
            try:
                self.run_once(MAX_PAUSE_S)
            except BaseException as error:  # noqa: BLE001 - told to whoever waits
                with self.lock:
                    self._failure = error
                    self._ran.notify_all()
                return
            finally:
                with self.lock:
                    self._is_thread_running = False

    def _yield_to_waiters(self) -> None:
        """Nobody who waits turns the loop, nor has just done so and left nothing to send; called with the lock."""
        while not self._is_stopping and (self._num_waiters_running or (self._was_run and not self._is_sending)):
            self._was_run = False
            self._yielding.wait(YIELD_S)

    @property
    def _is_sending(self) -> bool:
        return any(events & WRITE for events in self._handlers.values())

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """All that it looked after is gone: no socket and no thread is left."""
        with self.lock:
            self._is_stopping = True
            self._yielding.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None
        with self.lock:
            for watched in list(self._handlers):
                watched.abort()
            self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()
