"""BigDL: an all-reduce made of Spark's shuffles, with the update between its two halves."""

from __future__ import annotations

from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.zero import Zero


def bigdl(degree: int) -> tuple[Strategy, ...]:
    """Return BigDL: each partition has a slice of the weights, adds up its gradients, updates it and hands it out.

    On Spark itself it is :func:`counterpoint.spark.training.train`, which carries this program out in two jobs a step.

    Args:
        degree: ranks along the new axis, which are partitions on Spark.

    Promise:
        The same numbers as on one rank, to rounding.

    Cost:
        Bytes sent per rank and step: 2 (n-1)/n of the weights. Optimizer state per rank: 1/n.

    Source:
        Dai et al., BigDL: A Distributed Deep Learning Framework for Big Data, SoCC 2019, section 3.3.
    """
    return (Zero(degree, level=1),)


UNSUPPORTED_IN_BIGDL = {
    "compress": "there it cuts numbers off at 16 bits; on Spark give Options(code='bf16'), which rounds them",
    "drop_percentage": "it is by the clock of Spark's tasks; give Options(drop=Drop(...)) there, and leave it out here",
    "core_number": "threads of a rank share its weights, always; leave it out",
}
