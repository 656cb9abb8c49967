"""What Spark says when a job fails, told as what happened, the rule and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from counterpoint.errors import LaunchError, PlanError

NO_MODULE = "No module named 'counterpoint'"
ABORTED = "Job aborted"
BARRIER_REMEDIES = {
    "SPARK-24820": "coalesce(), union() or limit() stands before them, which a barrier stage does not allow; call "
    "repartition(n) on the data, or write them down first",
    "SPARK-24942": "it allocates executors dynamically, and ranks have to run all at once; set "
    "spark.dynamicAllocation.enabled=false",
}
"""What Spark refuses of stages whose tasks run together, by its own number, and what to do."""


@contextmanager
def translate_spark_errors(label: str) -> Iterator[None]:
    """Say what Spark's failures inside are about.

    Args:
        label: what Spark is asked for.

    Raises:
        PlanError: what a task has to know cannot be shipped.
        LaunchError: Spark gave a job up.
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
    """Return what is said of a training whose closure cannot be shipped.

    Args:
        text: why not.
    """
    return (
        f"Spark cannot ship the model, the loss or the optimizer to its executors: {text}; leave out of them what "
        "belongs to this process (files, locks, connections, sessions), or make it when it is first used"
    )


def format_failure(text: str, label: str) -> str:
    r"""Return what is said of a job that Spark gave up.

    Args:
        text: all that Spark said.
        label: what the job was for.

    Example:
        >>> format_failure(
        ...     ": SparkException: Job aborted due to stage failure: Task 1 failed 4 times\nDriver stacktrace:",
        ...     "step 7",
        ... )
        "Spark gave up step 7: Job aborted due to stage failure: Task 1 failed 4 times; the executors' logs say more"
    """
    if NO_MODULE in text:
        return (
            f"Spark gave up {label}, because its executors have no counterpoint; install it there, with the same "
            "version of torch, or ship an environment with spark.archives"
        )
    for number, remedy in BARRIER_REMEDIES.items():
        if number in text:
            return f"Spark refuses {label}: {remedy}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    aborted = next((line[line.index(ABORTED) :] for line in lines if ABORTED in line), None)
    found = aborted or (lines[0] if lines else "it said nothing")
    return f"Spark gave up {label}: {found}; the executors' logs say more"
