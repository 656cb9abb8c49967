"""Hints for names that do not exist."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


def suggest_name(name: str, known: Sequence[str]) -> str:
    """Return the end of an error about a name that does not exist: the nearest one, or nothing if none is near.

    Example:
        >>> suggest_name("stag", ["stage", "overlap_comm"])
        "; did you mean 'stage'?"
    """
    by_lower_name = {candidate.lower(): candidate for candidate in known}
    near = get_close_matches(name.lower(), by_lower_name, n=1)
    return f"; did you mean {by_lower_name[near[0]]!r}?" if near else ""
