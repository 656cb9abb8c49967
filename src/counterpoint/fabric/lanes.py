"""The collectives of one group on gloo: first all members compare what they are about to do, then they do it.

gloo itself would add up whatever arrives, or end the process. So every collective is announced by a small frame that
all members exchange on a connection of its own, and the data moves only when all announcements are equal. Starting
never waits: the exchange runs in gloo's threads, and whoever comes first, the rank that waits or its deputy, lets the
data follow. Both connections carry their traffic in the order in which the group starts its collectives, on every
member.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache, partial
from threading import Lock

import torch
from torch import Tensor

from counterpoint.errors import PeerError
from counterpoint.fabric.fingerprint import Operation, disagreement, fingerprint
from counterpoint.fabric.frames import (
    Kind,
    Stamp,
    all_match,
    decode,
    encode,
    encode_into,
    padded,
    read_prefix,
)  # fmt: skip
from counterpoint.fabric.gloo import GLOO_TIMEOUT, AllgatherOptions, Gloo, GlooWork
from counterpoint.fabric.wire import Launched

ANNOUNCEMENT_BYTES = 512
VALUE_BYTES = 128  # a value up to this long travels inside the announcement
SLICE_S = 0.5  # so often a wait lets Python look at signals

Launch = Callable[[Gloo], Launched]


@dataclass(frozen=True, slots=True)
class Member:
    """Who this rank is in a lane: the job's number, the generation of its ranks, and the ranks of the group."""

    job: int
    generation: int
    rank: int
    group: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Start:
    """A collective that this rank has started; it changes as the collective goes on, so it is not frozen."""

    operation: Operation
    launch: Launch | None
    value: bytes
    turn: int
    own: Tensor
    announced: Tensor
    announcement: GlooWork
    launched: bool = False
    works: list[GlooWork] = field(default_factory=list)
    after: Callable[[], object] | None = None
    error: Exception | None = None
    values: list[bytes] = field(default_factory=list)
    take: Callable[[Sequence[bytes]], object] | None = None


