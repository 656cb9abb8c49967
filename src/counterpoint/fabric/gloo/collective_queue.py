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
from counterpoint.fabric.c10d import GLOO_TIMEOUT, AllgatherOptions, GlooProcessGroup, GlooWork
from counterpoint.fabric.fingerprint import CollectiveSignature, describe_mismatch, fingerprint
from counterpoint.fabric.frames import (
    FrameHeader,
    FrameKind,
    all_headers_match,
    decode,
    encode,
    encode_into,
    padded_size,
    read_header,
)  # fmt: skip
from counterpoint.fabric.gloo.ops import StartedOps

ANNOUNCEMENT_BYTES = 512
VALUE_BYTES = 128  # a value up to this long travels inside the announcement
WAIT_SLICE_S = 0.5  # so often a wait lets Python look at signals

StartCollective = Callable[[GlooProcessGroup], StartedOps]


@dataclass(frozen=True, slots=True)
class GroupMember:
    """Who this rank is in a lane: the job's number, the generation of its ranks, and the ranks of the group."""

    job: int
    generation: int
    rank: int
    group: tuple[int, ...]


@dataclass(eq=False, slots=True)
class PendingCollective:
    """A collective that this rank has started; it changes as the collective goes on, so it is not frozen."""

    operation: CollectiveSignature
    start_data: StartCollective | None
    value: bytes
    index: int
    own: Tensor
    announcements: Tensor
    announcement: GlooWork
    is_started: bool = False
    works: list[GlooWork] = field(default_factory=list)
    after: Callable[[], object] | None = None
    error: Exception | None = None
    values: list[bytes] = field(default_factory=list)
    on_values: Callable[[Sequence[bytes]], object] | None = None


class GlooCollectiveQueue:
    """One group's connections, and its collectives that have been announced but not launched."""

    def __init__(self, member: GroupMember, announcements: GlooProcessGroup, data: GlooProcessGroup) -> None:
        self.member = member
        self._announcements: GlooProcessGroup | None = announcements
        self._data: GlooProcessGroup | None = data
        self._queue: deque[PendingCollective] = deque()
        self._open: set[PendingCollective] = set()
        self._next_index = 0
        self._error: Exception | None = None  # of the first that failed; its members may announce nothing after it
        self._lock = Lock()

    def start(
        self,
        operation: CollectiveSignature,
        start_data: StartCollective | None,
        value: bytes = b"",
        on_values: Callable[[Sequence[bytes]], object] | None = None,
    ) -> PendingCollective:
        """Return the collective, announced to the other members; without ``launch`` it only exchanges values.

        Args:
            operation: what all members are about to do.
            launch: starts it.
            value: this rank's; what travels inside of announcements has arrived with them.
            take: is given all members' values, short ones, where the collective is waited for.
        """
        room = bytearray(ANNOUNCEMENT_BYTES)
        stamp = self._header(FrameKind.OPERATION, operation, self._next_index)
        encode_into(memoryview(room), stamp, signature_text(operation), value_tensors(operation, value))
        own = torch.frombuffer(room, dtype=torch.uint8)
        announced = torch.empty((len(self.member.group), ANNOUNCEMENT_BYTES), dtype=torch.uint8)
        with self._lock:
            work = start_all_gather(require_open(self._announcements), announced, own)
            start = PendingCollective(
                operation, start_data, value, self._next_index, own, announced, work, on_values=on_values
            )
            self._next_index += 1
            self._queue.append(start)
            self._open.add(start)
        return start

    def advance(self) -> bool:
        """Whatever has been announced by all members is launched; return whether something has not."""
        if not self._queue:
            return False
        with self._lock:
            while self._queue and self._queue[0].announcement.is_completed():
                self._start(self._queue.popleft())
            return bool(self._queue)

    def finish(self, pending: PendingCollective, timeout_s: float) -> None:
        """The collective is complete on this rank; a PeerError where the members disagree, otherwise as `wait_within`."""
        end = time.monotonic() + timeout_s
        while not pending.is_started and self._error is None:
            with self._lock:  # where the deputy is just launching it, this waits until it has
                oldest = self._queue[0] if self._queue else pending
            wait_within(oldest.announcement, end - time.monotonic())
            self.advance()
        if not pending.is_started:
            raise pending.error or self._error or RuntimeError("the fabric has been closed")
        for work in pending.works:
            wait_within(work, end - time.monotonic())
        if pending.after is not None:
            pending.after()
        pending.works.clear()
        pending.after = None
        self._open.discard(pending)

    @property
    def is_idle(self) -> bool:
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

    def _start(self, pending: PendingCollective) -> None:
        """The collective, which all members have announced, is under way, or its error is known."""
        try:
            wait_within(pending.announcement, WAIT_SLICE_S)
            self._check_same(pending)
            data = require_open(self._data)
            pending.works, pending.after = (
                pending.start_data(data) if pending.start_data else self._exchange_values(pending, data)
            )
            pending.is_started = True
        except Exception as error:  # noqa: BLE001 - whoever waits for the collective raises it
            pending.error = error
            self._error = self._error or error

    def _check_same(self, pending: PendingCollective) -> None:
        """All members are about to do the same.

        Raises:
            PeerError: they are not, or an announcement is damaged or of another job.
        """
        if all_headers_match(pending.own, pending.announcements, self.member.group):
            return
        expected = self._header(FrameKind.OPERATION, pending.operation, pending.index)
        stamps = [read_header(row).header for row in pending.announcements]
        for rank, stamp in zip(self.member.group, stamps, strict=True):
            if stamp != replace(expected, source=rank, fingerprint=stamp.fingerprint):
                raise PeerError(
                    f"rank {self.member.rank} received {stamp} where rank {rank} of {expected} should have answered; "
                    "all ranks must be of one job and generation: look for ranks of an earlier run"
                )
        frames = [decode(trim_frame(row)) for row in pending.announcements]
        seen = {frame.header.source: (frame.header.fingerprint, frame.label) for frame in frames}
        error = describe_mismatch(seen, pending.index)
        if error is not None:
            raise PeerError(error)

    def _exchange_values(self, pending: PendingCollective, data: GlooProcessGroup) -> StartedOps:
        """All members' values are in, or under way where one is too long for an announcement."""
        found = [frame.tensors[0] for frame in map(decode, map(trim_frame, pending.announcements)) if frame.tensors]
        if not found or all(tensor.dtype == torch.uint8 for tensor in found):
            pending.values = [tensor.numpy().tobytes() for tensor in found]
            return [], None if pending.on_values is None else partial(pending.on_values, pending.values)
        stamp = self._header(FrameKind.VALUE, pending.operation, pending.index)
        frame = encode(stamp, pending.operation.label, [bytes_tensor(pending.value)])
        longest = max(int(tensor) if tensor.dtype == torch.int64 else len(tensor) for tensor in found)
        own = torch.zeros(len(frame) - padded_size(len(pending.value)) + padded_size(longest), dtype=torch.uint8)
        own[: len(frame)] = frame
        rows = torch.empty((len(found), len(own)), dtype=torch.uint8)

        def read() -> None:
            pending.values = [decode(trim_frame(row)).tensors[0].numpy().tobytes() for row in rows]

        return [start_all_gather(data, rows, own)], read

    def _header(self, kind: FrameKind, operation: CollectiveSignature, index: int) -> FrameHeader:
        member = self.member
        return FrameHeader(kind, member.job, member.generation, member.rank, index, fingerprint(operation))


