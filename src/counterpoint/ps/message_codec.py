"""Encode messages as a type name, JSON fields and tensors, and decode and validate them.

The encoding follows the field types of the dataclasses, so that each message is described once. A tensor field holds
the tensor's index, in field order. Decoded values have the declared types; otherwise a ProtocolError names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, cast, get_args, get_origin, get_type_hints

from torch import Tensor

from counterpoint.errors import ProtocolError
from counterpoint.ps import consistency, messages, update_rules
from counterpoint.ps.messages import MAX_NUMBER
from counterpoint.value_codec import JsonValue

FieldPath: TypeAlias = "str | tuple[FieldPath, str]"
"""Path of a field in a message, for errors: a message type, or a path and a field name."""

FieldDecoder: TypeAlias = Callable[[JsonValue, FieldPath, "_TensorReader"], Any]

SCALAR_TYPES = frozenset({int, str, bool, float, NoneType})

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

MAX_TEXT = 1 << 16
MAX_ITEMS = 1 << 20
TAGGED_TYPES: Mapping[str, type] = {
    part.__name__.lower(): part
    for part in (
        update_rules.Assign, update_rules.Sgd, update_rules.Adagrad, update_rules.Adam,
        update_rules.ConstantInit, update_rules.UniformInit, update_rules.NormalInit,
        messages.SetMembers,
        consistency.Bsp, consistency.Ssp, consistency.Asp,
    )
}  # fmt: skip
"""Types that occur in unions, so that their encoding needs a type tag."""


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
        >>> encode_message(messages.Ack(0, 3))
        ('ack', {'shard': 0, 'sequence': 3}, [])
    """
    tensors: list[Tensor] = []
    return message_type(message), _encode_fields(message, tensors), tensors


def decode_message(kind: str, fields: JsonValue, tensors: Sequence[Tensor]) -> PsMessage:
    """Return the message.

    Args:
        kind: its type name.
        fields: as `encode_message` returned them, possibly through JSON.
        tensors: all of its tensors.

    Raises:
        ProtocolError: the type is unknown; a field is missing, unknown or of another type or size; a tensor is missing
            or left over; or the message is inconsistent.

    Example:
        >>> decode_message("ack", {"shard": 0, "sequence": 3}, [])
        Ack(shard=0, sequence=3)
    """
    message: PsMessage = decode_as(MESSAGE_TYPES, kind, fields, tensors)
    return message


def decode_as(kinds: Mapping[str, Any], kind: str, fields: JsonValue, tensors: Sequence[Tensor]) -> Any:  # noqa: ANN401
    """Return the value, which must be of one of the given types; see `decode_message`."""
    if kind not in kinds:
        raise malformed_message(f"unknown message type {kind[:40]!r}")
    reader = _TensorReader(tensors)
    message = _decode_dataclass(kinds[kind], fields, kind, reader)
    if reader.num_taken != len(tensors):
        raise malformed_message(f"{kind} with {len(tensors)} tensors, of which its fields use {reader.num_taken}")
    return message


def malformed_message(problem: str) -> ProtocolError:
    """Return the error for bytes that are not a valid message."""
    return ProtocolError(
        f"a malformed message: {problem}; it was dropped and no state changed; check that the peer runs the same "
        "version of counterpoint"
    )