class Lane:
    """One group's connections, and its collectives that have been announced but not launched."""

    def __init__(self, member: Member, announcements: Gloo, data: Gloo) -> None:
        self.member = member
        self._announcements: Gloo | None = announcements
        self._data: Gloo | None = data
        self._queue: deque[Start] = deque()
        self._open: set[Start] = set()
        self._turn = 0
        self._error: Exception | None = None  # of the first that failed; its members may announce nothing after it
        self._lock = Lock()

    def start(
        self,
        operation: Operation,
        launch: Launch | None,
        value: bytes = b"",
        take: Callable[[Sequence[bytes]], object] | None = None,
    ) -> Start:
        """Return the collective, announced to the other members; without ``launch`` it only exchanges values.

        Args:
            operation: what all members are about to do.
            launch: starts it.
            value: this rank's; what travels inside of announcements has arrived with them.
            take: is given all members' values, short ones, where the collective is waited for.
        """
        room = bytearray(ANNOUNCEMENT_BYTES)
        stamp = self._stamp(Kind.OPERATION, operation, self._turn)
        encode_into(memoryview(room), stamp, reading(operation), value_tensors(operation, value))
        own = torch.frombuffer(room, dtype=torch.uint8)
        announced = torch.empty((len(self.member.group), ANNOUNCEMENT_BYTES), dtype=torch.uint8)
        with self._lock:
            work = gather(living(self._announcements), announced, own)
            start = Start(operation, launch, value, self._turn, own, announced, work, take=take)
            self._turn += 1
            self._queue.append(start)
            self._open.add(start)
        return start

    def advance(self) -> bool:
        """Whatever has been announced by all members is launched; return whether something has not."""
        if not self._queue:
            return False
        with self._lock:
            while self._queue and self._queue[0].announcement.is_completed():
                self._launch(self._queue.popleft())
            return bool(self._queue)

    def finish(self, start: Start, deadline_s: float) -> None:
        """The collective is complete on this rank; a PeerError where the members disagree, otherwise as `wait_for`."""
        end = time.monotonic() + deadline_s
        while not start.launched and self._error is None:
            with self._lock:  # where the deputy is just launching it, this waits until it has
                oldest = self._queue[0] if self._queue else start
            wait_for(oldest.announcement, end - time.monotonic())
            self.advance()
        if not start.launched:
            raise start.error or self._error or RuntimeError("the fabric has been closed")
        for work in start.works:
            wait_for(work, end - time.monotonic())
        if start.after is not None:
            start.after()
        start.works.clear()
        start.after = None
        self._open.discard(start)

    @property
    def is_quiet(self) -> bool:
        """Nothing is under way."""
        return not self._open

    def close(self) -> None:
        """The connections are forgotten; gloo closes them when nothing is under way."""
        with self._lock:
            for start in self._open:
                start.error = (
                    None  # its traceback leads back to the start, and would keep gloo's threads until collected
                )
            self._error = None
            self._queue.clear()
            self._open.clear()
            self._announcements = self._data = None

    def _launch(self, start: Start) -> None:
        """The collective, which all members have announced, is under way, or its error is known."""
        try:
            wait_for(start.announcement, SLICE_S)
            self._compare(start)
            data = living(self._data)
            start.works, start.after = start.launch(data) if start.launch else self._exchange(start, data)
            start.launched = True
        except Exception as error:  # noqa: BLE001 - whoever waits for the collective raises it
            start.error = error
            self._error = self._error or error

    def _compare(self, start: Start) -> None:
        """All members are about to do the same.

        Raises:
            PeerError: they are not, or an announcement is damaged or of another job.
        """
        if all_match(start.own, start.announced, self.member.group):
            return
        expected = self._stamp(Kind.OPERATION, start.operation, start.turn)
        stamps = [read_prefix(row).stamp for row in start.announced]
        for rank, stamp in zip(self.member.group, stamps, strict=True):
            if stamp != replace(expected, source=rank, fingerprint=stamp.fingerprint):
                raise PeerError(
                    f"rank {self.member.rank} received {stamp} where rank {rank} of {expected} should have answered; "
                    "all ranks must be of one job and generation: look for ranks of an earlier run"
                )
        frames = [decode(frame_of(row)) for row in start.announced]
        seen = {frame.stamp.source: (frame.stamp.fingerprint, frame.label) for frame in frames}
        error = disagreement(seen, start.turn)
        if error is not None:
            raise PeerError(error)

    def _exchange(self, start: Start, data: Gloo) -> Launched:
        """All members' values are in, or under way where one is too long for an announcement."""
        found = [frame.tensors[0] for frame in map(decode, map(frame_of, start.announced)) if frame.tensors]
        if not found or all(tensor.dtype == torch.uint8 for tensor in found):
            start.values = [tensor.numpy().tobytes() for tensor in found]
            return [], None if start.take is None else partial(start.take, start.values)
        stamp = self._stamp(Kind.VALUE, start.operation, start.turn)
        frame = encode(stamp, start.operation.label, [as_tensor(start.value)])
        longest = max(int(tensor) if tensor.dtype == torch.int64 else len(tensor) for tensor in found)
        own = torch.zeros(len(frame) - padded(len(start.value)) + padded(longest), dtype=torch.uint8)
        own[: len(frame)] = frame
        rows = torch.empty((len(found), len(own)), dtype=torch.uint8)

        def read() -> None:
            start.values = [decode(frame_of(row)).tensors[0].numpy().tobytes() for row in rows]

        return [gather(data, rows, own)], read

    def _stamp(self, kind: Kind, operation: Operation, turn: int) -> Stamp:
        member = self.member
        return Stamp(kind, member.job, member.generation, member.rank, turn, fingerprint(operation))


def gather(gloo: Gloo, rows: Tensor, own: Tensor) -> GlooWork:
    """Start to fill row ``i`` with what member ``i`` gives."""
    options = AllgatherOptions()
    options.timeout = GLOO_TIMEOUT
    return gloo.allgather([list(rows)], [own], options)


def wait_for(work: GlooWork, seconds: float) -> None:
    """The work is complete, and signals were served; TimeoutError where it is late, RuntimeError where it failed."""
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        try:
            work.wait(timedelta(seconds=max(min(left, SLICE_S), 0.001)))
            return
        except RuntimeError:
            if work.is_completed():
                work.wait(timedelta(seconds=SLICE_S))  # raises what went wrong; returns if it ended just now
                return
            if left <= 0:
                raise TimeoutError from None


def value_tensors(operation: Operation, value: bytes) -> list[Tensor]:
    """Return what an announcement carries: the value, only its length where it is long, or nothing."""
    if operation.kind not in {"gather_values", "all_gather"} or not value:
        return []
    return [as_tensor(value) if len(value) <= VALUE_BYTES else torch.tensor(len(value))]


def as_tensor(value: bytes) -> Tensor:
    """Return the bytes as a flat uint8 tensor."""
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


@lru_cache(maxsize=4096)
def reading(operation: Operation) -> str:
    """Return how the operation reads in at most 240 bytes, its middle left out where it is longer."""
    text = str(operation)
    full = text.encode()
    return text if len(full) <= 240 else f"{full[:160].decode(errors='ignore')} … {full[-70:].decode(errors='ignore')}"


def frame_of(row: Tensor) -> Tensor:
    """Return the frame that a longer row starts with."""
    return row[: read_prefix(row).frame_bytes]


def living(gloo: Gloo | None) -> Gloo:
    """Return the connection.

    Raises:
        RuntimeError: it has been closed.
    """
    if gloo is None:
        raise RuntimeError("the fabric has been closed")
    return gloo
