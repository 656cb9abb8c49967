"""Messages as a frame carries them: a kind, fields that JSON can hold, and tensors; and back, believing nothing.

The form follows the types of the dataclasses, so that a message is described once. A tensor's field is its place
among the tensors, in the order of the fields. What is read back has the types it was written with, or a
ProtocolError says which field has not.
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
from counterpoint.ps import job_config as job, messages, messages as calls, messages as states, update_rules as choices
from counterpoint.ps.messages import MAX_NUMBER

JsonValue: TypeAlias = Any
"""None, a bool, an int, a float, a string, or a list or a mapping of these."""

FieldPath: TypeAlias = "str | tuple[Where, str]"
"""A place in a message: a kind, or a field of a place."""

FieldDecoder: TypeAlias = Callable[[JsonValue, FieldPath, "_Tensors"], Any]

SCALAR_TYPES = frozenset({int, str, bool, float, NoneType})

PsMessage: TypeAlias = (
    messages.InitRequest | messages.PushRequest | messages.PullRequest | messages.JoinClock | messages.LeaveClock
    | messages.PushReply | messages.PullReply | messages.Ack | messages.Rejected
    | states.InstallSnapshot | states.ReplicateEntry | states.ReplicationAck
    | calls.JoinRequest | calls.JoinReply | calls.MembershipView | calls.Heartbeat | calls.TaskRequest | calls.TaskReply | calls.TaskReport
    | calls.LeaveRequest | calls.BackupReady | calls.CheckpointRequest | calls.CheckpointReply | calls.SnapshotRequest | calls.SnapshotSaved
)  # fmt: skip
"""Everything that may travel by itself."""

MESSAGE_TYPES: Mapping[str, type[PsMessage]] = {kind.__name__.lower(): kind for kind in get_args(PsMessage)}

MAX_TEXT = 1 << 16
MAX_ITEMS = 1 << 20
TAGGED_TYPES: Mapping[str, type] = {
    part.__name__.lower(): part
    for part in (
        choices.Assign, choices.Sgd, choices.Adagrad, choices.Adam,
        choices.ConstantInit, choices.UniformInit, choices.NormalInit,
        messages.SetMembers,
        job.Bsp, job.Ssp, job.Asp,
    )
}  # fmt: skip
"""What stands where several may, and so has to say what it is."""


def message_type(message: object) -> str:
    """Return the word that says what a message is.

    Example:
        >>> kind_of(messages.Done(0, 3))
        'done'
    """
    return type(message).__name__.lower()


def encode_message(message: object) -> tuple[str, dict[str, JsonValue], list[Tensor]]:
    """Return kind, fields and tensors of a message; the tensors are its own, not copies.

    Example:
        >>> to_plain(messages.Done(0, 3))
        ('done', {'shard': 0, 'sequence': 3}, [])
    """
    tensors: list[Tensor] = []
    return message_type(message), _encode_fields(message, tensors), tensors


def decode_message(kind: str, fields: JsonValue, tensors: Sequence[Tensor]) -> PsMessage:
    """Return the message.

    Args:
        kind: what `kind_of` said.
        plain: its fields, as `encode_message` wrote them and JSON may have kept them.
        tensors: its tensors, all of them.

    Raises:
        ProtocolError: there is no such kind; a field is missing, unknown or of another type or size; a tensor is
            missing or left over; or the message contradicts itself.

    Example:
        >>> from_plain("done", {"shard": 0, "sequence": 3}, [])
        Done(shard=0, sequence=3)
    """
    message: PsMessage = decode_as(MESSAGE_TYPES, kind, fields, tensors)
    return message


def decode_as(kinds: Mapping[str, Any], kind: str, fields: JsonValue, tensors: Sequence[Tensor]) -> Any:  # noqa: ANN401
    """Return what was written, which must be one of some kinds; see `decode_message`."""
    if kind not in kinds:
        raise malformed_message(f"a message of kind {kind[:40]!r}, which does not exist")
    rest = _TensorReader(tensors)
    message = _decode_dataclass(kinds[kind], fields, kind, rest)
    if rest.num_taken != len(tensors):
        raise malformed_message(f"{kind} with {len(tensors)} tensors, of which it names {rest.num_taken}")
    return message


def malformed_message(problem: str) -> ProtocolError:
    """Return the error for what is no message."""
    return ProtocolError(
        f"a malformed message: {problem}; it was not looked at further and changed nothing: look for another version of "
        "counterpoint, or another program, at the other end"
    )


class _TensorReader:
    """The tensors of a message, given out in order and once."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.num_taken = 0

    def take(self, plain: JsonValue, where: FieldPath) -> Tensor:
        """Return the tensor that stands in a field.

        Raises:
            ProtocolError: it is not the next one.
        """
        if type(plain) is not int or plain != self.num_taken or plain >= len(self.tensors):
            count = len(self.tensors)
            raise malformed_message(
                f"{_format_path(where)} is tensor {_preview(plain)}, where {self.num_taken} of {count} comes next"
            )
        self.num_taken += 1
        return self.tensors[plain]


