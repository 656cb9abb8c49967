"""What is written down: the coordinator's decisions, one line each, and the entries of a shard that is kept alone.

A log as bytes: one frame for each line, so that what a crash has torn off is seen, and nothing else is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

import torch
from torch import Tensor

from counterpoint.errors import CheckpointError, PeerError
from counterpoint.fabric.frames import (
    HEADER_BYTES,
    MAGIC,
    FrameHeader,
    FrameKind,
    as_memoryview,
    decode,
    encode_parts,
    read_header,
)
from counterpoint.ps.message_codec import decode_as, encode_message
from counterpoint.ps.messages import DataTask, JournalEntry, Role, ShardReplicas, TaskOutcome


@dataclass(frozen=True, slots=True)
class MemberJoined:
    """This life belongs to the job."""

    name: str
    role: Role
    token: int
    incarnation: int
    address: str


@dataclass(frozen=True, slots=True)
class MemberLeft:
    """This member belongs to the job no longer: it said so, or was silent for too long."""

    name: str


@dataclass(frozen=True, slots=True)
class ReplicasAssigned:
    """These are to keep this shard from now on."""

    shard: int
    replicas: ShardReplicas


@dataclass(frozen=True, slots=True)
class TaskAssigned:
    """This worker has been given this task, in answer to the request with this sequence; None where all is done."""

    worker: str
    sequence: int
    task: DataTask | None


@dataclass(frozen=True, slots=True)
class TaskReported:
    """This worker has said how a task ended, in the request with this sequence."""

    worker: str
    sequence: int
    task: DataTask
    outcome: TaskOutcome
    version: int
    text: str


@dataclass(frozen=True, slots=True)
class LeaseExpired:
    """This task is to be given again, because its lease is over."""

    task: DataTask


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """A worker has asked for a cut, in the request with this sequence."""

    worker: str
    sequence: int


@dataclass(frozen=True, slots=True)
class SnapshotQuiesced:
    """Nothing is counted by halves; from here on the cut is saved."""

    snapshot: int


@dataclass(frozen=True, slots=True)
class ShardSaved:
    """The part of a cut that belongs to this shard is saved, as of this position of its journal."""

    snapshot: int
    shard: int
    position: int


@dataclass(frozen=True, slots=True)
class JobLost:
    """The job cannot go on without its last checkpoint, and why."""

    text: str


@dataclass(frozen=True, slots=True)
class JobResumed:
    """Everybody is gone, and the job goes on from this cut; what was decided after it is not in the log any more.

    Args:
        cut: which.
        generation: the newest that there was.
        incarnation: the newest life that there was.
    """

    snapshot: int
    generation: int
    incarnation: int


@dataclass(frozen=True, slots=True, eq=False)
class JournalRecord:
    """This entry has this position in the journal of a shard; for those who keep journals to look at them later.

    Args:
        shard: which.
        position: from 0.
        entry: what stands there.
        handed_on: the generation in which a server handed the entry on without knowing whether it is certain; 0 where
            it is.
    """

    shard: int
    position: int
    entry: JournalEntry
    transfer_generation: int = 0


CoordinatorRecord: TypeAlias = (
    MemberJoined
    | MemberLeft
    | ReplicasAssigned
    | TaskAssigned
    | TaskReported
    | LeaseExpired
    | CheckpointRequested
    | SnapshotQuiesced
    | ShardSaved
    | JobLost
    | JobResumed
)
LogRecord: TypeAlias = CoordinatorRecord | JournalEntry | JournalRecord


RECORD_HEADER = FrameHeader(FrameKind.VALUE, 0, 0, 0, 0, bytes(16))
RECORD_TYPES: Mapping[str, type] = {
    kind.__name__.lower(): kind for kind in (*get_args(CoordinatorRecord), *get_args(JournalEntry), JournalRecord)
}


def encode_record(record: LogRecord) -> bytes:
    """Return a line as it is appended to a log."""
    return b"".join(map(as_memoryview, encode_chunks(record)))


def encode_chunks(value: object) -> list[Tensor]:
    """Return a line, or a value like it, as flat bytes one behind the other; large tensors of it are not copied."""
    kind, plain, tensors = encode_message(value)
    text = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
    return encode_parts(RECORD_HEADER, kind, [text, *tensors])


def decode_one(types: Mapping[str, type], buffer: Tensor) -> Any:  # noqa: ANN401 - one of the kinds
    """Return the one value that these bytes are.

    Args:
        kinds: what it may be.
        room: flat bytes; the value's tensors are views of them.

    Raises:
        PeerError: they are not what :func:`pieces` wrote of such a value.
    """
    frame = decode(buffer)
    text, *tensors = frame.tensors
    return decode_as(types, frame.label, json.loads(text.numpy().tobytes()), tensors)


def decode_log(raw: bytes) -> tuple[list[Any], int]:
    """Return the lines of a log, and how many of its bytes they are; what follows was torn by a crash and is to go.

    Raises:
        CheckpointError: whole lines follow upon what cannot be read, so that something else than a crash was at work.
    """
    lines, at = [], 0
    while at < len(raw):
        try:
            line, size = _decode_at(raw, at)
        except PeerError as error:
            _check_torn_tail(raw, at, error)
            break
        lines.append(line)
        at += size
    return lines, at


def _decode_at(raw: bytes, at: int) -> tuple[Any, int]:
    start = torch.frombuffer(bytearray(raw[at : at + HEADER_BYTES]), dtype=torch.uint8)
    size = read_header(start).frame_bytes
    return decode_one(RECORD_TYPES, torch.frombuffer(bytearray(raw[at : at + size]), dtype=torch.uint8)), size


def _check_torn_tail(raw: bytes, at: int, error: PeerError) -> None:
    """No line follows upon a damaged one."""
    later = raw.find(MAGIC, at + 1)
    while later >= 0:
        try:
            _decode_at(raw, later)
        except PeerError:
            later = raw.find(MAGIC, later + 1)
            continue
        raise CheckpointError(
            f"a log is damaged at byte {at} of {len(raw)}, before whole lines from byte {later} on: {error}; go on "
            "from the last checkpoint, and look at the disk"
        ) from error
