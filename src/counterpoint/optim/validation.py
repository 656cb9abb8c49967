"""Checks of option values, and of options under an earlier name; raise errors that name the remedy."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

from counterpoint.errors import PlanError

Class = TypeVar("Class", bound=type)


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


def renamed_parameters(names: Mapping[str, str]) -> Callable[[Class], Class]:
    """Return a class decorator: a call with a parameter's earlier name raises an error that has the new one.

    Args:
        names: from earlier to present names.

    Example:
        >>> @renamed_parameters({"colour": "color"})
        ... class Pen:
        ...     def __init__(self, color): ...
        >>> Pen(colour="red")
        Traceback (most recent call last):
        counterpoint.errors.PlanError: Pen has no parameter colour; it is now called color
    """

    def decorate(cls: Class) -> Class:
        init = cls.__init__  # type: ignore[misc]  # wrapped for this very class, before it can have subclasses

        @wraps(init)
        def checked_init(self: object, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - whatever was given
            try:
                init(self, *args, **kwargs)
            except TypeError:
                for old in kwargs.keys() & names.keys():
                    raise PlanError(f"{cls.__name__} has no parameter {old}; it is now called {names[old]}") from None
                raise

        cls.__init__ = checked_init  # type: ignore[misc]
        return cls

    return decorate
