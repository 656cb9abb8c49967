"""Options as a plan writes them: read by what the strategy that takes them says of their kind."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NewType, get_args, get_origin, get_type_hints

from counterpoint.errors import PlanError
from counterpoint.strategies.buckets import parse_bytes

ByteSize = NewType("Bytes", int)
"""A size, which a plan writes as ``64MiB`` or as a number of bytes."""

MicrobatchCount = NewType("Micros", int)
"""A number of microbatches, which is said of the plan and not of a strategy."""


def option_types(taker: Callable[..., Any]) -> Mapping[str, Any]:
    """Return of what kind each option of a strategy is: its annotation."""
    return get_type_hints(taker.func if isinstance(taker, partial) else taker)


def option_names(taker: Callable[..., Any]) -> tuple[str, ...]:
    """Return the options of a system: what its function takes by keyword."""
    params = inspect.signature(taker).parameters.values()
    return tuple(param.name for param in params if param.kind is inspect.Parameter.KEYWORD_ONLY)


def parse_option(key: str, value: str, kind: Any, text: str) -> Any:  # noqa: ANN401 - kinds and values of all sorts
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
    if kind is ByteSize:
        return parse_bytes(key, value)
    if kind is bool:
        if value not in {"on", "off"}:
            raise PlanError(f"there is no {key}={value}; give {key}=on or {key}=off")
        return value == "on"
    if kind is float:
        return _parse_float(key, value, text)
    try:
        if kind in {int, MicrobatchCount} or all(isinstance(word, int) for word in get_args(kind) or ("",)):
            return (
                _check_microbatch_count(key, _parse_int(value), text) if kind is MicrobatchCount else _parse_int(value)
            )
        if get_origin(kind) is tuple:
            return tuple(_parse_int(part.strip()) for part in value.strip("()").split(",") if part.strip())
    except PlanError:
        raise
    except ValueError:
        raise PlanError(f"{key}={value} in {text!r} must be whole numbers") from None
    return value


def _check_microbatch_count(key: str, count: int, text: str) -> int:
    if count < 1:
        raise PlanError(f"{key}={count} in {text!r} is a number of microbatches; give 1 or more")
    return count


def _parse_int(text: str) -> int:
    """Return a number that is written in digits alone; Python itself reads 1_6 and +4, too."""
    if re.fullmatch(r"-?[0-9]+", text) is None:
        raise ValueError(text)
    return int(text)


def _parse_float(key: str, value: str, text: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise PlanError(f"{key}={value} in {text!r} must be a number") from None


def require_choice(system: str, option: str, value: str, choices: tuple[str, ...]) -> None:
    """Check that a word is one of those that an option of a system takes.

    Raises:
        PlanError: it is none.
    """
    if value not in choices:
        choices = [f"{option}={word}" for word in choices]
        raise PlanError(f"{system} has no {option}={value}; give {', '.join(choices[:-1])} or {choices[-1]}")
