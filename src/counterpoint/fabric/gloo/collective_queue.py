"""The collectives of one group on gloo: members compare signatures before any data moves.

gloo itself does not compare operations: it would reduce mismatched data, or end the process. So every collective is
announced by a small frame, which all members exchange on a connection of its own; the data follows on a second
connection when all announcements are equal::

    announcements   [0: all_reduce grad0][1: all_reduce grad1][2: ...
    data                                 [0: bytes of grad0  ][1: bytes of grad1 ...

Starting never blocks: gloo's threads exchange announcements, and the first thread that polls, a waiting rank's or the
progress thread, starts the data. On both connections the order is that in which the group starts its collectives.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from threading import Lock

import torch
from torch import Tensor

from counterpoint.errors import PeerError
from counterpoint.fabric.c10d import GLOO_TIMEOUT, AllgatherOptions, GlooProcessGroup, GlooWork
from counterpoint.fabric.fingerprint import CollectiveSignature, describe_mismatch, fingerprint, signature_text
from counterpoint.fabric.frames import (
    FrameHeader,
    FrameKind,
    all_headers_match,
    decode,
    encode,
    encode_into,
    read_header,
)
from counterpoint.fabric.gloo.ops import StartedOps
from counterpoint.rpc.tensor_codec import padded_size  # fmt: skip

ANNOUNCEMENT_BYTES = 512
VALUE_BYTES = 128  # a value up to this long is sent inside the announcement
WAIT_SLICE_S = 0.5  # a wait returns to Python this often, for signals

StartCollective = Callable[[GlooProcessGroup], StartedOps]


@dataclass(frozen=True, slots=True)
class GroupMember:
    """Identity of this rank in a group: the job's number, the generation of its ranks, the rank, and the group."""

    job: int
    generation: int
    rank: int
    group: tuple[int, ...]


