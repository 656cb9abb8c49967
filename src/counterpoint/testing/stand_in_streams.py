"""Streams and events of the stand-in device: what a GPU would run wrongly now and then is found every time.

Operations run at once and in the order of the program, so results are right. But every access to memory is compared
with a vector clock: an operation may read what another stream has written, and write what another has read or written,
only if an event or the host has ordered the two::

    stream 0 | write x . record e ........ write x       the second write needs another event: stream 1 may still read
    stream 1 | ............. wait e . read x

Operations on different bytes of one allocation need no order; the gaps of a view count as its bytes.

The device has a time of its own: an operation takes a millisecond, streams work side by side, and launching takes no
time, so that the device is behind the host until that waits::

    stream 0 | write x . e | ..... compute ..... | wait f
    stream 1 |             | wait e . read x . f

The host is ordered like a stream: a copy to pinned memory arrives when the host has waited for it. Before, the memory
has nan, or -1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

Clock: TypeAlias = dict[int, int]
"""For each stream how many of its operations have surely ended."""


OPERATION_MS = 1.0
"""How long an operation takes on a stream."""


class RaceError(RuntimeError):
    """Two streams, or a stream and the host, access the same memory, and nothing puts one after the other."""


class SourceLine(NamedTuple):
    """A line of a source file."""

    path: str
    number: int

    def __str__(self) -> str:
        return f"{self.path.rpartition('/counterpoint/')[2]}:{self.number}"


class Access(NamedTuple):
    """An operation's access to memory: its stream, its number in this stream, and its source line."""

    stream: int
    number: int
    line: SourceLine


@dataclass(eq=False, slots=True)
class AccessedRange:
    """The accesses to some bytes of an allocation that others have to be ordered with.

    Args:
        start: the first byte.
        stop: one past the last one.
        last_write: the last one.
        reads: by stream, the last read since the last write.
    """

    start: int
    stop: int
    last_write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)

    def cut(self, start: int, stop: int) -> AccessedRange:
        """Return a part of it."""
        return AccessedRange(start, stop, self.last_write, dict(self.reads))

    def all(self) -> Iterator[Access]:
        """Yield every access."""
        if self.last_write is not None:
            yield self.last_write
        yield from self.reads.values()


@dataclass(eq=False, slots=True)
class Accesses:
    """The accesses to one allocation.

    Args:
        stream: on which it was allocated.
        line: where it was allocated.
        ranges: those that were accessed, in order; they do not overlap.
        recorded_streams: those that ``record_stream`` has named.
    """

    stream: int
    line: SourceLine
    ranges: list[AccessedRange] = field(default_factory=list)
    recorded_streams: set[int] = field(default_factory=set)

    def cover(self, start: int, stop: int) -> list[AccessedRange]:
        """Return ranges of exactly these bytes, cut from those that are there, and made where there are none."""
        if len(self.ranges) == 1 and self.ranges[0].start == start and self.ranges[0].stop == stop:
            return self.ranges
        covered: list[AccessedRange] = []
        others: list[AccessedRange] = []
        position = start
        for one in self.ranges:
            low, high = max(one.start, start), min(one.stop, stop)
            if low >= high:
                others.append(one)
                continue
            if position < low:
                covered.append(AccessedRange(position, low))
            covered.append(one.cut(low, high))
            if one.start < low:
                others.append(one.cut(one.start, low))
            if high < one.stop:
                others.append(one.cut(high, one.stop))
            position = high
        if position < stop:
            covered.append(AccessedRange(position, stop))
        self.ranges = sorted([*covered, *others], key=lambda one: one.start)
        return covered

    def merge(self, covered: list[AccessedRange], write: Access) -> None:
        """Replace ranges of adjacent bytes by one that was only written."""
        if len(covered) > 1:
            self.ranges = [one for one in self.ranges if all(one is not other for other in covered[1:])]
        first = covered[0]
        first.stop, first.last_write, first.reads = covered[-1].stop, write, {}


class AccessedBytes(NamedTuple):
    """Bytes of an allocation that an operation reads or writes."""

    accesses: Accesses
    start: int
    stop: int


@dataclass(eq=False, slots=True)
class HostTransfer:
    """A copy between pinned memory and the device that the host has not waited for.

    Args:
        access: of the copy.
        finish: called when the host has waited for it.
    """

    access: Access
    finish: Callable[[], None]


