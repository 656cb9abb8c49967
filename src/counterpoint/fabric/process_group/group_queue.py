"""The collectives of one group on its process group: those that are new are announced, and all start in one order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from threading import Lock, RLock
from typing import Any

import torch

from counterpoint.fabric.c10d import DataProcessGroup, GlooWork
from counterpoint.fabric.fabric import Group, Work
from counterpoint.fabric.fingerprint import CollectiveSignature
from counterpoint.fabric.gloo.collective_queue import wait_within
from counterpoint.fabric.gloo.ops import StartedOps
from counterpoint.fabric.gloo.transport import GlooFabric
from counterpoint.fabric.process_group.order import CollectiveLog

StartOnProcessGroup = Callable[[DataProcessGroup], StartedOps]


@dataclass(eq=False, slots=True)
class QueuedCollective:
    """A collective of a process group; mutable, because it progresses.

    Attributes:
        signature: what all members do.
        index: number of collectives that the group has started before.
        start_data: starts it on the process group; None once it has.
        stream: entered around that, so that it is ordered after what the caller has launched on its device.
        announcement: of this collective or of the last one before it that was announced; None once it is started.
        is_agreed: whether it may start.
        is_started: whether it was started on the process group.
        works: of the process group.
        after: called once when they are complete.
        error: why it could not be started, or has failed.
        is_finished: whether a wait has finished it.
    """

    signature: CollectiveSignature
    index: int
    start_data: StartOnProcessGroup | None
    stream: AbstractContextManager[Any]
    announcement: Work | None = None
    is_agreed: bool = False
    is_started: bool = False
    works: list[GlooWork] = field(default_factory=list)
    after: Callable[[], object] | None = None
    error: Exception | None = None
    is_finished: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether nothing is pending on the process group; the wait does the rest."""
        return self.is_finished or (self.is_started and all(work.is_completed() for work in self.works))


class GroupQueue:
    """The process group of one group, and its collectives that are not complete.

    Args:
        group: its members.
        control: compares announcements.
        process_group: moves the tensors.
        waits_on_host: whether its waits block the host.

    Attributes:
        group: as above.
        log: all collectives that were started.
        num_moved: how many of them were started on the process group.
    """

    def __init__(
        self, group: Group, control: GlooFabric, process_group: DataProcessGroup, *, waits_on_host: bool
    ) -> None:
        self.group = group
        self.log = CollectiveLog()
        self.num_moved = 0
        self._control = control
        self._process_group: DataProcessGroup | None = process_group
        self._waits_on_host = waits_on_host
        self._order_lock = Lock()  # held while a collective is logged and announced
        self._lock = RLock()  # never held while `control` is called: its threads call `_on_agreed` with its own lock
        self._queue: deque[QueuedCollective] = deque()  # not started on the process group, in order
        self._open: deque[QueuedCollective] = deque()  # not known to be complete, in order
        self._last_announcement: Work | None = None
        self._progress_s = time.monotonic()

    def start(
        self, signature: CollectiveSignature, start_data: StartOnProcessGroup, stream: AbstractContextManager[Any]
    ) -> QueuedCollective:
        """Start a collective, at once if nothing is new in it; return it.

        Args:
            signature: what all members do.
            start_data: starts it on the process group.
            stream: entered around that, which may be on another thread.
        """
        with self._order_lock:
            collective = QueuedCollective(signature, self.log.count, start_data, stream)
            is_new = self.log.append(signature)
            with self._lock:
                if not self._open:
                    self._progress_s = time.monotonic()
                self._open.append(collective)
                self._queue.append(collective)
            if is_new:
                announced = replace(signature, position=collective.index, device="")  # no tensor goes with it
                self._last_announcement = self._control.start(announced, lambda _: self._on_agreed(collective))
            with self._lock:
                if not collective.is_started:
                    collective.announcement = self._last_announcement
            if not is_new:
                self._on_agreed(collective)
        return collective

    def finish(self, collective: QueuedCollective, timeout_s: float) -> None:
        """Block until the collective is complete on this rank; on a device, make the current stream wait for it.

        Raises:
            PeerError: the members disagree on a collective that was announced.
            TimeoutError: it is not complete in time.
            RuntimeError: a connection failed.
        """
        end = time.monotonic() + timeout_s
        announcement = collective.announcement
        if announcement is not None and not announcement.completes_within(timeout_s):
            raise TimeoutError
        if collective.error is not None:
            raise RuntimeError(str(collective.error)) from collective.error
        if not collective.is_started:
            raise RuntimeError("the fabric has been closed")
        for work in collective.works:
            if self._waits_on_host:
                wait_within(work, end - time.monotonic())
            else:
                work.wait()  # type: ignore[call-arg]  # with a timeout it might block the host
        if collective.after is not None:
            collective.after()
        collective.after = None
        if self._waits_on_host:
            collective.works = []
        collective.is_finished = self._waits_on_host or not collective.works

    def completes_within(self, collective: QueuedCollective, seconds: float) -> bool:
        """Wait for at most ``seconds``; return whether a wait would not block."""
        end = time.monotonic() + seconds
        announcement = collective.announcement
        if announcement is not None and not announcement.completes_within(seconds):
            return False
        while not collective.is_complete:
            if time.monotonic() >= end:
                return False
            time.sleep(0.0005)
        return True

    def oldest_pending(self) -> tuple[QueuedCollective, float] | None:
        """Return the oldest collective that is not complete, and for how long none has become complete."""
        with self._lock:
            while self._open and self._open[0].is_complete:
                self._open[0].error = self._open[0].error or find_error(self._open[0].works)
                if self._open[0].error is not None:
                    break
                self._open.popleft()
                self._progress_s = time.monotonic()
            return (self._open[0], time.monotonic() - self._progress_s) if self._open else None

    def close(self) -> None:
        """Release the process group."""
        with self._lock:
            for collective in self._queue:
                collective.announcement = collective.start_data = None
            self._queue.clear()
            self._open.clear()
            self._process_group = self._last_announcement = None

    def _on_agreed(self, collective: QueuedCollective) -> StartedOps:
        """Start all collectives that may start; called by some thread when all members have announced this one."""
        with self._lock:
            collective.is_agreed = True
            while self._queue and self._queue[0].is_agreed:
                self._start_data(self._queue.popleft())
        return [], None

    def _start_data(self, collective: QueuedCollective) -> None:
        try:
            if self._process_group is None or collective.start_data is None:
                raise RuntimeError("the fabric has been closed")
            with collective.stream, torch.no_grad():
                collective.works, collective.after = collective.start_data(self._process_group)
            collective.start_data = None  # it refers to tensors
            self.num_moved = collective.index + 1
            collective.is_started = True
            collective.announcement = None  # it refers to this queue
        except Exception as error:  # noqa: BLE001 - raised by the wait for the collective
            collective.error = error


def find_error(works: Sequence[GlooWork]) -> Exception | None:
    """Return the error of a work that has ended with one; None if all have succeeded."""
    try:
        for work in works:
            work.wait()  # type: ignore[call-arg]  # it has ended; with a timeout it might block the host
    except RuntimeError as error:
        return error
    return None
