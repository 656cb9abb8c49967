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
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from counterpoint.errors import PlanError
from counterpoint.file_reader import read_regular_text
from counterpoint.file_writer import replace_file
from counterpoint.model.model_profile import ModelProfile, format_profile, parse_profile


def load_or_measure(
    folder: Path, attributes: Mapping[str, object], measure: Callable[[], ModelProfile], *, must_measure: bool = False
) -> ModelProfile:
    """Return the cached profile, or measure it and store it.

    Args:
        folder: of the cache; created, for this user only, if it does not exist.
        attributes: all that the times depend on, as JSON values.
        measure: measures the profile.
        must_measure: whether to measure even if a cached profile exists.

    Raises:
        PlanError: the folder cannot be written to, or other users can write to it.
    """
    path = cache_path(folder, attributes)
    check_owner(path.parent)
    if not must_measure:
        try:
            return parse_profile(read_regular_text(path))
        except (PlanError, OSError, UnicodeDecodeError):
            with suppress(OSError):  # what prevents it is an error when the new profile is written
                path.unlink(missing_ok=True)
    profile = measure()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, format_profile(profile))
    except OSError as error:
        raise PlanError(
            f"the profile cannot be written to {path.parent}: {error.strerror}; give another folder"
        ) from None
    return profile


def check_owner(folder: Path) -> None:
    """Check that a folder, if it exists, belongs to this user or root, and that only they and their group write to it.

    Raises:
        PlanError: it is another user's, or everybody can write to it.
    """
    try:
        status = folder.stat()
    except OSError:
        return
    if status.st_uid not in {os.geteuid(), 0} or status.st_mode & stat.S_IWOTH:
        raise PlanError(
            f"the cache {folder} belongs to user {status.st_uid} and has mode {status.st_mode & 0o7777:o}, so others "
            f"can change its profiles: give a folder of user {os.geteuid()} that only this user can write to"
        )


def cache_path(folder: Path, attributes: Mapping[str, object]) -> Path:
    """Return the file of a profile; other attributes have another file."""
    text = json.dumps(attributes, sort_keys=True, default=str)
    return (
        folder / "timings" / f"{attributes.get('model', 'model')}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    )
