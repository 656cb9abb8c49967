"""Messages as a frame carries them: a kind, fields that JSON can hold, and tensors; and back, believing nothing.

The form follows the types of the dataclasses, so that a message is described once. A tensor's field is its place
among the tensors, in the order of the fields. What is read back has the types it was written with, or a
ProtocolError says which field has not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from counterpoint.errors import ProtocolError
from counterpoint.server import calls, choices, job, messages, states
from counterpoint.server.messages import MAX_NUMBER

Plain: TypeAlias = Any
"""None, a bool, an int, a float, a string, or a list or a mapping of these."""

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

    def take(self, place: Plain, where: str) -> Tensor:
        if type(place) is not int or place != self.taken or place >= len(self.tensors):
            raise malformed(f"{where} is tensor {_shown(place)}, where {self.taken} of {len(self.tensors)} comes next")
        self.taken += 1
        return self.tensors[place]


@lru_cache(maxsize=256)
def _hints(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - a class
    found = get_type_hints(kind)
    return {field.name: found[field.name] for field in fields(kind)}


def _fields(value: object, tensors: list[Tensor]) -> dict[str, Plain]:
    kind: Any = type(value)
    found = {name: (hint, getattr(value, name)) for name, hint in _hints(kind).items()}
    return {name: float(one) if hint is float else _written(one, tensors) for name, (hint, one) in found.items()}


def _written(value: object, tensors: list[Tensor]) -> Plain:
    if isinstance(value, Tensor):
        tensors.append(value)
        return len(tensors) - 1
    if isinstance(value, tuple):
        return [_written(item, tensors) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        named = {"is": type(value).__name__.lower()} if _is_named(type(value)) else {}
        return named | _fields(value, tensors)
    return value


def _is_named(kind: type) -> bool:
    name = kind.__name__.lower()
    return PARTS.get(name) is kind or KINDS.get(name) is kind


def _dataclass(kind: Any, plain: Plain, where: str, tensors: _Tensors) -> Any:  # noqa: ANN401 - a class, one of it
    hints = _hints(kind)
    if not isinstance(plain, dict):
        raise malformed(f"{where} is {_shown(plain)} instead of its fields")
    if plain.keys() != hints.keys():
        unlike = sorted(map(_shown, plain.keys() ^ hints.keys()))
        raise malformed(f"{where} has or lacks {', '.join(unlike[:5])}")
    return kind(**{name: _read(hint, plain[name], f"{where}.{name}", tensors) for name, hint in hints.items()})


def _read(hint: Any, plain: Plain, where: str, tensors: _Tensors) -> Any:  # noqa: ANN401 - of the hint
    origin = get_origin(hint)
    if hint is Tensor:
        return tensors.take(plain, where)
    if origin is tuple:
        if not isinstance(plain, list) or len(plain) > MAX_ITEMS:
            raise malformed(f"{where} is {_shown(plain)} instead of a list of at most {MAX_ITEMS}")
        return tuple(_read(get_args(hint)[0], item, where, tensors) for item in plain)
    if origin is Literal:
        if not isinstance(plain, str) or plain not in get_args(hint):
            raise malformed(f"{where} is {_shown(plain)} instead of one of {', '.join(get_args(hint))}")
        return plain
    if origin in {Union, UnionType}:
        return _one_of(get_args(hint), plain, where, tensors)
    if is_dataclass(hint):
        return _dataclass(hint, _unnamed(hint, plain, where), where, tensors)
    return _scalar(hint, plain, where)


def _one_of(hints: tuple[Any, ...], plain: Plain, where: str, tensors: _Tensors) -> Any:  # noqa: ANN401 - of one
    if plain is None and NoneType in hints:
        return None
    kinds = [hint for hint in hints if hint is not NoneType]
    if len(kinds) == 1:
        return _read(kinds[0], plain, where, tensors)
    named = {kind.__name__.lower(): kind for kind in kinds}
    said = plain.get("is") if isinstance(plain, dict) else None
    if not isinstance(said, str) or said not in named:
        raise malformed(f"{where} is {_shown(plain)} instead of one of {', '.join(named)}")
    return _read(named[said], plain, where, tensors)


def _unnamed(kind: Any, plain: Plain, where: str) -> Plain:  # noqa: ANN401 - a class
    """Return the fields without the word that says what they are, which must be right where one is due."""
    if not _is_named(kind) or not isinstance(plain, dict):
        return plain
    if plain.get("is") != kind.__name__.lower():
        raise malformed(f"{where} is {_shown(plain.get('is'))} instead of {kind.__name__.lower()}")
    return {name: value for name, value in plain.items() if name != "is"}


def _scalar(kind: type, plain: Plain, where: str) -> Plain:
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
        raise malformed(f"{where} is {_shown(plain)} instead of {'an' if kind is int else 'a'} {kind.__name__}")
    return plain


def _shown(value: Plain) -> str:
    """Return the beginning of what stands there; a container only by its type."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__} of {len(value)}"
    return ascii(value[:40] if isinstance(value, str) else value)[:60]