def start_all_gather(gloo: GlooProcessGroup, rows: Tensor, own: Tensor) -> GlooWork:
    """Start to fill row ``i`` with what member ``i`` gives."""
    options = AllgatherOptions()
    options.timeout = GLOO_TIMEOUT
    return gloo.allgather([list(rows)], [own], options)


def wait_within(work: GlooWork, seconds: float) -> None:
    """The work is complete, and signals were served; TimeoutError where it is late, RuntimeError where it failed."""
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        try:
            work.wait(timedelta(seconds=max(min(left, WAIT_SLICE_S), 0.001)))
            return
        except RuntimeError:
            if work.is_completed():
                work.wait(timedelta(seconds=WAIT_SLICE_S))  # raises what went wrong; returns if it ended just now
                return
            if left <= 0:
                raise TimeoutError from None


def value_tensors(operation: CollectiveSignature, value: bytes) -> list[Tensor]:
    """Return what an announcement carries: the value, only its length where it is long, or nothing."""
    if operation.kind not in {"gather_values", "all_gather"} or not value:
        return []
    return [bytes_tensor(value) if len(value) <= VALUE_BYTES else torch.tensor(len(value))]


def bytes_tensor(value: bytes) -> Tensor:
    """Return the bytes as a flat uint8 tensor."""
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


@lru_cache(maxsize=4096)
def signature_text(operation: CollectiveSignature) -> str:
    """Return how the operation reads in at most 240 bytes, its middle left out where it is longer."""
    text = str(operation)
    full = text.encode()
    return text if len(full) <= 240 else f"{full[:160].decode(errors='ignore')} … {full[-70:].decode(errors='ignore')}"


def trim_frame(row: Tensor) -> Tensor:
    """Return the frame that a longer row starts with."""
    return row[: read_header(row).frame_bytes]


def require_open(gloo: GlooProcessGroup | None) -> GlooProcessGroup:
    """Return the connection.

    Raises:
        RuntimeError: it has been closed.
    """
    if gloo is None:
        raise RuntimeError("the fabric has been closed")
    return gloo
