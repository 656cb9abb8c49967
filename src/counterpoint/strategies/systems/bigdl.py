"""BigDL: reduce-scatter and all-gather as two Spark shuffles, with the update between them."""

from __future__ import annotations

from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.zero import Zero


def bigdl(degree: int) -> tuple[Strategy, ...]:
    """Return BigDL: each partition sums the gradients of its shard of the weights, updates it and broadcasts it.

    On Spark :func:`counterpoint.spark.training.train` runs this program, with two jobs per step.

    Args:
        degree: number of ranks along the new axis, which are partitions on Spark.

    Promise:
        The same results as single-process training, up to rounding.

    Cost:
        Bytes sent per rank and step: 2 (n-1)/n of the weights. Optimizer state per rank: 1/n.

    Source:
        Dai et al., BigDL: A Distributed Deep Learning Framework for Big Data, SoCC 2019, section 3.3.
    """
    return (Zero(degree, level=1),)


UNSUPPORTED_IN_BIGDL = {
    "compress": "it truncates to 16 bits; on Spark give SparkOptions(codec='bf16'), which rounds them",
    "drop_percentage": "it needs the times of Spark tasks; drop it, and on Spark give "
    "SparkOptions(straggler_policy=StragglerPolicy(...))",
    "core_number": "threads of a rank share its weights, always; drop it",
}
