"""Where this user's programs keep what can be made again.

Variables that a user may have set for every program, read in one place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from counterpoint.errors import LaunchError


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for what can be made again: ``counterpoint`` in XDG_CACHE_HOME, or in ``.cache`` at home.

    Example:
        >>> str(cache_folder({"XDG_CACHE_HOME": "/tmp/cache"}))
        '/tmp/cache/counterpoint'
    """
    variables = os.environ if environ is None else environ
    place = variables.get("XDG_CACHE_HOME", "")
    return (Path(place) if place.startswith("/") else Path.home() / ".cache") / "counterpoint"


MEBIBYTE = 1 << 20

THREADS_VARIABLE = "OMP_NUM_THREADS"
ALLOCATOR_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
TUNABLES_VARIABLE = "GLIBC_TUNABLES"


def requested_threads(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the threads per process that the user has asked for with OMP_NUM_THREADS; None if they have not."""
    text = (os.environ if environ is None else environ).get(THREADS_VARIABLE, "")
    return int(text) if text.isdigit() and int(text) > 0 else None


def allocator_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the variables by which the user has set up glibc's allocator; none where they have not."""
    variables = os.environ if environ is None else environ
    named = [name for name in ALLOCATOR_VARIABLES if variables.get(name)]
    return named + [name for name in (TUNABLES_VARIABLE,) if "glibc.malloc." in variables.get(name, "")]


@dataclass(frozen=True, slots=True)
class HorovodVariables:
    """What Horovod's users set in the environment, as far as it means something here.

    Args:
        fusion_bytes: gradients are reduced together up to this size; 0: each alone.
        timeline: the file for a timeline of the whole run; None for none.
    """

    fusion_bytes: int = 128 * MEBIBYTE
    timeline: str | None = None


@dataclass(frozen=True, slots=True)
class KvstoreVariables:
    """What users of MXNet's KVStore set in the environment, as far as it means something here.

    Args:
        num_servers: of a job.
        role: what MXNet's own launcher has started this process as; None where it has not.
    """

    num_servers: int = 1
    role: str | None = None


def kvstore_variables(environ: Mapping[str, str] | None = None) -> KvstoreVariables:
    """Return DMLC_NUM_SERVER and DMLC_ROLE.

    Raises:
        LaunchError: the number of servers is none.
    """
    variables = os.environ if environ is None else environ
    text = variables.get("DMLC_NUM_SERVER", "").strip()
    if text and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise LaunchError(f"DMLC_NUM_SERVER={text!r} is not a number of servers; give 1 or more, or unset it")
    return KvstoreVariables(int(text) if text else KvstoreVariables().num_servers, variables.get("DMLC_ROLE") or None)


def horovod_variables(environ: Mapping[str, str] | None = None) -> HorovodVariables:
    """Return HOROVOD_FUSION_THRESHOLD, in bytes, and HOROVOD_TIMELINE.

    Raises:
        LaunchError: the threshold is no number of bytes.
    """
    variables = os.environ if environ is None else environ
    text = variables.get("HOROVOD_FUSION_THRESHOLD", "").strip()
    if text and not (text.isascii() and text.isdigit()):
        raise LaunchError(
            f"HOROVOD_FUSION_THRESHOLD={text!r} is not a number of bytes; give one, such as {64 * MEBIBYTE}, or 0 to "
            "reduce every gradient alone"
        )
    default = HorovodVariables()
    return HorovodVariables(
        int(text) if text else default.fusion_bytes, variables.get("HOROVOD_TIMELINE") or default.timeline
    )
