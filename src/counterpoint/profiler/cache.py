"""Cache measured model profiles in a folder, so that a model is measured once on a machine.

A profile is the file ``timings/MODEL-DIGEST.json``. The digest covers all that the times depend on: the names and sizes
of parameters, the layers with their operation counts, the shapes of a sample, the microbatch sizes, the loss and the
optimizer, the device, the threads, and the version of torch. If one of these differs, the file is missing or cannot be
read, or a new measurement is requested, the model is measured again. Other processes on the machine, and code that
changes its speed but none of these, go unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from counterpoint.errors import PlanError
from counterpoint.file_reader import read_regular_text
from counterpoint.model.model_profile import ModelProfile, format_profile, parse_profile


def load_or_measure(
    folder: Path, attributes: Mapping[str, object], measure: Callable[[], ModelProfile], *, must_measure: bool = False
) -> ModelProfile:
    """Return the cached profile, or measure it and store it.

    Args:
        folder: of the cache; created if it does not exist.
        attributes: all that the times depend on, as JSON values.
        measure: measures the profile.
        must_measure: whether to measure even if a cached profile exists.

    Raises:
        PlanError: the folder cannot be written to.
    """
    path = cache_path(folder, attributes)
    if not must_measure and path.is_file():
        try:
            return parse_profile(read_regular_text(path))
        except (PlanError, OSError, UnicodeDecodeError):
            path.unlink(missing_ok=True)
    profile = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary_path = path.with_suffix(".tmp")
        temporary_path.write_text(format_profile(profile), encoding="utf-8")
        temporary_path.replace(path)
    except OSError as error:
        raise PlanError(
            f"the profile cannot be written to {path.parent}: {error.strerror}; give another folder"
        ) from None
    return profile


def cache_path(folder: Path, attributes: Mapping[str, object]) -> Path:
    """Return the file of a profile; other attributes have another file."""
    text = json.dumps(attributes, sort_keys=True, default=str)
    return (
        folder / "timings" / f"{attributes.get('model', 'model')}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    )
