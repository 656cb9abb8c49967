"""Options of a plan that are one word, or a word with options of its own: ``bf16(reduce=bf16)``."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TypeVar

from counterpoint.errors import PlanError
from counterpoint.optim.validation import shorten

OptionT = TypeVar("OptionT")

_TEXT = re.compile(r"\s*(\w+)\s*(?:\((.*)\))?\s*", re.DOTALL)
MAX_TEXT = 200
"""Characters of a text; longer ones are refused."""


def parse_option_text(
    option: str, value: object, names: Collection[str], *, known: str, rule: str
) -> tuple[str, dict[str, str]]:
    """Return the word of a text and its options.

    Args:
        option: its name, for errors.
        value: the text.
        names: of the options it may have.
        known: what can be given instead, for errors.
        rule: which options there are, for errors.

    Raises:
        PlanError: it is not a text, cannot be read, or has an option that is unknown or there twice.

    Example:
        >>> parse_option_text("compile", "blocks(backend=eager)", {"backend"}, known="give 'blocks'", rule="backend")
        ('blocks', {'backend': 'eager'})
    """
    if not isinstance(value, str):
        raise PlanError(f"{option}={shorten(repr(value))} is a {type(value).__name__}; {known}")
    match = _TEXT.fullmatch(value[:MAX_TEXT])
    if match is None or len(value) > MAX_TEXT:
        raise PlanError(f"{option}={shorten(repr(value))} cannot be read; {known}")
    options: dict[str, str] = {}
    for part in filter(None, map(str.strip, (match[2] or "").split(","))):
        name, equals, text = map(str.strip, part.partition("="))
        if not equals or name not in names or name in options:
            raise PlanError(
                f"{option}={shorten(repr(value))}: {shorten(repr(part))} is not an option of it, or there twice; {rule}"
            )
        options[name] = text
    return match[1], options


def merge_option(name: str, option: OptionT | None, plan: OptionT | None) -> OptionT | None:
    """Return what a run has of an option, which is given to it or is part of its plan.

    Raises:
        PlanError: both are given, and differ.
    """
    if option is not None and plan is not None and option != plan:
        raise PlanError(f"{name}={option} was given, but the plan has {name} {plan}; give one of them")
    return option or plan
