"""Variables that a user may have set for every program, read in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping

THREADS = "OMP_NUM_THREADS"


def threads_wanted(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the threads per process that the user has asked for with OMP_NUM_THREADS; None if they have not."""
    text = (os.environ if environ is None else environ).get(THREADS, "")
    return int(text) if text.isdigit() and int(text) > 0 else None
