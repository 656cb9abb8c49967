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
from counterpoint.server import calls, choices, job, messages, states
from counterpoint.server.messages import MAX_NUMBER

Plain: TypeAlias = Any
"""None, a bool, an int, a float, a string, or a list or a mapping of these."""

Where: TypeAlias = "str | tuple[Where, str]"
"""A place in a message: a kind, or a field of a place."""

Reader: TypeAlias = Callable[[Plain, Where, "_Tensors"], Any]

SCALARS = frozenset({int, str, bool, float, NoneType})

Message: TypeAlias = (
    messages.Init | messages.Push | messages.Pull | messages.Enter | messages.Rest
    | messages.Pushed | messages.Pulled | messages.Done | messages.Refused
    | states.Install | states.Replicate | states.Kept
    | calls.Hello | calls.Welcome | calls.View | calls.Heartbeat | calls.Lease | calls.Leased | calls.Report
    | calls.Leave | calls.Complete | calls.Checkpoint | calls.Promised | calls.Cut | calls.Saved
)  # fmt: skip
"""Everything that may travel by itself."""

KINDS: Mapping[str, type[Message]] = {kind.__name__.lower(): kind for kind in get_args(Message)}

MAX_TEXT = 1 << 16
MAX_ITEMS = 1 << 20
PARTS: Mapping[str, type] = {
    part.__name__.lower(): part
    for part in (
        choices.Aggregate, choices.Sgd, choices.Adagrad, choices.Adam,
        choices.Constant, choices.Uniform, choices.Normal,
        messages.Members,
        job.Bsp, job.Ssp, job.Asp,
    )
}  # fmt: skip
"""What stands where several may, and so has to say what it is."""


def kind_of(message: object) -> str:
    """Return the word that says what a message is.

    Example:
        >>> kind_of(messages.Done(0, 3))
        'done'
    """
    return type(message).__name__.lower()


def to_plain(message: object) -> tuple[str, dict[str, Plain], list[Tensor]]:
    """Return kind, fields and tensors of a message; the tensors are its own, not copies.

    Example:
        >>> to_plain(messages.Done(0, 3))
        ('done', {'shard': 0, 'sequence': 3}, [])
    """
    tensors: list[Tensor] = []
    return kind_of(message), _fields(message, tensors), tensors


def from_plain(kind: str, plain: Plain, tensors: Sequence[Tensor]) -> Message:
    """Return the message.

    Args:
        kind: what `kind_of` said.
        plain: its fields, as `to_plain` wrote them and JSON may have kept them.
        tensors: its tensors, all of them.

    Raises:
        ProtocolError: there is no such kind; a field is missing, unknown or of another type or size; a tensor is
            missing or left over; or the message contradicts itself.

    Example:
        >>> from_plain("done", {"shard": 0, "sequence": 3}, [])
        Done(shard=0, sequence=3)
    """
    message: Message = read_as(KINDS, kind, plain, tensors)
    return message


def read_as(kinds: Mapping[str, Any], kind: str, plain: Plain, tensors: Sequence[Tensor]) -> Any:  # noqa: ANN401
    """Return what was written, which must be one of some kinds; see `from_plain`."""
    if kind not in kinds:
        raise malformed(f"a message of kind {kind[:40]!r}, which does not exist")
    rest = _Tensors(tensors)
    message = _dataclass(kinds[kind], plain, kind, rest)
    if rest.taken != len(tensors):
        raise malformed(f"{kind} with {len(tensors)} tensors, of which it names {rest.taken}")
    return message


def malformed(found: str) -> ProtocolError:
    """Return the error for what is no message."""
    return ProtocolError(
        f"a malformed message: {found}; it was not looked at further and changed nothing: look for another version of "
        "counterpoint, or another program, at the other end"
    )


