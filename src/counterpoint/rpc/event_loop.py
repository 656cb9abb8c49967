"""Event loop over all connections of a process: readiness, deadlines, and waiting for conditions.

The loop is run by a thread that waits for something, or by a thread of its own. All callbacks run with the loop's lock
held, in whichever thread, so they never run concurrently.
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

MAX_PAUSE_S = 0.1  # longest select: another thread may have set an earlier deadline
YIELD_S = (
    0.005  # pause of the loop's own thread while others run it; bounds the delay of messages without a waiting thread
)
READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE


class EventHandler(Protocol):
    """Something that an event loop watches; it registers and unregisters itself."""

    @property
    def deadline(self) -> float:
        """When :meth:`on_timeout` is to be called, by the loop's clock; infinite for never."""

    def fileno(self) -> int:
        """Return the file descriptor of its socket."""

    def on_ready(self, events: int) -> None:
        """Read from or write to the socket."""

    def on_timeout(self) -> None:
        """Process the deadline."""

    def abort(self) -> None:
        """Close immediately."""


class EventLoop:
    """Event loop; closing it closes everything that it watches.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self._ran = threading.Condition(self.lock)
        self._yielding = threading.Condition(self.lock)
        self._num_waiters_running = 0  # waiting threads that run the loop in place of its own thread
        self._was_run = self._is_thread_running = False
        self._selector = selectors.DefaultSelector()
        self._handlers: dict[EventHandler, int] = {}
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._cork_depth: dict[int, int] = {}  # nesting depth by thread
        self._deferred: dict[Callable[[], None], None] = {}

    def watch(self, handler: EventHandler, events: int) -> None:
        """Watch a handler's socket for these events; 0 for deadlines only."""
        previous = self._handlers.get(handler)
        if previous == events:
            return
        if events & WRITE:
            self._yielding.notify_all()
        if events and previous:
            self._selector.modify(handler.fileno(), events, handler)
        elif events:
            self._selector.register(handler.fileno(), events, handler)
        elif previous:
            self._selector.unregister(handler.fileno())
        self._handlers[handler] = events

    def unwatch(self, handler: EventHandler) -> None:
        """Stop watching a handler; its socket may be closed then."""
        if self._handlers.pop(handler, 0):
            self._selector.unregister(handler.fileno())

    def run_once(self, timeout_s: float = 0.0) -> None:
        """Call the handlers that are ready or due.

        Args:
            timeout_s: longest wait for an event.
        """
        with self.lock:
            next_due = min((watched.deadline for watched in self._handlers), default=inf)
        wait_s = min(timeout_s, max(next_due - self.clock(), 0.0), MAX_PAUSE_S)
        ready = self._selector.select(wait_s)
        with self.lock:
            for key, events in ready:
                if key.data in self._handlers:  # an earlier handler may have unwatched it
                    key.data.on_ready(events)
            now = self.clock()
            for watched in [handler for handler in self._handlers if handler.deadline <= now]:
                watched.on_timeout()
            self._ran.notify_all()

    @contextmanager
    def cork(self) -> Iterator[None]:
        """Return a context whose messages are sent together at its end, unless a connection has much to send.

        Nested contexts of one thread end with the outermost.
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
        """Send corked messages; called with the lock held."""
        while self._deferred:  # flushing a batch of messages may defer the flush of its connection
            deferred, self._deferred = self._deferred, {}
            for flush in deferred:
                flush()

    def defer(self, flush: Callable[[], None]) -> bool:
        """Tell whether sending is corked; then ``flush`` is called once, at the end."""
        if self._cork_depth:
            self._deferred[flush] = None
        return bool(self._cork_depth)

    def wait_for(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait until the condition holds, running the loop unless another thread does.

        Args:
            condition: the condition.
            timeout_s: longest wait.
            what: is waited for, for the error.

        Raises:
            PeerError: time is up.
        """
        if not self.wait(condition, timeout_s):
            raise PeerError(f"waited {timeout_s} s for {what}; check what the peer is doing")

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Run the loop until the condition is true; return False if it is not in time.

        It runs in the waiting thread unless another thread runs it, so that a reply wakes the thread that waits for it.

        Args:
            condition: the condition.
            timeout_s: longest wait.
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
                    self._was_run = True  # the loop's own thread yields after this iteration
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
        """Whether another thread runs the loop, or is about to; called with the lock held."""
        if self._thread is None or self._thread is threading.current_thread():
            return False
        return self._is_thread_running or self._num_waiters_running > 0

    def start(self) -> None:
        """Run the loop in a thread of its own until it is closed."""
        self._thread = threading.Thread(target=self._run, name="counterpoint rpc", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_stopping:
            with self.lock:
                self._yield_to_waiters()
                self._is_thread_running = True
            try:
                self.run_once(MAX_PAUSE_S)
            except BaseException as error:  # noqa: BLE001 - raised in waiting threads
                with self.lock:
                    self._failure = error
                    self._ran.notify_all()
                return
            finally:
                with self.lock:
                    self._is_thread_running = False

    def _yield_to_waiters(self) -> None:
        """Wait while waiting threads run the loop, or just did and left nothing to send; called with the lock held."""
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
        """Close everything that is watched, and end the thread."""
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