@lru_cache(maxsize=256)
def _field_types(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - a class
    found = get_type_hints(kind)
    return {field.name: found[field.name] for field in fields(kind)}


def _encode_fields(value: object, tensors: list[Tensor]) -> dict[str, JsonValue]:
    kind: Any = type(value)
    found: dict[str, JsonValue] = {}
    for name, hint in _field_types(kind).items():
        one = getattr(value, name)
        found[name] = float(one) if hint is float else one if type(one) in SCALAR_TYPES else _encode_value(one, tensors)
    return found


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


def _decode_dataclass(kind: Any, plain: JsonValue, where: FieldPath, tensors: _TensorReader) -> Any:  # noqa: ANN401 - a class, one of it
    readers = _field_decoders(kind)
    if not isinstance(plain, dict):
        raise malformed_message(f"{_format_path(where)} is {_preview(plain)} instead of its fields")
    if plain.keys() != readers.keys():
        unlike = sorted(map(_preview, plain.keys() ^ readers.keys()))
        raise malformed_message(f"{_format_path(where)} has or lacks {', '.join(unlike[:5])}")
    return kind(**{name: read(plain[name], (where, name), tensors) for name, read in readers.items()})


@lru_cache(maxsize=256)
def _decoder_for(hint: Any) -> FieldDecoder:  # noqa: ANN401 - a type
    """Return what reads values of a type; made once for each."""
    origin = get_origin(hint)
    if hint is Tensor:
        return lambda plain, where, tensors: tensors.take(plain, where)
    if origin is tuple:
        return partial(_decode_tuple, _decoder_for(get_args(hint)[0]))
    if origin is Literal:
        return partial(_decode_literal, get_args(hint))
    if origin in {Union, UnionType}:
        kinds = [one for one in get_args(hint) if one is not NoneType]
        reader = (
            _decoder_for(kinds[0])
            if len(kinds) == 1
            else partial(_decode_union, {k.__name__.lower(): k for k in kinds})
        )
        return partial(_decode_optional, reader) if NoneType in get_args(hint) else reader
    if is_dataclass(hint):
        return partial(_decode_tagged if _is_tagged(cast(type, hint)) else _decode_dataclass, hint)
    return partial(_decode_scalar, hint)


def _decode_tuple(read: FieldDecoder, plain: JsonValue, where: FieldPath, tensors: _TensorReader) -> tuple[Any, ...]:
    if not isinstance(plain, list) or len(plain) > MAX_ITEMS:
        raise malformed_message(f"{_format_path(where)} is {_preview(plain)} instead of a list of at most {MAX_ITEMS}")
    return tuple([read(item, where, tensors) for item in plain])


def _decode_literal(words: tuple[str, ...], plain: JsonValue, where: FieldPath, _tensors: _TensorReader) -> str:
    if not isinstance(plain, str) or plain not in words:
        raise malformed_message(f"{_format_path(where)} is {_preview(plain)} instead of one of {', '.join(words)}")
    return plain


def _decode_optional(read: FieldDecoder, plain: JsonValue, where: FieldPath, tensors: _TensorReader) -> Any:  # noqa: ANN401 - of the reader
    return None if plain is None else read(plain, where, tensors)


def _decode_union(kinds: Mapping[str, Any], plain: JsonValue, where: FieldPath, tensors: _TensorReader) -> Any:  # noqa: ANN401 - of one
    said = plain.get("is") if isinstance(plain, dict) else None
    if not isinstance(said, str) or said not in kinds:
        raise malformed_message(f"{_format_path(where)} is {_preview(plain)} instead of one of {', '.join(kinds)}")
    return _decoder_for(kinds[said])(plain, where, tensors)


def _decode_tagged(kind: Any, plain: JsonValue, where: FieldPath, tensors: _TensorReader) -> Any:  # noqa: ANN401 - a class, one of it
    """Read what says what it is, which must be right."""
    if isinstance(plain, dict):
        if plain.get("is") != kind.__name__.lower():
            raise malformed_message(
                f"{_format_path(where)} is {_preview(plain.get('is'))} instead of {kind.__name__.lower()}"
            )
        plain = {name: value for name, value in plain.items() if name != "is"}
    return _decode_dataclass(kind, plain, where, tensors)


def _decode_scalar(kind: type, plain: JsonValue, where: FieldPath, _tensors: _TensorReader) -> JsonValue:
    fits = type(plain) is kind
    if kind is float and type(plain) is int:
        fits, plain = True, float(plain) if abs(plain) < MAX_NUMBER else plain
    if isinstance(plain, int) and abs(plain) > MAX_NUMBER:
        fits = False
    if isinstance(plain, float) and not isfinite(plain):
        fits = False
    if isinstance(plain, str) and len(plain) > MAX_TEXT:
        fits = False
    if not fits:
        raise malformed_message(
            f"{_format_path(where)} is {_preview(plain)} instead of {'an' if kind is int else 'a'} {kind.__name__}"
        )
    return plain


def _format_path(where: FieldPath) -> str:
    """Return a place as errors name it."""
    return where if isinstance(where, str) else f"{_format_path(where[0])}.{where[1]}"


def _preview(value: JsonValue) -> str:
    """Return the beginning of what stands there; a container only by its type."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__} of {len(value)}"
    return ascii(value[:40] if isinstance(value, str) else value)[:60]