class _TensorReader:
    """Hand out the tensors of a message in order, each once."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.num_taken = 0

    def take(self, index: JsonValue, path: FieldPath) -> Tensor:
        """Return the tensor of a field, which must be the next one."""
        if type(index) is not int or index != self.num_taken or index >= len(self.tensors):
            count = len(self.tensors)
            raise malformed_message(
                f"{_format_path(path)} is tensor {_preview(index)}, expected {self.num_taken} of {count}"
            )
        self.num_taken += 1
        return self.tensors[index]


@lru_cache(maxsize=256)
def _field_types(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - a class
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _encode_fields(value: object, tensors: list[Tensor]) -> dict[str, JsonValue]:
    kind: Any = type(value)
    encoded: dict[str, JsonValue] = {}
    for name, hint in _field_types(kind).items():
        field_value = getattr(value, name)
        encoded[name] = (
            float(field_value)
            if hint is float
            else field_value
            if type(field_value) in SCALAR_TYPES
            else _encode_value(field_value, tensors)
        )
    return encoded


def _encode_value(value: object, tensors: list[Tensor]) -> JsonValue:
    if type(value) in SCALAR_TYPES:
        return value
    if isinstance(value, tuple):
        return [_encode_value(item, tensors) for item in value]
    if isinstance(value, Tensor):
        tensors.append(value)
        return len(tensors) - 1
    kind: Any = type(value)
    return ({"is": kind.__name__.lower()} if _is_tagged(kind) else {}) | _encode_fields(value, tensors)


@lru_cache(maxsize=256)
def _is_tagged(kind: type) -> bool:
    name = kind.__name__.lower()
    return TAGGED_TYPES.get(name) is kind or MESSAGE_TYPES.get(name) is kind


@lru_cache(maxsize=256)
def _field_decoders(kind: Any) -> dict[str, FieldDecoder]:  # noqa: ANN401 - a class
    return {name: _decoder_for(hint) for name, hint in _field_types(kind).items()}


def _decode_dataclass(kind: Any, content: JsonValue, path: FieldPath, tensors: _TensorReader) -> Any:  # noqa: ANN401 - a class, one of it
    decoders = _field_decoders(kind)
    if not isinstance(content, dict):
        raise malformed_message(f"{_format_path(path)} is {_preview(content)} instead of its fields")
    if content.keys() != decoders.keys():
        differing = sorted(map(_preview, content.keys() ^ decoders.keys()))
        raise malformed_message(f"{_format_path(path)} has unknown or lacks fields {', '.join(differing[:5])}")
    return kind(**{name: decode(content[name], (path, name), tensors) for name, decode in decoders.items()})


@lru_cache(maxsize=256)
def _decoder_for(hint: Any) -> FieldDecoder:  # noqa: ANN401 - a type
    """Return the decoder of a type; cached."""
    origin = get_origin(hint)
    if hint is Tensor:
        return lambda content, path, tensors: tensors.take(content, path)
    if origin is tuple:
        return partial(_decode_tuple, _decoder_for(get_args(hint)[0]))
    if origin is Literal:
        return partial(_decode_literal, get_args(hint))
    if origin in {Union, UnionType}:
        kinds = [arg for arg in get_args(hint) if arg is not NoneType]
        decoder = (
            _decoder_for(kinds[0])
            if len(kinds) == 1
            else partial(_decode_union, {k.__name__.lower(): k for k in kinds})
        )
        return partial(_decode_optional, decoder) if NoneType in get_args(hint) else decoder
    if is_dataclass(hint):
        return partial(_decode_tagged if _is_tagged(cast(type, hint)) else _decode_dataclass, hint)
    return partial(_decode_scalar, hint)


def _decode_tuple(read: FieldDecoder, content: JsonValue, path: FieldPath, tensors: _TensorReader) -> tuple[Any, ...]:
    if not isinstance(content, list) or len(content) > MAX_ITEMS:
        raise malformed_message(f"{_format_path(path)} is {_preview(content)} instead of a list of at most {MAX_ITEMS}")
    return tuple([read(item, path, tensors) for item in content])


def _decode_literal(options: tuple[str, ...], content: JsonValue, path: FieldPath, _tensors: _TensorReader) -> str:
    if not isinstance(content, str) or content not in options:
        raise malformed_message(f"{_format_path(path)} is {_preview(content)} instead of one of {', '.join(options)}")
    return content


def _decode_optional(read: FieldDecoder, content: JsonValue, path: FieldPath, tensors: _TensorReader) -> Any:  # noqa: ANN401 - of the reader
    return None if content is None else read(content, path, tensors)


def _decode_union(kinds: Mapping[str, Any], content: JsonValue, path: FieldPath, tensors: _TensorReader) -> Any:  # noqa: ANN401 - of one
    tag = content.get("is") if isinstance(content, dict) else None
    if not isinstance(tag, str) or tag not in kinds:
        raise malformed_message(f"{_format_path(path)} is {_preview(content)} instead of one of {', '.join(kinds)}")
    return _decoder_for(kinds[tag])(content, path, tensors)


def _decode_tagged(kind: Any, content: JsonValue, path: FieldPath, tensors: _TensorReader) -> Any:  # noqa: ANN401 - a class, one of it
    if isinstance(content, dict):
        if content.get("is") != kind.__name__.lower():
            raise malformed_message(
                f"{_format_path(path)} is {_preview(content.get('is'))} instead of {kind.__name__.lower()}"
            )
        content = {name: value for name, value in content.items() if name != "is"}
    return _decode_dataclass(kind, content, path, tensors)


def _decode_scalar(kind: type, content: JsonValue, path: FieldPath, _tensors: _TensorReader) -> JsonValue:
    fits = type(content) is kind
    if kind is float and type(content) is int:
        fits, content = True, float(content) if abs(content) < MAX_NUMBER else content
    if isinstance(content, int) and abs(content) > MAX_NUMBER:
        fits = False
    if isinstance(content, float) and not isfinite(content):
        fits = False
    if isinstance(content, str) and len(content) > MAX_TEXT:
        fits = False
    if not fits:
        raise malformed_message(
            f"{_format_path(path)} is {_preview(content)} instead of {'an' if kind is int else 'a'} {kind.__name__}"
        )
    return content


def _format_path(path: FieldPath) -> str:
    return path if isinstance(path, str) else f"{_format_path(path[0])}.{path[1]}"


def _preview(value: JsonValue) -> str:
    """Return the beginning of a value for errors; only the type and length of a container."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__} of {len(value)}"
    return ascii(value[:40] if isinstance(value, str) else value)[:60]
