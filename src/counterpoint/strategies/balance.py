"""Which blocks go to which stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from counterpoint.errors import PlanError


def even_cuts(costs: Sequence[float], replicas: Sequence[float]) -> tuple[int, ...]:
    """Return how many blocks each stage runs so that the slowest stage is as fast as can be.

    Args:
        costs: forward work of each block.
        replicas: how many replicas share the work of each stage, or how fast they all are together.

    Returns:
        One positive count per stage. Of equally good answers the one whose earlier stages are shorter.

    Raises:
        PlanError: there are more stages than blocks.
    """
    num_blocks, num_stages = len(costs), len(replicas)
    if num_stages > num_blocks:
        raise PlanError(
            f"the pipeline has {num_stages} stages, but the model has only {num_blocks} blocks; every stage needs one: "
            f"give at most {num_blocks} stages, or a model with more blocks"
        )
    sums = [0.0, *accumulate(costs)]
    best: dict[tuple[int, int], tuple[float, int]] = {(0, 0): (0.0, 0)}
    for stage in range(1, num_stages + 1):
        for stop in range(stage, num_blocks - (num_stages - stage) + 1):
            choices = (
                (max(best[stage - 1, start][0], (sums[stop] - sums[start]) / replicas[stage - 1]), start)
                for start in range(stage - 1, stop)
                if (stage - 1, start) in best
            )
            best[stage, stop] = min(choices)
    cuts, stop = [], num_blocks
    for stage in range(num_stages, 0, -1):
        start = best[stage, stop][1]
        cuts.append(stop - start)
        stop = start
    return tuple(reversed(cuts))