class _Tensors:
    """The tensors of a message, given out in order and once."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.taken = 0

    def take(self, plain: Plain, where: Where) -> Tensor:
        """Return the tensor that stands in a field.

        Raises:
            ProtocolError: it is not the next one.
        """
        if type(plain) is not int or plain != self.taken or plain >= len(self.tensors):
            count = len(self.tensors)
            raise malformed(f"{_path(where)} is tensor {_shown(plain)}, where {self.taken} of {count} comes next")
        self.taken += 1
        return self.tensors[plain]


@lru_cache(maxsize=256)
def _hints(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - a class
    found = get_type_hints(kind)
    return {field.name: found[field.name] for field in fields(kind)}


def _fields(value: object, tensors: list[Tensor]) -> dict[str, Plain]:
    kind: Any = type(value)
    found: dict[str, Plain] = {}
    for name, hint in _hints(kind).items():
        one = getattr(value, name)
        found[name] = float(one) if hint is float else one if type(one) in SCALARS else _written(one, tensors)
    return found


def _written(value: object, tensors: list[Tensor]) -> Plain:
    if type(value) in SCALARS:
        return value
    if isinstance(value, tuple):
        return [_written(item, tensors) for item in value]
    if isinstance(value, Tensor):
        tensors.append(value)
        return len(tensors) - 1
    kind: Any = type(value)
    return ({"is": kind.__name__.lower()} if _is_named(kind) else {}) | _fields(value, tensors)


@lru_cache(maxsize=256)
def _is_named(kind: type) -> bool:
    name = kind.__name__.lower()
    return PARTS.get(name) is kind or KINDS.get(name) is kind


@lru_cache(maxsize=256)
def _readers(kind: Any) -> dict[str, Reader]:  # noqa: ANN401 - a class
    return {name: _reader(hint) for name, hint in _hints(kind).items()}


def _dataclass(kind: Any, plain: Plain, where: Where, tensors: _Tensors) -> Any:  # noqa: ANN401 - a class, one of it
    readers = _readers(kind)
    if not isinstance(plain, dict):
        raise malformed(f"{_path(where)} is {_shown(plain)} instead of its fields")
    if plain.keys() != readers.keys():
        unlike = sorted(map(_shown, plain.keys() ^ readers.keys()))
        raise malformed(f"{_path(where)} has or lacks {', '.join(unlike[:5])}")
    return kind(**{name: read(plain[name], (where, name), tensors) for name, read in readers.items()})


@lru_cache(maxsize=256)
def _reader(hint: Any) -> Reader:  # noqa: ANN401 - a type
    """Return what reads values of a type; made once for each."""
    origin = get_origin(hint)
    if hint is Tensor:
        return lambda plain, where, tensors: tensors.take(plain, where)
    if origin is tuple:
        return partial(_items, _reader(get_args(hint)[0]))
    if origin is Literal:
        return partial(_choice, get_args(hint))
    if origin in {Union, UnionType}:
        kinds = [one for one in get_args(hint) if one is not NoneType]
        reader = _reader(kinds[0]) if len(kinds) == 1 else partial(_one_of, {k.__name__.lower(): k for k in kinds})
        return partial(_unless_none, reader) if NoneType in get_args(hint) else reader
    if is_dataclass(hint):
        return partial(_named if _is_named(cast(type, hint)) else _dataclass, hint)
    return partial(_scalar, hint)


def _items(read: Reader, plain: Plain, where: Where, tensors: _Tensors) -> tuple[Any, ...]:
    if not isinstance(plain, list) or len(plain) > MAX_ITEMS:
        raise malformed(f"{_path(where)} is {_shown(plain)} instead of a list of at most {MAX_ITEMS}")
    return tuple([read(item, where, tensors) for item in plain])


def _choice(words: tuple[str, ...], plain: Plain, where: Where, _tensors: _Tensors) -> str:
    if not isinstance(plain, str) or plain not in words:
        raise malformed(f"{_path(where)} is {_shown(plain)} instead of one of {', '.join(words)}")
    return plain


def _unless_none(read: Reader, plain: Plain, where: Where, tensors: _Tensors) -> Any:  # noqa: ANN401 - of the reader
    return None if plain is None else read(plain, where, tensors)


def _one_of(kinds: Mapping[str, Any], plain: Plain, where: Where, tensors: _Tensors) -> Any:  # noqa: ANN401 - of one
    said = plain.get("is") if isinstance(plain, dict) else None
    if not isinstance(said, str) or said not in kinds:
        raise malformed(f"{_path(where)} is {_shown(plain)} instead of one of {', '.join(kinds)}")
    return _reader(kinds[said])(plain, where, tensors)


def _named(kind: Any, plain: Plain, where: Where, tensors: _Tensors) -> Any:  # noqa: ANN401 - a class, one of it
    """Read what says what it is, which must be right."""
    if isinstance(plain, dict):
        if plain.get("is") != kind.__name__.lower():
            raise malformed(f"{_path(where)} is {_shown(plain.get('is'))} instead of {kind.__name__.lower()}")
        plain = {name: value for name, value in plain.items() if name != "is"}
    return _dataclass(kind, plain, where, tensors)


def _scalar(kind: type, plain: Plain, where: Where, _tensors: _Tensors) -> Plain:
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
        raise malformed(f"{_path(where)} is {_shown(plain)} instead of {'an' if kind is int else 'a'} {kind.__name__}")
    return plain


def _path(where: Where) -> str:
    """Return a place as errors name it."""
    return where if isinstance(where, str) else f"{_path(where[0])}.{where[1]}"


def _shown(value: Plain) -> str:
    """Return the beginning of what stands there; a container only by its type."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__} of {len(value)}"
    return ascii(value[:40] if isinstance(value, str) else value)[:60]
