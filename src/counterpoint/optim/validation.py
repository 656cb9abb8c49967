"""Checks of option values, and of options under an earlier name; raise errors that name the remedy."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar, cast

from counterpoint.errors import PlanError

Target = TypeVar("Target", bound=Callable[..., Any])


def require_at_least(least: float, **options: float) -> None:
    """Check that numbers are finite and not below a minimum.

    Raises:
        PlanError: one is not.

    Example:
        >>> require_at_least(0, lr=-1)
        Traceback (most recent call last):
        counterpoint.errors.PlanError: lr=-1 is out of range; give a finite number, 0 or more
    """
    for name, value in options.items():
        if not (math.isfinite(value) and value >= least):
            raise PlanError(f"{name}={value!r} is out of range; give a finite number, {least} or more")


def require_decay(**options: float) -> None:
    """Check that decay factors of running means are from 0 to below 1.

    Raises:
        PlanError: one is not.
    """
    for name, value in options.items():
        if not 0 <= value < 1:
            raise PlanError(f"{name}={value!r} is not a decay factor; give a number from 0 to below 1, such as 0.9")


def require_one_of(name: str, value: object, allowed: Iterable[str]) -> None:
    """Check that a value is one of some names.

    Raises:
        PlanError: it is not; the message suggests the nearest one.
    """
    names = list(allowed)
    if value not in names:
        near = get_close_matches(str(value), names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "give one of them"
        raise PlanError(f"{name}={value!r} is not one of {', '.join(names)}; {hint}")


MAX_SECONDS = 2_000_000.0
"""The longest time limit, 23 days: the kernel counts those of ``poll`` in milliseconds of 31 bits."""

MAX_QUOTED = 200
"""How much of a wrong value an error shows, in characters."""


def shorten(text: str) -> str:
    """Return a text for an error, without its end if it is very long.

    Example:
        >>> shorten("short"), len(shorten("long" * 1000))
        ('short', 221)
    """
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}... ({len(text)} characters)"


MAX_DIGITS = 20
"""The largest number of digits of a whole number in a text: 2**64 - 1, the largest seed, has as many."""


def parse_digits(
    text: str, name: str, error: Callable[[str], Exception] = PlanError, *, max_digits: int = MAX_DIGITS
) -> int:
    """Return the number that a text of digits stands for; ``int`` refuses thousands of them with an error of its own.

    Args:
        text: digits only.
        name: what the number is, for the error.
        error: makes the error.
        max_digits: the largest number of digits.

    Raises:
        PlanError: there are more digits than a number here may have; or what ``error`` makes.

    Example:
        >>> parse_digits("9" * 5000, "the seed")
        Traceback (most recent call last):
        counterpoint.errors.PlanError: the seed has 5000 digits; give at most 20
    """
    if len(text) > max_digits:
        raise error(f"{name} has {len(text)} digits; give at most {max_digits}")
    return int(text)


def require_counts(*, optional: bool = False, **counts: Any) -> None:  # noqa: ANN401 - whatever was given
    """Check that counts are whole numbers and at least 1.

    Args:
        optional: whether None is allowed.
        **counts: the counts by name.

    Raises:
        PlanError: one is not.

    Example:
        >>> require_counts(epochs=0)
        Traceback (most recent call last):
        counterpoint.errors.PlanError: epochs=0 is not a count; give a whole number, 1 or more
    """
    for name, count in counts.items():
        if count is None and optional:
            continue
        try:
            is_valid = operator.index(count) >= 1
        except TypeError:
            is_valid = False
        if not is_valid:
            none = ", or None" if optional else ""
            raise PlanError(f"{name}={count!r} is not a count; give a whole number, 1 or more{none}")


def renamed_hint(old: str, names: Mapping[str, str]) -> str:
    """Return a remedy for errors about an earlier name, or the empty string for one that never existed.

    Args:
        old: the name that was given.
        names: from earlier to present names.

    Example:
        >>> renamed_hint("colour", {"colour": "color"}), renamed_hint("size", {"colour": "color"})
        ('; colour is now called color', '')
    """
    return f"; {old} is now called {names[old]}" if old in names else ""


def renamed_parameters(names: Mapping[str, str]) -> Callable[[Target], Target]:
    """Return a decorator of a class or function: a call with a parameter's earlier name raises an error with the new.

    Args:
        names: from earlier to present names.

    Example:
        >>> @renamed_parameters({"colour": "color"})
        ... class Pen:
        ...     def __init__(self, color): ...
        >>> Pen(colour="red")
        Traceback (most recent call last):
        counterpoint.errors.PlanError: Pen has no parameter colour; colour is now called color
    """

    def decorate(target: Target) -> Target:
        called: Callable[..., Any] = target
        if isinstance(target, type):
            called = target.__init__  # type: ignore[misc]  # of this very class, before it can have subclasses

        @wraps(called)
        def checked(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever was given
            for old in kwargs.keys() & names.keys():
                hint = renamed_hint(old, names)
                raise PlanError(f"{getattr(target, '__name__', target)} has no parameter {old}{hint}")
            return called(*args, **kwargs)

        if not isinstance(target, type):
            return cast("Target", checked)
        target.__init__ = checked  # type: ignore[misc]
        return target

    return decorate


def checked_call(target: Target) -> Target:
    """Decorate a function or method: a misspelt keyword, or too many positional arguments, are errors with a remedy.

    Args:
        target: that is called.

    Example:
        >>> @checked_call
        ... def paint(wall, *, color="red"): ...
        >>> paint("north", colour="blue")
        Traceback (most recent call last):
        counterpoint.errors.PlanError: paint has no option 'colour'; did you mean color?
        >>> paint("north", "blue")
        Traceback (most recent call last):
        counterpoint.errors.PlanError: paint takes 1 positional argument (wall), but 2 were given; give what...
    """
    parameters = dict(inspect.signature(target).parameters)
    is_method = next(iter(parameters), "") == "self"
    if is_method:
        del parameters["self"]
    name = target.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @wraps(target)
    def checked(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever was given
        _require_arguments(name, parameters, len(args) - is_method, kwargs)
        return target(*args, **kwargs)

    return cast("Target", checked)


def _require_arguments(
    name: str, parameters: Mapping[str, inspect.Parameter], num_positional: int, given: Collection[str]
) -> None:
    """Check that a call has the arguments that a function needs, and no others.

    Args:
        name: of the function.
        parameters: of the function.
        num_positional: the number of positional arguments.
        given: the names of the others.

    Raises:
        PlanError: it has not.
    """
    by_position = [key for key, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    by_keyword = [key for key, one in parameters.items() if one.kind is one.KEYWORD_ONLY]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    too_many = num_positional - len(by_position)
    if too_many > 0:
        call = ", ".join([*by_position, *(f"{key}=..." for key in by_keyword[:too_many])])
        raise PlanError(
            f"{name} takes {len(by_position)} positional argument{'s' * (len(by_position) != 1)} "
            f"({', '.join(by_position)}), but {num_positional} were given; give what follows by keyword: {name}({call})"
        )
    known = [*by_position, *by_keyword]
    unknown = [key for key in given if key not in known]
    if unknown and not takes_any:
        near = get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"its options are {', '.join(known)}"
        raise PlanError(f"{name} has no option {unknown[0]!r}; {hint}")
    for key in [*by_position[num_positional:], *by_keyword]:
        if parameters[key].default is inspect.Parameter.empty and key not in given:
            near = get_close_matches(key, unknown, n=1)
            hint = f"; {near[0]} was given: did you mean {key}?" if near else f"; give {key}=..."
            raise PlanError(f"{name} needs {key}{hint}")
