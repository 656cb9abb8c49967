"""Environment variables that users set for all programs: threads, allocator, cache, and those of Horovod and MXNet."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.optim.validation import parse_digits


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the cache directory: ``counterpoint`` in XDG_CACHE_HOME, or in ``~/.cache``.

    Example:
        >>> str(cache_dir({"XDG_CACHE_HOME": "/tmp/cache"}))
        '/tmp/cache/counterpoint'
    """
    variables = os.environ if environ is None else environ
    place = variables.get("XDG_CACHE_HOME", "")
    return (Path(place) if place.startswith("/") else Path.home() / ".cache") / "counterpoint"


MEBIBYTE = 1 << 20

THREADS_VARIABLE = "OMP_NUM_THREADS"
VISIBILITY_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
ALLOCATOR_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
TUNABLES_VARIABLE = "GLIBC_TUNABLES"
CAPABILITY_VARIABLE = "ATEN_CPU_CAPABILITY"
INSTRUCTION_VARIABLES = (CAPABILITY_VARIABLE, "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


def requested_threads(environ: Mapping[str, str] | None = None) -> int | None:
    """Return OMP_NUM_THREADS; None if it is not set."""
    text = (os.environ if environ is None else environ).get(THREADS_VARIABLE, "")
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) and int(text) > 0 else None


def visibility_variables(environ: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """Return the variables that choose among the GPUs of this host, with their values; an empty one hides all.

    Example:
        >>> visibility_variables({"CUDA_VISIBLE_DEVICES": "0,2"})
        [('CUDA_VISIBLE_DEVICES', '0,2')]
    """
    variables = os.environ if environ is None else environ
    return [(name, variables[name]) for name in VISIBILITY_VARIABLES if name in variables]


def shares_gpus(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether NCCL is set to accept several ranks of one GPU, which it can since version 2.30.

    Example:
        >>> shares_gpus({"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
        True
    """
    return (os.environ if environ is None else environ).get("NCCL_MULTI_RANK_GPU_ENABLE", "") == "1"


def allocator_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the variables with which the user has configured glibc's allocator."""
    variables = os.environ if environ is None else environ
    named = [name for name in ALLOCATOR_VARIABLES if variables.get(name)]
    return named + [name for name in (TUNABLES_VARIABLE,) if "glibc.malloc." in variables.get(name, "")]


def instruction_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables with which the user limits the instruction sets of torch and oneDNN.

    Example:
        >>> instruction_variables({"ATEN_CPU_CAPABILITY": "default"})
        {'ATEN_CPU_CAPABILITY': 'default'}
    """
    variables = os.environ if environ is None else environ
    return {name: variables[name] for name in INSTRUCTION_VARIABLES if variables.get(name)}


@dataclass(frozen=True, slots=True)
class HorovodVariables:
    """Horovod's environment variables that have a meaning here.

    Args:
        fusion_bytes: gradients are fused up to this size; 0: not at all.
        timeline: file for a timeline of the run; None for none.
    """

    fusion_bytes: int = 128 * MEBIBYTE
    timeline: str | None = None


@dataclass(frozen=True, slots=True)
class KvstoreVariables:
    """MXNet KVStore's environment variables that have a meaning here.

    Args:
        num_servers: of a job.
        role: the process's role in MXNet's launcher; None without it.
    """

    num_servers: int = 1
    role: str | None = None


def kvstore_variables(environ: Mapping[str, str] | None = None) -> KvstoreVariables:
    """Return DMLC_NUM_SERVER and DMLC_ROLE.

    Raises:
        LaunchError: the number of servers is invalid.
    """
    variables = os.environ if environ is None else environ
    text = variables.get("DMLC_NUM_SERVER", "").strip()
    if text and not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise LaunchError(f"DMLC_NUM_SERVER={text!r} is not a number of servers; give 1 or more, or unset it")
    num_servers = parse_digits(text, "DMLC_NUM_SERVER", LaunchError) if text else KvstoreVariables().num_servers
    return KvstoreVariables(num_servers, variables.get("DMLC_ROLE") or None)


def horovod_variables(environ: Mapping[str, str] | None = None) -> HorovodVariables:
    """Return HOROVOD_FUSION_THRESHOLD, in bytes, and HOROVOD_TIMELINE.

    Raises:
        LaunchError: the threshold is not a number of bytes.
    """
    variables = os.environ if environ is None else environ
    text = variables.get("HOROVOD_FUSION_THRESHOLD", "").strip()
    if text and not (text.isascii() and text.isdigit()):
        raise LaunchError(
            f"HOROVOD_FUSION_THRESHOLD={text!r} is not a number of bytes; give one, such as {64 * MEBIBYTE}, or 0 to "
            "reduce every gradient separately"
        )
    default = HorovodVariables()
    return HorovodVariables(
        parse_digits(text, "HOROVOD_FUSION_THRESHOLD", LaunchError) if text else default.fusion_bytes,
        variables.get("HOROVOD_TIMELINE") or default.timeline,
    )