@dataclass(eq=False, slots=True)
class PendingCollective:
    """A started collective; mutable, because it progresses.

    Attributes:
        start_data: starts the data exchange; None if the collective only exchanges values.
        value: this rank's value.
        index: number of collectives that the group has started before.
        own: the own announcement.
        announcements: all members' announcements, one per row.
        announcement: the work that exchanges them.
        is_started: whether the data exchange has started.
        works: of the data exchange.
        after: called once when they are complete.
        error: why it cannot complete.
        values: the members' values, once received.
        on_values: called with them by the waiting thread.
    """

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
    """The two connections of one group, and its collectives whose data has not started."""

    def __init__(self, member: GroupMember, announcements: GlooProcessGroup, data: GlooProcessGroup) -> None:
        self.member = member
        self._announcements: GlooProcessGroup | None = announcements
        self._data: GlooProcessGroup | None = data
        self._queue: deque[PendingCollective] = deque()
        self._open: set[PendingCollective] = set()
        self._next_index = 0
        self._error: Exception | None = None  # of the first failed collective; later ones fail, too
        self._lock = Lock()

    def start(
        self,
        operation: CollectiveSignature,
        start_data: StartCollective | None,
        value: bytes = b"",
        on_values: Callable[[Sequence[bytes]], object] | None = None,
    ) -> PendingCollective:
        """Announce a collective to the other members; return it.

        Args:
            operation: what all members are about to do.
            start_data: starts the data exchange; None to only exchange values.
            value: this rank's value; a short one is sent inside the announcement.
            on_values: called with all members' values by the waiting thread, if they were short.
        """
        buffer = bytearray(ANNOUNCEMENT_BYTES)
        header = self._header(FrameKind.OPERATION, operation, self._next_index)
        encode_into(memoryview(buffer), header, signature_text(operation), value_tensors(operation, value))
        own = torch.frombuffer(buffer, dtype=torch.uint8)
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
        """Start the data of every collective that all members have announced; return whether any other is left."""
        if not self._queue:
            return False
        with self._lock:
            while self._queue and self._queue[0].announcement.is_completed():
                self._start(self._queue.popleft())
            return bool(self._queue)

    def finish(self, pending: PendingCollective, timeout_s: float) -> None:
        """Block until the collective is complete on this rank.

        Raises:
            PeerError: the members disagree.
            TimeoutError: it is not complete in time.
            RuntimeError: a connection failed.
        """
        end = time.monotonic() + timeout_s
        while not pending.is_started and self._error is None:
            with self._lock:  # also waits while the progress thread is starting it
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
        """Whether nothing is pending."""
        return not self._open

    def close(self) -> None:
        """Release the connections; gloo closes them when nothing is pending."""
        with self._lock:
            for start in self._open:
                start.error = None  # its traceback refers to this queue, and would keep gloo's threads alive
            self._error = None
            self._queue.clear()
            self._open.clear()
            self._announcements = self._data = None

    def _start(self, pending: PendingCollective) -> None:
        """Start the data exchange, or record why it cannot start."""
        try:
            wait_within(pending.announcement, WAIT_SLICE_S)
            self._check_same(pending)
            data = require_open(self._data)
            pending.works, pending.after = (
                pending.start_data(data) if pending.start_data else self._exchange_values(pending, data)
            )
            pending.is_started = True
        except Exception as error:  # noqa: BLE001 - raised by the wait for the collective
            pending.error = error
            self._error = self._error or error

    def _check_same(self, pending: PendingCollective) -> None:
        """Check that all members have announced the same collective.

        Raises:
            PeerError: they have not, or an announcement is damaged or of another job.
        """
        if all_headers_match(pending.own, pending.announcements, self.member.group):
            return
        expected = self._header(FrameKind.OPERATION, pending.operation, pending.index)
        headers = [read_header(row).header for row in pending.announcements]
        for rank, header in zip(self.member.group, headers, strict=True):
            if header != replace(expected, source=rank, fingerprint=header.fingerprint):
                raise PeerError(
                    f"rank {self.member.rank} received {header} from rank {rank} in answer to {expected}; all ranks "
                    "must be "
                    "of one job and generation: look for ranks of an earlier run"
                )
        frames = [decode(trim_frame(row)) for row in pending.announcements]
        seen = {frame.header.source: (frame.header.fingerprint, frame.label) for frame in frames}
        position = pending.operation.position
        error = describe_mismatch(seen, pending.index if position < 0 else position)
        if error is not None:
            raise PeerError(error)

    def _exchange_values(self, pending: PendingCollective, data: GlooProcessGroup) -> StartedOps:
        """Return the members' values from their announcements, or start to exchange values that are too long."""
        values = [frame.tensors[0] for frame in map(decode, map(trim_frame, pending.announcements)) if frame.tensors]
        if not values or all(tensor.dtype == torch.uint8 for tensor in values):
            pending.values = [tensor.numpy().tobytes() for tensor in values]
            return [], None if pending.on_values is None else partial(pending.on_values, pending.values)
        header = self._header(FrameKind.VALUE, pending.operation, pending.index)
        frame = encode(header, pending.operation.label, [bytes_tensor(pending.value)])
        max_bytes = max(int(tensor) if tensor.dtype == torch.int64 else len(tensor) for tensor in values)
        own = torch.zeros(len(frame) - padded_size(len(pending.value)) + padded_size(max_bytes), dtype=torch.uint8)
        own[: len(frame)] = frame
        rows = torch.empty((len(values), len(own)), dtype=torch.uint8)

        def read() -> None:
            pending.values = [decode(trim_frame(row)).tensors[0].numpy().tobytes() for row in rows]

        return [start_all_gather(data, rows, own)], read

    def _header(self, kind: FrameKind, operation: CollectiveSignature, index: int) -> FrameHeader:
        member = self.member
        return FrameHeader(kind, member.job, member.generation, member.rank, index, fingerprint(operation))


def start_all_gather(gloo: GlooProcessGroup, rows: Tensor, own: Tensor) -> GlooWork:
    """Start to fill row ``i`` with member ``i``'s tensor."""
    options = AllgatherOptions()
    options.timeout = GLOO_TIMEOUT
    return gloo.allgather([list(rows)], [own], options)


def wait_within(work: GlooWork, seconds: float) -> None:
    """Wait for a work, serving signals; raise TimeoutError if it is late, RuntimeError if it failed."""
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        try:
            work.wait(timedelta(seconds=max(min(left, WAIT_SLICE_S), 0.001)))
            return
        except RuntimeError:
            if work.is_completed():
                work.wait(timedelta(seconds=WAIT_SLICE_S))  # raises its error; returns if it completed just now
                return
            if left <= 0:
                raise TimeoutError from None


def value_tensors(operation: CollectiveSignature, value: bytes) -> list[Tensor]:
    """Return what an announcement carries: the value, only its length if it is long, or nothing."""
    if operation.kind not in {"gather_values", "all_gather"} or not value:
        return []
    return [bytes_tensor(value) if len(value) <= VALUE_BYTES else torch.tensor(len(value))]


def bytes_tensor(value: bytes) -> Tensor:
    """Return the bytes as a flat uint8 tensor."""
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def trim_frame(row: Tensor) -> Tensor:
    """Return the frame at the start of a padded row."""
    return row[: read_header(row).frame_bytes]


def require_open(gloo: GlooProcessGroup | None) -> GlooProcessGroup:
    """Return the connection.

    Raises:
        RuntimeError: it has been closed.
    """
    if gloo is None:
        raise RuntimeError("the fabric has been closed")
    return gloo
