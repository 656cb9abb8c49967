"""What options that are numbers or words may be, checked when they are given."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from counterpoint.errors import PlanError


def require_at_least(least: float, **options: float) -> None:
    """Check that options are finite and not below what makes sense.

    Raises:
        PlanError: one is.

    Example:
        >>> require_at_least(0, lr=-1)
        Traceback (most recent call last):
        counterpoint.errors.PlanError: lr=-1 makes no sense; give a finite number, 0 or more
    """
    for name, value in options.items():
        if not (math.isfinite(value) and value >= least):
            raise PlanError(f"{name}={value!r} makes no sense; give a finite number, {least} or more")


def require_decay(**options: float) -> None:
    """Check that factors of running means are from 0 to below 1.

    Raises:
        PlanError: one is not.
    """
    for name, value in options.items():
        if not 0 <= value < 1:
            raise PlanError(f"{name}={value!r} makes no running mean; give a number from 0 to below 1, such as 0.9")


def require_one_of(name: str, value: object, allowed: Iterable[str]) -> None:
    """Check that a value is one of a few words.

    Raises:
        PlanError: it is not; the message suggests the nearest one.
    """
    words = list(allowed)
    if value not in words:
        near = get_close_matches(str(value), words, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "give one of them"
        raise PlanError(f"{name}={value!r} is not one of {', '.join(words)}; {hint}")


def require_counts(*, optional: bool = False, **counts: Any) -> None:  # noqa: ANN401 - whatever was given
    """Check that numbers of things are whole and at least 1.

    Args:
        optional: whether None may stand for no such number.
        **counts: the numbers by their names.

    Raises:
        PlanError: one is not.

    Example:
        >>> require_counts(epochs=0)
        Traceback (most recent call last):
        counterpoint.errors.PlanError: epochs=0 is no number to count with; give a whole number, 1 or more
    """
    for name, count in counts.items():
        if count is None and optional:
            continue
        try:
            fits = operator.index(count) >= 1
        except TypeError:
            fits = False
        if not fits:
            none = ", or None" if optional else ""
            raise PlanError(f"{name}={count!r} is no number to count with; give a whole number, 1 or more{none}")
