"""Checks of Spark's settings before training: security, and memory for the model."""

from __future__ import annotations

import re
from collections.abc import Mapping

from counterpoint.errors import PlanError
from counterpoint.terminal_text import warn

SECURITY_SETTINGS = {
    "spark.authenticate": "anybody who can connect to its ports can run code",
    "spark.network.crypto.enabled": "traffic between executors is not encrypted",
    "spark.io.encryption.enabled": "data that executors write to their disks is not encrypted",
}
"""Settings that must be true, and the risk otherwise."""

MIB = 1 << 20
INTERPRETER_BYTES = 300 * MIB
"""Memory of Python with torch, without a model."""
MIN_OVERHEAD_BYTES = 384 * MIB
WEIGHT_COPIES = 4
"""Copies of the weights in a worker: received weights, the replica, its gradients, and the flat gradient."""


def is_local_master(master: str) -> bool:
    """Return whether Spark runs only on this machine.

    Example:
        >>> [is_local_master(master) for master in ("local[2]", "local-cluster[2,1,1024]", "spark://host:7077")]
        [True, True, False]
    """
    return master == "local" or master.startswith(("local[", "local-cluster["))


def insecure_settings(master: str, settings: Mapping[str, str]) -> list[str]:
    """Return a line for each insecure setting; none on one machine, where Spark does not listen to others.

    Example:
        >>> insecure_settings("yarn", {"spark.authenticate": "true", "spark.network.crypto.enabled": "true"})
        ['spark.io.encryption.enabled is off: data that executors write to their disks is not encrypted']
    """
    if is_local_master(master):
        return []
    return [
        f"{name} is off: {risk}"
        for name, risk in SECURITY_SETTINGS.items()
        if settings.get(name, "false").strip().lower() != "true"
    ]


def warn_insecure_settings(master: str, settings: Mapping[str, str]) -> None:
    """Warn once per training about insecure settings."""
    problems = insecure_settings(master, settings)
    if problems:
        warn(
            f"Spark at {master} is not protected: {'; '.join(problems)}; set them to true when starting Spark, with "
            "spark.authenticate.secret in a file or the environment, never on the command line",
            RuntimeWarning,
            stacklevel=3,
        )


def parse_size(text: str) -> int:
    """Return the bytes of a size as Spark writes it; MiB without a unit.

    Raises:
        PlanError: the text is not a size.

    Example:
        >>> parse_size("2g"), parse_size("512"), parse_size("1024k")
        (2147483648, 536870912, 1048576)
    """
    match = re.fullmatch(r"\s*(\d+)\s*([kmgt]?)b?\s*", text.lower())
    if match is None:
        raise PlanError(f"{text!r} is not a Spark size; give 2g or 512m, for instance")
    return int(match[1]) << {"k": 10, "": 20, "m": 20, "g": 30, "t": 40}[match[2]]


def worker_memory_limit(master: str, settings: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the setting that limits the memory of a Python worker, and its bytes; None without a limit."""
    if "spark.executor.pyspark.memory" in settings:
        cores = int(settings.get("spark.executor.cores", "1")) // int(settings.get("spark.task.cpus", "1"))
        return "spark.executor.pyspark.memory", parse_size(settings["spark.executor.pyspark.memory"]) // max(1, cores)
    if not master.startswith(("yarn", "k8s")):
        return None
    name = "spark.executor.memoryOverhead"
    if name in settings:
        return name, parse_size(settings[name])
    factor = float(settings.get("spark.executor.memoryOverheadFactor", "0.1"))
    share = int(parse_size(settings.get("spark.executor.memory", "1g")) * factor)
    return name, max(MIN_OVERHEAD_BYTES, share)


def check_worker_memory(weight_bytes: int, master: str, settings: Mapping[str, str]) -> None:
    """Check that a worker has enough memory for a replica.

    Args:
        weight_bytes: of all trained parameters.
        master: of Spark.
        settings: of Spark.

    Raises:
        PlanError: it has not.

    Example:
        >>> check_worker_memory(2**30, "yarn", {"spark.executor.memoryOverhead": "1g"})
        Traceback (most recent call last):
        counterpoint.errors.PlanError: a Python worker needs at least 4,609,540,096 bytes for 1,073,741,824 bytes of \
    weights (4 copies, and Python with torch), but spark.executor.memoryOverhead is 1,073,741,824 bytes; set \
    spark.executor.memoryOverhead=4396m or more
    """
    bound = worker_memory_limit(master, settings)
    needed = WEIGHT_COPIES * weight_bytes + INTERPRETER_BYTES
    if bound is not None and bound[1] < needed:
        name, available = bound
        raise PlanError(
            f"a Python worker needs at least {needed:,} bytes for {weight_bytes:,} bytes of weights ({WEIGHT_COPIES} "
            f"copies, and Python with torch), but {name} is {available:,} bytes; set "
            f"{name}={-(-needed // MIB)}m or more"
        )
