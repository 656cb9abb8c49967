"""Options as a plan writes them: read by what the strategy that takes them says of their kind."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NewType, get_args, get_origin, get_type_hints

from counterpoint.errors import PlanError
from counterpoint.strategies.buckets import parse_bytes

Bytes = NewType("Bytes", int)
"""A size, which a plan writes as ``64MiB`` or as a number of bytes."""

Micros = NewType("Micros", int)
"""A number of microbatches, which is said of the plan and not of a strategy."""


def kinds_of(taker: Callable[..., Any]) -> Mapping[str, Any]:
    """Return of what kind each option of a strategy is: its annotation."""
    return get_type_hints(taker.func if isinstance(taker, partial) else taker)


def keywords_of(taker: Callable[..., Any]) -> tuple[str, ...]:
    """Return the options of a system: what its function takes by keyword."""
    params = inspect.signature(taker).parameters.values()
    return tuple(param.name for param in params if param.kind is inspect.Parameter.KEYWORD_ONLY)


def read_option(key: str, value: str, kind: Any, text: str) -> Any:  # noqa: ANN401 - kinds and values of all sorts
    """Return the value of an option.

    Args:
        key: the option.
        value: what stands behind its ``=``.
        kind: of what kind it is; words are judged by whoever takes them.
        text: the whole plan, for errors.

    Raises:
        PlanError: the text is none of that kind.
    """
    if get_origin(kind) is tuple and get_args(kind)[0] is str:
        return tuple(value.split("+"))
    if kind is Bytes:
        return parse_bytes(key, value)
    if kind is bool:
        if value not in {"on", "off"}:
            raise PlanError(f"there is no {key}={value}; give {key}=on or {key}=off")
        return value == "on"
    if kind is float:
        return _read_number(key, value, text)
    try:
        if kind in {int, Micros} or all(isinstance(word, int) for word in get_args(kind) or ("",)):
            return _require_micros(key, _whole(value), text) if kind is Micros else _whole(value)
        if get_origin(kind) is tuple:
            return tuple(_whole(part.strip()) for part in value.strip("()").split(",") if part.strip())
    except PlanError:
        raise
    except ValueError:
        raise PlanError(f"{key}={value} in {text!r} must be whole numbers") from None
    return value


def _require_micros(key: str, count: int, text: str) -> int:
    if count < 1:
        raise PlanError(f"{key}={count} in {text!r} is a number of microbatches; give 1 or more")
    return count


def _whole(text: str) -> int:
    """Return a number that is written in digits alone; Python itself reads 1_6 and +4, too."""
    if re.fullmatch(r"-?[0-9]+", text) is None:
        raise ValueError(text)
    return int(text)


def _read_number(key: str, value: str, text: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise PlanError(f"{key}={value} in {text!r} must be a number") from None


def require_word(system: str, option: str, value: str, words: tuple[str, ...]) -> None:
    """Check that a word is one of those that an option of a system takes.

    Raises:
        PlanError: it is none.
    """
    if value not in words:
        choices = [f"{option}={word}" for word in words]
        raise PlanError(f"{system} has no {option}={value}; give {', '.join(choices[:-1])} or {choices[-1]}")
