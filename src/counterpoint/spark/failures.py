"""Translation of Spark's job failures into errors with a fact, a rule and a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from counterpoint.errors import LaunchError, PlanError

NO_MODULE = "No module named 'counterpoint'"
ABORTED = "Job aborted"
BARRIER_REMEDIES = {
    "SPARK-24820": "a barrier stage cannot follow coalesce(), union() or limit(); call repartition(n) on the data, or "
    "write it to files first",
    "SPARK-24942": "executors are allocated dynamically, but all ranks must run at the same time; set "
    "spark.dynamicAllocation.enabled=false",
}
"""Remedy by the number of Spark's error for barrier stages."""


@contextmanager
def translate_spark_errors(label: str) -> Iterator[None]:
    """Translate errors of Spark raised inside the block.

    Args:
        label: what the job computes.

    Raises:
        PlanError: the task's closure cannot be serialized.
        LaunchError: Spark aborted the job.
    """
    from py4j.protocol import Py4JError

    try:
        yield
    except Py4JError as error:
        raise LaunchError(format_failure(str(error), label)) from error
    except Exception as error:
        if type(error).__name__ != "PicklingError":  # of Spark's own serializer
            raise
        raise PlanError(serialization_error(str(error))) from error


def serialization_error(text: str) -> str:
    """Return the message for a closure that cannot be serialized, given Spark's reason."""
    return (
        f"cannot serialize the model, the loss or the optimizer for Spark's executors: {text}; remove objects that "
        "belong to this process (files, locks, connections, sessions), or create them on first use"
    )


def format_failure(text: str, label: str) -> str:
    r"""Return the message for a job that Spark aborted.

    Args:
        text: Spark's whole error text.
        label: what the job computes.

    Example:
        >>> format_failure(
        ...     ": SparkException: Job aborted due to stage failure: Task 1 failed 4 times\nDriver stacktrace:",
        ...     "step 7",
        ... )
        "Spark aborted step 7: Job aborted due to stage failure: Task 1 failed 4 times; see the executors' logs"
    """
    if NO_MODULE in text:
        return (
            f"Spark aborted {label}: counterpoint is not installed on its executors; install it there with the same "
            "version of torch, or ship an environment with spark.archives"
        )
    for number, remedy in BARRIER_REMEDIES.items():
        if number in text:
            return f"Spark rejected {label}: {remedy}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    aborted = next((line[line.index(ABORTED) :] for line in lines if ABORTED in line), None)
    reason = aborted or (lines[0] if lines else "no reason given")
    return f"Spark aborted {label}: {reason}; see the executors' logs"
