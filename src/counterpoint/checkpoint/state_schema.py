"""Schemas of the state of checkpoints: what each value must be, so that a wrong one is named before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from counterpoint.optim.validation import shorten

MAX_INT = 2**63 - 1


@dataclass(frozen=True, slots=True, eq=False)
class ValueSchema:
    """What a value must be.

    Args:
        rule: in words, for errors.
        matches: tells whether a value is, without looking at the values in it.
        values: what every value in a list or mapping must be.
        names: what the values of a mapping under these names must be; it may have others.
        is_optional: whether the value may be missing.
    """

    rule: str
    matches: Callable[[Any], bool]
    values: ValueSchema | None = None
    names: Mapping[str, ValueSchema] | None = None
    is_optional: bool = False

    def find_flaw(self, value: object, path: str) -> str:
        """Return which value is wrong, what it is and must be; an empty text if there is none.

        Args:
            value: any value.
            path: of it.

        Example:
            >>> mapping(step=COUNT).find_flaw({"step": -1}, "state")
            'state.step is -1, but must be a whole number, 0 or more'
        """
        if not self.matches(value):
            return f"{path} is {describe_value(value)}, but must be {self.rule}"
        parts: Any = value
        for name, schema in (self.names or {}).items():
            if name in parts and (flaw := schema.find_flaw(parts[name], f"{path}.{name}")):
                return flaw
            if name not in parts and not schema.is_optional:
                return f"{path}.{name} is missing, but must be {schema.rule}"
        if self.values is not None:
            for key, part in parts.items() if isinstance(parts, dict) else enumerate(parts):
                if flaw := self.values.find_flaw(part, f"{path}[{shorten(repr(key))}]"):
                    return flaw
        return ""


def describe_value(value: object) -> str:
    """Return a value for an error: a number or a text itself, anything larger by its type and length."""
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return shorten(repr(value[:300] if isinstance(value, str) else value))


def is_count(value: object) -> bool:
    """Return whether a value is a whole number from 0 on, of 63 bits."""
    return type(value) is int and 0 <= value <= MAX_INT


def is_number(value: object) -> bool:
    """Return whether a value is a finite number, and no boolean."""
    return type(value) is float and isfinite(value) if type(value) is not int else abs(value) <= MAX_INT


def mapping(**names: ValueSchema) -> ValueSchema:
    """Return the schema of a mapping with values of these names."""
    return ValueSchema("an object", lambda value: isinstance(value, dict), names=names)


def mapping_of(values: ValueSchema) -> ValueSchema:
    """Return the schema of a mapping with any names."""
    return ValueSchema("an object", lambda value: isinstance(value, dict), values=values)


def list_of(values: ValueSchema) -> ValueSchema:
    """Return the schema of a list."""
    return ValueSchema("a list", lambda value: isinstance(value, list), values=values)


def optional(schema: ValueSchema) -> ValueSchema:
    """Return the schema of a value that may be missing from its mapping."""
    return replace(schema, is_optional=True)


COUNT = ValueSchema("a whole number, 0 or more", is_count)
POSITIVE = ValueSchema("a whole number, 1 or more", lambda value: is_count(value) and value > 0)
NUMBER = ValueSchema("a finite number", is_number)
FLAG = ValueSchema("true or false", lambda value: type(value) is bool)
TEXT = ValueSchema("a text", lambda value: type(value) is str)
