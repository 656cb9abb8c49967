"""Timings of earlier days, so that a model is measured once on a machine.

A timing is a file ``timings/MODEL-DIGEST.json`` in a folder. The digest is of all that the figures depend on: the names
and sizes of parameters, the pieces with their counted work, the shapes of a sample, the sizes of microbatches, the loss
and the optimizer, the device, the threads, and the version of torch. If one of these is another one, or the file is
gone or cannot be read, the model is measured again; also where that is asked for. What else a machine does, and code
that changes its speed but none of these, is not seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from counterpoint.errors import PlanError
from counterpoint.model.timing import Timing
from counterpoint.model.timing_file import read_timing, write_timing


def remembered(
    folder: Path, facts: Mapping[str, object], measure: Callable[[], Timing], *, is_wanted_anew: bool = False
) -> Timing:
    """Return the timing that lies in a folder, or measure it and put it there.

    Args:
        folder: is made where it is not there.
        facts: all that the figures depend on, as JSON values.
        measure: gives the timing.
        is_wanted_anew: whether it is measured whatever lies there.

    Raises:
        PlanError: the folder cannot be written to.
    """
    path = place_of(folder, facts)
    if not is_wanted_anew and path.is_file():
        try:
            return read_timing(path.read_text(encoding="utf-8"))
        except (PlanError, OSError, UnicodeDecodeError):
            path.unlink(missing_ok=True)
    timing = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        draft.write_text(write_timing(timing), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise PlanError(f"the timing cannot be kept in {path.parent}: {error.strerror}; give another folder") from None
    return timing


def place_of(folder: Path, facts: Mapping[str, object]) -> Path:
    """Return the file of a timing; other facts have another file."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return folder / "timings" / f"{facts.get('model', 'model')}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
