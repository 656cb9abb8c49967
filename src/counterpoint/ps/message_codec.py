"""Encode messages as a type name, JSON fields and tensors, and decode and validate them.

Messages are msgspec structs: msgspec validates their fields by the declared types, and each struct validates the rest
when it is created. A tensor field holds the tensor's index, in field order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, get_args

import msgspec
from torch import Tensor

from counterpoint.errors import ProtocolError
from counterpoint.json_reader import JsonValue
from counterpoint.ps import messages

PsMessage: TypeAlias = (
    messages.InitRequest | messages.PushRequest | messages.PullRequest | messages.JoinClock | messages.LeaveClock
    | messages.PushReply | messages.PullReply | messages.Ack | messages.Rejected
    | messages.InstallSnapshot | messages.ReplicateEntry | messages.ReplicationAck
    | messages.JoinRequest | messages.JoinReply | messages.MembershipView | messages.Heartbeat
    | messages.TaskRequest | messages.TaskReply | messages.TaskReport | messages.LeaveRequest
    | messages.BackupReady | messages.CheckpointRequest | messages.CheckpointReply
    | messages.SnapshotRequest | messages.SnapshotSaved
)  # fmt: skip
"""Every message that can be sent on its own."""

MESSAGE_TYPES: Mapping[str, type[PsMessage]] = {kind.__name__.lower(): kind for kind in get_args(PsMessage)}


def message_type(message: object) -> str:
    """Return the type name of a message.

    Example:
        >>> message_type(messages.Ack(0, 3))
        'ack'
    """
    return type(message).__name__.lower()


def encode_message(message: object) -> tuple[str, dict[str, JsonValue], list[Tensor]]:
    """Return type name, fields and tensors of a message; the tensors are not copied.

    Example:
        >>> encode_message(messages.SnapshotRequest(7, 1))
        ('snapshotrequest', {'generation': 7, 'snapshot': 1}, [])
    """
    tensors: list[Tensor] = []

    def append_tensor(tensor: Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    return message_type(message), msgspec.to_builtins(message, enc_hook=append_tensor), tensors


def decode_message(kind: str, fields: JsonValue, tensors: Sequence[Tensor]) -> PsMessage:
    """Return the message.

    Args:
        kind: its type name.
        fields: as `encode_message` returned them, possibly through JSON.
        tensors: all of its tensors.

    Raises:
        ProtocolError: the type is unknown; a field is missing, unknown or of another type; a tensor is missing or left
            over; or the message is inconsistent.

    Example:
        >>> decode_message("snapshotrequest", {"generation": 7, "snapshot": 1}, [])
        SnapshotRequest(generation=7, snapshot=1)
    """
    message: PsMessage = decode_as(MESSAGE_TYPES, kind, fields, tensors)
    return message


def decode_as(kinds: Mapping[str, Any], kind: str, fields: JsonValue, tensors: Sequence[Tensor]) -> Any:  # noqa: ANN401 - of one of the types
    """Return the value, which must be of one of the given types; see `decode_message`."""
    if kind not in kinds:
        raise malformed_message(f"unknown message type {kind[:40]!r}")
    num_taken = 0

    def take_tensor(_: type, index: JsonValue) -> Tensor:
        nonlocal num_taken
        if type(index) is not int or index != num_taken or index >= len(tensors):
            raise ValueError(f"Expected tensor {num_taken} of {len(tensors)}, got {ascii(index)[:40]}")
        num_taken += 1
        return tensors[index]

    try:
        message = msgspec.convert(fields, kinds[kind], dec_hook=take_tensor)
    except msgspec.ValidationError as error:
        raise malformed_message(f"{kind}: {ascii(str(error))[1:-1][:200]}") from error
    if num_taken != len(tensors):
        raise malformed_message(f"{kind} with {len(tensors)} tensors, of which its fields use {num_taken}")
    return message


def malformed_message(problem: str) -> ProtocolError:
    """Return the error for bytes that are not a valid message."""
    return ProtocolError(
        f"a malformed message: {problem}; it was dropped and no state changed; check that the peer runs the same "
        "version of counterpoint"
    )