class StreamOrder:
    """Which operations are surely ordered.

    Args:
        find_line: returns the source line that launches an operation.

    Attributes:
        errors: races that were found where none can be raised, as when memory is freed.
    """

    def __init__(self, find_line: Callable[[], SourceLine]) -> None:
        self.find_line = find_line
        self.clocks: dict[int, Clock] = {0: {}}
        self.host_clock: Clock = {}
        self.host_ms = 0.0  # of the device, when the host has last waited for it
        self.stream_ms: dict[int, float] = {}  # when each stream will have done what it was given
        self.errors: list[RaceError] = []
        self._counts: dict[int, int] = {}
        self._transfers: list[HostTransfer] = []
        self._unused: list[int] = []  # streams that nobody has any more
        self._current = threading.local()
        self._lock = threading.RLock()  # process groups start operations on threads of their own

    @property
    def current(self) -> int:
        """The stream of this thread's operations; 0 by default."""
        number: int = getattr(self._current, "stream", 0)
        return number

    @contextmanager
    def use(self, stream: int) -> Iterator[None]:
        """Launch this thread's operations on a stream inside."""
        former, self._current.stream = self.current, stream
        try:
            yield
        finally:
            self._current.stream = former

    def new_stream(self) -> int:
        """Return a stream that nobody else has; as torch's, it may have been used before."""
        if self._unused:
            return self._unused.pop()
        number = len(self.clocks)
        self.clocks[number] = {}
        return number

    def release_stream(self, number: int) -> None:
        """Let :meth:`new_stream` return a stream again."""
        self._unused.append(number)

    def new_accesses(self) -> Accesses:
        """Return the accesses to memory that is allocated now."""
        return Accesses(self.current, self.find_line())

    def snapshot(self, stream: int) -> Clock:
        """Return what has surely ended when a stream reaches this point; what an event records."""
        return {**self.host_clock, **self._merged(self.clocks[stream], self.host_clock)}

    def time_ms(self, stream: int) -> float:
        """Return when a stream reaches this point, in milliseconds of the device."""
        return max(self.stream_ms.get(stream, 0.0), self.host_ms)

    def wait(self, stream: int, clock: Clock, time_ms: float = 0.0) -> None:
        """Let a stream wait for what an event has recorded, and until its time."""
        self.clocks[stream] = self._merged(self.clocks[stream], clock)
        self.stream_ms[stream] = max(self.time_ms(stream), time_ms)

    def wait_on_host(self, clock: Clock | None = None, time_ms: float | None = None) -> None:
        """Let the host wait for what an event has recorded, and until its time; by default for all streams."""
        self.host_ms = (
            max(self.host_ms, *self.stream_ms.values(), 0.0) if time_ms is None else max(self.host_ms, time_ms)
        )
        for one in list(self.clocks.values()) if clock is None else (clock,):
            self.host_clock = self._merged(self.host_clock, one)
        arrived = [transfer for transfer in self._transfers if self.is_complete(transfer.access)]
        self._transfers = [transfer for transfer in self._transfers if not self.is_complete(transfer.access)]
        for transfer in arrived:
            transfer.finish()

    def is_complete(self, access: Access) -> bool:
        """Return whether the host has waited for an access."""
        return self.host_clock.get(access.stream, 0) >= access.number

    def add_transfer(self, transfer: HostTransfer) -> None:
        """Remember a copy until the host has waited for it."""
        self._transfers.append(transfer)

    def launch(self, reads: Iterable[AccessedBytes], writes: Iterable[AccessedBytes]) -> Access:
        """Order an operation on the current stream with all others that access the same memory.

        Raises:
            RaceError: nothing has ordered it with one of them; in torch's own threads, where an error would end the
                process, it is kept in ``errors``.
        """
        with self._lock:
            stream = self.current
            clock = self.clocks[stream] = self._merged(self.clocks[stream], self.host_clock)
            number = self._counts[stream] = clock[stream] = self._counts.get(stream, 0) + 1
            self.stream_ms[stream] = self.time_ms(stream) + OPERATION_MS
            access = Access(stream, number, self.find_line())
            for accesses, start, stop in writes:
                covered = accesses.cover(start, stop)
                for one in covered:
                    for other in one.all():
                        verb = "writes" if other is one.last_write else "reads"
                        self._require_order(clock, other, verb, "writes", access)
                accesses.merge(covered, access)
            for accesses, start, stop in reads:
                for one in accesses.cover(start, stop):
                    if one.last_write is not None and one.last_write is not access:
                        self._require_order(clock, one.last_write, "writes", "reads", access)
                    if one.last_write is not access:
                        one.reads[stream] = access
            return access

    def free(self, accesses: Accesses) -> None:
        """Record an error if memory is freed while a stream still uses it that nobody waits for.

        Torch's allocator gives it to the next tensor of the stream that it was allocated on, but not before the
        recorded streams come to this point, with all that they wait for.
        """
        known = {accesses.stream} | accesses.recorded_streams
        others = [access for one in accesses.ranges for access in one.all() if access.stream not in known]
        clock: Clock = {}
        for stream in known if others else ():
            clock = self._merged(clock, self._merged(self.clocks[stream], self.host_clock))
        for access in others:
            if clock.get(access.stream, 0) < access.number:
                self.errors.append(
                    RaceError(
                        f"memory of stream {accesses.stream}, allocated at {accesses.line}, is freed while stream "
                        f"{access.stream} uses it at {access.line}; call record_stream(tensor, stream), or let stream "
                        f"{accesses.stream} wait for stream {access.stream} before"
                    )
                )

    def _require_order(self, clock: Clock, other: Access, other_verb: str, verb: str, access: Access) -> None:
        if clock.get(other.stream, 0) >= other.number:
            return
        error = RaceError(
            f"stream {access.stream} {verb} at {access.line} what stream {other.stream} {other_verb} at "
            f"{other.line}, and nothing puts one after the other; record an event on stream {other.stream} and let "
            f"stream {access.stream} wait for it"
        )
        if is_python_thread():
            raise error
        self.errors.append(error)

    @staticmethod
    def _merged(clock: Clock, other: Clock) -> Clock:
        if not other or (
            not other.keys() - clock.keys() and all(clock[stream] >= number for stream, number in other.items())
        ):
            return clock
        return {stream: max(clock.get(stream, 0), other.get(stream, 0)) for stream in (*clock, *(other.keys() - clock))}


def is_python_thread() -> bool:
    """Return whether the current thread was started by Python, and not by torch."""
    return not isinstance(threading.current_thread(), threading._DummyThread)  # noqa: SLF001 - it has no public name
