"""Places in source files, as the report of a run names them."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
_LIBRARY_PREFIXES = (
    str(PACKAGE) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    sysconfig.get_path("purelib") + os.sep,
    sysconfig.get_path("platlib") + os.sep,
    "<frozen",
)


def is_user_file(filename: str) -> bool:
    """Return whether a source file is the user's own, and of no library."""
    return not filename.startswith(_LIBRARY_PREFIXES)


def relative_path(filename: str) -> str:
    """Return the file's path from the current folder, if it is below that."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
