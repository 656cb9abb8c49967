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
from counterpoint.model.model_profile import ModelProfile, format_profile, parse_profile


def load_or_measure(
    folder: Path, attributes: Mapping[str, object], measure: Callable[[], ModelProfile], *, must_measure: bool = False
) -> ModelProfile:
    """Return the timing that lies in a folder, or measure it and put it there.

    Args:
        folder: is made where it is not there.
        facts: all that the figures depend on, as JSON values.
        measure: gives the timing.
        is_wanted_anew: whether it is measured whatever lies there.

    Raises:
        PlanError: the folder cannot be written to.
    """
    path = cache_path(folder, attributes)
    if not must_measure and path.is_file():
        try:
            return parse_profile(path.read_text(encoding="utf-8"))
        except (PlanError, OSError, UnicodeDecodeError):
            path.unlink(missing_ok=True)
    timing = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        draft.write_text(format_profile(timing), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise PlanError(f"the timing cannot be kept in {path.parent}: {error.strerror}; give another folder") from None
    return timing


def cache_path(folder: Path, attributes: Mapping[str, object]) -> Path:
    """Return the file of a timing; other facts have another file."""
    text = json.dumps(attributes, sort_keys=True, default=str)
    return (
        folder / "timings" / f"{attributes.get('model', 'model')}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    )
