"""The options of an optimizer's groups that a schedule may change, as values that can be written and compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group that are numbers, switches or a few numbers, as a schedule may change them."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in group.items()
        if all(isinstance(item, int | float) for item in (value if isinstance(value, tuple) else (value,)))
    }


def put_settings(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Give a group the options that :func:`settings` returned."""
    group.update({key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()})
