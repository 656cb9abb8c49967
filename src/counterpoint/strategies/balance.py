"""Which blocks go to which stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

from counterpoint.errors import PlanError

NEARLY_AS_FAST = 1.05
"""A cut may have a slowest stage with so many times the least work: counted operations say no more of its seconds."""


def even_cuts(
    costs: Sequence[float], replicas: Sequence[float], left: Sequence[int] = (), inside: Sequence[bool] = ()
) -> tuple[int, ...]:
    """Return how many blocks each stage runs so that the slowest stage is as fast as can be, and little is sent.

    Args:
        costs: forward work of each block.
        replicas: how many replicas share the work of each stage, or how fast they all are together.
        left: what a cut behind each block sends, per sample; all alike when left out.
        inside: where these are parts of blocks, whether a cut behind each would be inside of one; of cuts as good, one
            with fewest of these is taken.

    Returns:
        One positive count per stage. Of the cuts whose slowest stage has at most 5 % more work than it must, one that
        sends least; of these one with the least work for the slowest; of these the one whose last stages begin first.

    Raises:
        PlanError: there are more stages than blocks.

    Example:
        >>> even_cuts([1, 1, 1], (1, 1), left=[8, 2, 0])
        (2, 1)
    """
    num_blocks, num_stages = len(costs), len(replicas)
    if num_stages > num_blocks:
        raise PlanError(
            f"the pipeline has {num_stages} stages, but the model has only {num_blocks} blocks; every stage needs one: "
            f"give at most {num_blocks} stages, or a model with more blocks"
        )
    _, least = _best(costs, replicas, [0] * num_blocks, inf)
    sent = left or [0] * num_blocks
    cuts, most = _best(costs, replicas, sent, NEARLY_AS_FAST * least)
    if any(inside):
        weighed = [(num_blocks + 1) * size + is_inside for size, is_inside in zip(sent, inside, strict=True)]
        cuts, _ = _best(costs, replicas, weighed, most)
    return cuts


def slowest(costs: Sequence[float], cuts: Sequence[int], replicas: Sequence[float]) -> float:
    """Return the work of the slowest stage of a cut; arguments as those of :func:`even_cuts`, and what it returns."""
    sums = [0.0, *accumulate(costs)]
    stops = accumulate(cuts, initial=0)
    return max(
        (sums[stop] - sums[start]) / ranks for (start, stop), ranks in zip(pairwise(stops), replicas, strict=True)
    )


def _best(
    costs: Sequence[float], replicas: Sequence[float], left: Sequence[int], limit: float
) -> tuple[tuple[int, ...], float]:
    """Return the cuts that send least with no stage above the limit, and the work of their slowest stage."""
    num_blocks, num_stages = len(costs), len(replicas)
    sums = [0.0, *accumulate(costs)]
    best: dict[tuple[int, int], tuple[int, float, int]] = {(0, 0): (0, 0.0, 0)}
    for stage in range(1, num_stages + 1):
        for stop in range(stage, num_blocks - (num_stages - stage) + 1):
            sent = left[stop - 1] if stop < num_blocks else 0
            work = {start: (sums[stop] - sums[start]) / replicas[stage - 1] for start in range(stage - 1, stop)}
            choices = [
                (best[stage - 1, start][0] + sent, max(best[stage - 1, start][1], spent), start)
                for start, spent in work.items()
                if (stage - 1, start) in best and spent <= limit
            ]
            if choices:
                best[stage, stop] = min(choices)
    cuts, stop = [], num_blocks
    for stage in range(num_stages, 0, -1):
        start = best[stage, stop][2]
        cuts.append(stop - start)
        stop = start
    return tuple(reversed(cuts)), best[num_stages, num_blocks][1]
