"""Options of strategies in the text of a plan: parsed according to the type that the strategy declares."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from math import isfinite
from typing import Any, NewType, get_args, get_origin, get_type_hints

from counterpoint.errors import PlanError
from counterpoint.optim.validation import parse_digits, renamed_hint
from counterpoint.strategies.buckets import parse_bytes
from counterpoint.strategies.renamed import RENAMED

ByteSize = NewType("ByteSize", int)
"""A size, written as ``64MiB`` or as a number of bytes."""

MicrobatchCount = NewType("MicrobatchCount", int)
"""A number of microbatches, which is a property of the plan and not of a strategy."""


class PlanTextError(PlanError):
    """What is wrong with a part of the text of a plan; the caller that has the text adds it, with :meth:`in_text`.

    Args:
        subject: the part.
        fact: what is wrong with it.
        column: the index in the text to be marked, if the place is not obvious.
    """

    def __init__(self, subject: str, fact: str, column: int | None = None) -> None:
        super().__init__(f"{subject} {fact}")
        self.subject, self.fact, self.column = subject, fact, column

    def in_text(self, text: str) -> PlanError:
        """Return the error with the text of the plan."""
        if self.column is None:
            return PlanError(f"{self.subject} in {text!r} {self.fact}")
        return PlanError(f"{self}\n  {text}\n  {' ' * self.column}^")


@cache
def option_types(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the type of each option of a strategy: its annotation."""
    return get_type_hints(function.func if isinstance(function, partial) else function)


def option_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the options of a system: the keyword-only parameters of its function."""
    params = inspect.signature(function).parameters.values()
    return tuple(param.name for param in params if param.kind is inspect.Parameter.KEYWORD_ONLY)


def parse_option(key: str, value: str, kind: Any) -> Any:  # noqa: ANN401 - types and values of all sorts
    """Parse the value of an option.

    Args:
        key: name of the option.
        value: the text after its ``=``.
        kind: its type; a name is checked by the strategy itself.

    Raises:
        PlanError: the text is not of that type; a :class:`PlanTextError` if the whole plan should be shown.
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
        return _parse_float(key, value)
    try:
        if kind in {int, MicrobatchCount} or all(isinstance(choice, int) for choice in get_args(kind) or ("",)):
            count = _parse_int(key, value)
            return _check_microbatch_count(key, count) if kind is MicrobatchCount else count
        if get_origin(kind) is tuple:
            return tuple(_parse_int(key, part.strip()) for part in value.strip("()").split(",") if part.strip())
    except PlanError:
        raise
    except ValueError:
        raise PlanTextError(f"{key}={value}", "must be whole numbers") from None
    return value


def _check_microbatch_count(key: str, count: int) -> int:
    if count < 1:
        raise PlanTextError(f"{key}={count}", "is a number of microbatches; give 1 or more")
    return count


def _parse_int(key: str, text: str) -> int:
    """Parse an integer that has only digits; Python's own ``int`` also accepts 1_6 and +4."""
    if re.fullmatch(r"-?[0-9]+", text) is None:
        raise ValueError(text)
    number = parse_digits(text.removeprefix("-"), key)
    return -number if text.startswith("-") else number


def _parse_float(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise PlanTextError(f"{key}={value}", "must be a number") from None
    if not isfinite(number):
        raise PlanTextError(f"{key}={value}", "must be a finite number")
    return number


def require_choice(system: str, option: str, value: object, choices: Sequence[object]) -> None:
    """Check that an option of a system has one of its values.

    Raises:
        PlanError: it has another one.
    """
    if value not in choices:
        texts = [f"{option}={choice}" for choice in choices]
        hint = renamed_hint(f"{option}={value}", RENAMED)
        raise PlanError(f"{system} has no {option}={value}; give {', '.join(texts[:-1])} or {texts[-1]}{hint}")


def format_term(name: str, degree: int, options: Iterable[str] = ()) -> str:
    """Write a strategy as in a plan."""
    return f"{name}({', '.join([str(degree), *options])})"


def changed_options(strategy: Any, *names: str) -> Iterator[str]:  # noqa: ANN401 - any dataclass
    """Yield those of a strategy's options that differ from their defaults, as in a plan.

    Example:
        >>> from counterpoint.strategies.tensor import Tensor
        >>> list(changed_options(Tensor(2, dims=("hidden", "heads", "vocab")), "dims"))
        ['dims=hidden+heads+vocab']
    """
    defaults = {field.name: field.default for field in fields(strategy)}
    for name in names:
        value = getattr(strategy, name)
        if value != defaults[name]:
            yield f"{name}={_format_value(value)}"


def _format_value(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(value) if isinstance(value[0], str) else f"({','.join(map(str, value))})"
    return str(value)
