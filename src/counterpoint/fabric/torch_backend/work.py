"""What torch holds of an operation that it has started: it can be waited for, asked for a future, or forgotten."""

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
    """What torch passes with every operation.

    Attributes:
        timeout: how long it may take; not positive where the group's own deadline counts.
    """

    timeout: timedelta


@dataclass(frozen=True, slots=True)
class StartedCollective:
    """An operation in the words of the fabric.

    Attributes:
        works: what is under way.
        tensors: where the result is found.
        after: what is left to do when all of that is complete.
    """

    works: Sequence[Work]
    tensors: Sequence[Tensor]
    after: Callable[[], object] | None = None


class ProcessGroupWork(dist._Work):  # type: ignore[name-defined,misc]  # noqa: SLF001 - torch's own name for what is subclassed
    """A collective that goes on; its tensors live for as long as it does, also where nobody keeps this object.

    Args:
        started: what it is.
        queue: the works of its group.
        seconds: its own deadline; the group's where None.
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
        """It is complete on this rank.

        Raises:
            PeerError: the members disagree, one of them is gone, or the deadline has passed.
        """
        if not self._is_done:
            self._queue.finish(self, timeout_seconds(timeout))
        if self.error is not None:
            raise self.error
        return True

    def get_future(self) -> Future[Any]:
        """Return a future that holds the tensors, complete.

        Collectives in shared memory go on in the ranks that wait for them: no thread takes a processor from them.
        Whoever waits for a future of torch, as DDP's reducer does, can only sleep until somebody else completes it, and
        there is nobody else. So the collective is finished here; DDP asks for the future of a bucket when all of its
        gradients are there, and on the processors of one host there is nothing to gain from doing it later.
        """
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self._tensors)
        return future

    def is_completed(self) -> bool:
        """Finish it: a program that asks until it hears yes would otherwise ask for ever."""
        if not self._is_done:
            self._queue.finish(self, None)
        return True

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._is_done and self.error is None

    def exception(self) -> CounterpointError | None:
        """Return what it has ended with, if not well."""
        return self.error

    def result(self) -> list[Tensor]:
        """Return the tensors."""
        return self._tensors

    def synchronize(self) -> None:
        """Wait, as on a device."""
        self.wait()

    def complete(self) -> None:
        """All of it is done on this rank, in the turn of its group; an error is kept for whoever waits."""
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
    """The collectives of one group that have been started and not waited for, in their order.

    The fabric completes them in this order, too; so whoever waits for one finishes those before it.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._works: deque[ProcessGroupWork] = deque()
        self._lock = RLock()

    def add(self, started: StartedCollective, options: OpOptions | None) -> ProcessGroupWork:
        """Return the work for what has been started just now."""
        work = ProcessGroupWork(started, self, None if options is None else timeout_seconds(options.timeout))
        with self._lock:
            self._works.append(work)
        return work

    def finish(self, work: ProcessGroupWork, seconds: float | None) -> None:
        """The work and all before it are done."""
        with self._lock:
            while not work.is_done:
                with with_timeout(self._fabric, seconds or self._works[0].seconds):
                    self._works[0].complete()
                self._works.popleft()

    def finish_all(self) -> None:
        """All are done, well or not."""
        with self._lock:
            if self._works:
                self.finish(self._works[-1], None)


@contextmanager
def with_timeout(fabric: Fabric, seconds: float | None) -> Iterator[None]:
    """Waits of the fabric last no longer than this; than its own deadline where None."""
    usual = fabric.timeout_s
    fabric.timeout_s = usual if seconds is None else seconds
    try:
        yield
    finally:
        fabric.timeout_s = usual


def timeout_seconds(timeout: timedelta) -> float | None:
    """Return a deadline as torch gives it; None where it gives none."""
    seconds = timeout.total_seconds()
    return seconds if seconds > 0 else None
