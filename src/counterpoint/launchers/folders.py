"""Where this user's programs keep what can be made again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for what can be made again: ``counterpoint`` in XDG_CACHE_HOME, or in ``.cache`` at home.

    Example:
        >>> str(cache_folder({"XDG_CACHE_HOME": "/tmp/cache"}))
        '/tmp/cache/counterpoint'
    """
    variables = os.environ if environ is None else environ
    place = variables.get("XDG_CACHE_HOME", "")
    return (Path(place) if place.startswith("/") else Path.home() / ".cache") / "counterpoint"
