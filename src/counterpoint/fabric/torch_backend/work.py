"""torch's handle of a started collective: it supports ``wait`` and ``get_future``, and can be dropped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import RLock
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from counterpoint.errors import CounterpointError
from counterpoint.fabric.fabric import Fabric, Work


class OpOptions(Protocol):
    """Options that torch passes with every operation.

    Attributes:
        timeout: of this operation; not positive for the group's own.
    """

    timeout: timedelta


@dataclass(frozen=True, slots=True)
class StartedCollective:
    """An operation started on the fabric.

    Attributes:
        works: the fabric's.
        tensors: the results.
        after: called once when all works are complete.
    """

    works: Sequence[Work]
    tensors: Sequence[Tensor]
    after: Callable[[], object] | None = None


class ProcessGroupWork(dist._Work):  # type: ignore[name-defined,misc]  # noqa: SLF001 - torch's own name for what is subclassed
    """A collective in progress; keeps its tensors alive until it completes, even if this object is dropped.

    Args:
        started: the operation.
        queue: the pending works of its group.
        seconds: its own timeout; None for the group's.
    """

    def __init__(self, started: StartedCollective, queue: WorkQueue, seconds: float | None) -> None:
        super().__init__()
        self.seconds = seconds
        self.error: CounterpointError | None = None
        self._started: StartedCollective | None = started
        self._tensors = list(started.tensors)
        self._queue = queue
        self._is_done = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until complete on this rank.

        Raises:
            PeerError: the members disagree, one of them is gone, or the timeout has passed.
        """
        if not self._is_done:
            self._queue.finish(self, timeout_seconds(timeout))
        if self.error is not None:
            raise self.error
        return True

    def get_future(self) -> Future[Any]:
        """Complete the collective, and return a completed future with the tensors.

        Collectives in shared memory progress only in threads that wait for them, so that no background thread takes a
        core. A thread that waits for a torch future, as DDP's reducer does, just sleeps until another completes it;
        there is no other. DDP asks for a bucket's future when all of its gradients are ready, and on CPUs of one host
        nothing is gained by completing it later.
        """
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self._tensors)
        return future

    def is_completed(self) -> bool:
        """Complete the collective, and return True: a program that polls would otherwise poll forever."""
        if not self._is_done:
            self._queue.finish(self, None)
        return True

    def is_success(self) -> bool:
        """Whether it has succeeded."""
        return self._is_done and self.error is None

    def exception(self) -> CounterpointError | None:
        """Return its error, if it failed."""
        return self.error

    def result(self) -> list[Tensor]:
        """Return the tensors."""
        return self._tensors

    def synchronize(self) -> None:
        """Wait, as on a device."""
        self.wait()

    def complete(self) -> None:
        """Wait for the fabric's works; keep an error for :meth:`wait`. Called in the group's order."""
        try:
            if self._started is not None:
                for work in self._started.works:
                    work.wait()
                if self._started.after is not None:
                    self._started.after()
        except CounterpointError as error:
            self.error = error
        self._is_done, self._started = True, None

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._is_done


class WorkQueue:
    """Pending collectives of one group, in the order in which they were started.

    The fabric completes them in this order, so a wait for one first completes those before it.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._works: deque[ProcessGroupWork] = deque()
        self._lock = RLock()

    def add(self, started: StartedCollective, options: OpOptions | None) -> ProcessGroupWork:
        """Return the work of an operation that was just started."""
        work = ProcessGroupWork(started, self, None if options is None else timeout_seconds(options.timeout))
        with self._lock:
            self._works.append(work)
        return work

    def finish(self, work: ProcessGroupWork, seconds: float | None) -> None:
        """Complete the work and all before it."""
        with self._lock:
            while not work.is_done:
                with with_timeout(self._fabric, seconds or self._works[0].seconds):
                    self._works[0].complete()
                self._works.popleft()

    def finish_all(self) -> None:
        """Complete all, well or not."""
        with self._lock:
            if self._works:
                self.finish(self._works[-1], None)


@contextmanager
def with_timeout(fabric: Fabric, seconds: float | None) -> Iterator[None]:
    """Limit the fabric's waits inside the block; None keeps the fabric's own timeout."""
    fabric_timeout_s = fabric.timeout_s
    fabric.timeout_s = fabric_timeout_s if seconds is None else seconds
    try:
        yield
    finally:
        fabric.timeout_s = fabric_timeout_s


def timeout_seconds(timeout: timedelta) -> float | None:
    """Return torch's timeout in seconds; None if it is not positive."""
    seconds = timeout.total_seconds()
    return seconds if seconds > 0 else None
