"""Write-ahead logs of the coordinator and of servers without a backup: their records, and their encoding as frames.

Each record is one frame with a checksum, so that a record torn by a crash is detected at the end of a log, and damage
anywhere else is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, get_args

import torch
from msgspec import Struct
from torch import Tensor

from counterpoint.errors import CheckpointError, PeerError
from counterpoint.fabric.frames import HEADER_BYTES, MAGIC, FrameHeader, FrameKind, decode, encode_parts, read_header
from counterpoint.json_reader import parse_json
from counterpoint.ps.message_codec import decode_as, encode_message, malformed_message
from counterpoint.ps.messages import DataTask, JournalEntry, Role, ShardReplicas, TaskOutcome
from counterpoint.rpc.tensor_codec import as_memoryview
from counterpoint.value_codec import format_json


class MemberJoined(Struct, frozen=True, forbid_unknown_fields=True):
    """A member joined the job."""

    name: str
    role: Role
    token: int
    incarnation: int
    address: str


class MemberLeft(Struct, frozen=True, forbid_unknown_fields=True):
    """A member left the job or timed out."""

    name: str


class ReplicasAssigned(Struct, frozen=True, forbid_unknown_fields=True):
    """The replicas of a shard changed."""

    shard: int
    replicas: ShardReplicas


class TaskAssigned(Struct, frozen=True, forbid_unknown_fields=True):
    """A task was assigned in reply to the request with this sequence; None if all data has been processed."""

    worker: str
    sequence: int
    task: DataTask | None


class TaskReported(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker reported the outcome of a task in the request with this sequence."""

    worker: str
    sequence: int
    task: DataTask
    outcome: TaskOutcome
    version: int
    text: str


class LeaseExpired(Struct, frozen=True, forbid_unknown_fields=True):
    """The lease of a task expired, so the task is to be assigned again."""

    task: DataTask


class CheckpointRequested(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker requested a snapshot in the request with this sequence."""

    worker: str
    sequence: int


class SnapshotQuiesced(Struct, frozen=True, forbid_unknown_fields=True):
    """No task is partially applied; shards are being saved for this snapshot from now on."""

    snapshot: int


class ShardSaved(Struct, frozen=True, forbid_unknown_fields=True):
    """A shard has been saved for a snapshot, as of this journal position."""

    snapshot: int
    shard: int
    position: int


class JobLost(Struct, frozen=True, forbid_unknown_fields=True):
    """The job cannot continue without its last checkpoint, for this reason."""

    text: str


class JobResumed(Struct, frozen=True, forbid_unknown_fields=True):
    """The job restarts from a snapshot with no members; later records have been removed from the log.

    Args:
        snapshot: its number.
        generation: newest membership generation before.
        incarnation: newest incarnation before.
    """

    snapshot: int
    generation: int
    incarnation: int


class JournalRecord(Struct, frozen=True, forbid_unknown_fields=True, eq=False):
    """An entry of a shard's journal, kept for inspection and replay.

    Args:
        shard: index of the shard.
        position: of the entry, from 0.
        entry: the entry.
        transfer_generation: generation in which a server passed the entry to a new backup without knowing whether it
            was committed; 0 if it was committed.
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


MAX_REREADS = 4
"""How many times its own size is read of a damaged log, at most, to find out whether a crash has damaged it."""


def encode_record(record: LogRecord) -> bytes:
    """Return a record as the bytes that are appended to a log."""
    return b"".join(map(as_memoryview, encode_chunks(record)))


def encode_chunks(value: object) -> list[Tensor]:
    """Return a record or message as a list of flat byte tensors; large tensors are not copied."""
    kind, fields, tensors = encode_message(value)
    text = torch.frombuffer(bytearray(format_json(fields).encode()), dtype=torch.uint8)
    return encode_parts(RECORD_HEADER, kind, [text, *tensors])


def decode_one(types: Mapping[str, type], buffer: Tensor) -> Any:  # noqa: ANN401 - one of the kinds
    """Return the single value that these bytes encode.

    Args:
        types: allowed types, by name.
        buffer: flat bytes; the tensors of the value are views of them.

    Raises:
        PeerError: the bytes are not what :func:`encode_chunks` wrote.
    """
    frame = decode(buffer)
    if not frame.tensors or frame.tensors[0].dtype != torch.uint8:
        raise malformed_message(f"{frame.label[:40]!r} without the text of its fields")
    text, *tensors = frame.tensors
    try:
        fields = parse_json(text.numpy().tobytes())
    except ValueError as error:
        raise malformed_message(
            f"the fields of {frame.label[:40]!r} are not JSON ({ascii(str(error))[:80]})"
        ) from error
    return decode_as(types, frame.label, fields, tensors)


def decode_log(raw: bytes) -> tuple[list[Any], int]:
    """Return the records of a log and their length in bytes; the rest was torn by a crash and is to be truncated.

    Raises:
        CheckpointError: readable records follow a damaged one, so the damage was not caused by a crash.
    """
    records, offset = [], 0
    while offset < len(raw):
        try:
            record, size = _decode_at(raw, offset)
        except PeerError as error:
            _check_torn_tail(raw, offset, error)
            break
        records.append(record)
        offset += size
    return records, offset


def _decode_at(raw: bytes, offset: int) -> tuple[Any, int]:
    size = _complete_size(raw, offset)
    return decode_one(RECORD_TYPES, torch.frombuffer(bytearray(raw[offset : offset + size]), dtype=torch.uint8)), size


def _check_torn_tail(raw: bytes, offset: int, error: PeerError) -> None:
    """Raise CheckpointError if a readable record follows the damaged one, or too much that only begins like one."""
    next_offset, num_read = raw.find(MAGIC, offset + 1), 0
    while next_offset >= 0:
        try:
            num_read += _complete_size(raw, next_offset)
            if num_read <= MAX_REREADS * len(raw):
                _decode_at(raw, next_offset)
        except PeerError:
            next_offset = raw.find(MAGIC, next_offset + 1)
            continue
        fact = "readable again" if num_read <= MAX_REREADS * len(raw) else "damaged in many records"
        raise CheckpointError(
            f"log damaged at byte {offset} of {len(raw)}, but {fact} from byte {next_offset}: {error}; restart "
            "from the last checkpoint, and check the disk"
        ) from error


def _complete_size(raw: bytes, offset: int) -> int:
    """Return the size of a record, without reading it.

    Raises:
        PeerError: there is no record, or its end is missing.
    """
    header = torch.frombuffer(bytearray(raw[offset : offset + HEADER_BYTES]), dtype=torch.uint8)
    size = read_header(header).frame_bytes
    if offset + size > len(raw):
        raise malformed_message(f"a record of {size} bytes with {len(raw) - offset}")
    return size
