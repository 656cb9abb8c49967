"""Which blocks go to which stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise
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


def dealt_evenly(
    costs: Sequence[float], stages: Sequence[int], left: Sequence[int] = (), inside: Sequence[bool] = ()
) -> tuple[int, ...]:
    """Return how many blocks each chunk has so that the stage with most work, over all its chunks, has little.

    Args:
        costs: forward work of each block.
        stages: the stage that runs each chunk.
        left: as for :func:`even_cuts`.
        inside: as for :func:`even_cuts`.

    Returns:
        One positive count per chunk. Begun as the most even chunks, ends of chunks are moved by a block, one or two at
        a time, as long as the busiest stage has less work by it, or less is sent, or the slowest chunk has less.

    Raises:
        PlanError: there are more chunks than blocks.

    Example:
        >>> dealt_evenly([1, 5, 5, 5, 5, 7], (0, 1, 1, 0))  # 13 units of work for one stage, 15 for the other
        (2, 1, 2, 1)
    """
    cuts = even_cuts(costs, (1,) * len(stages), left, inside)
    if len(set(stages)) == len(stages):
        return cuts
    sums = [0.0, *accumulate(costs)]

    def judge(stops: Sequence[int]) -> tuple[float, int, float, int]:
        """Return what is to be small, the first most of all: a stage's work, what is sent, a chunk's work, cuts."""
        chunks = [sums[stop] - sums[start] for start, stop in pairwise((0, *stops))]
        totals = dict.fromkeys(stages, 0.0)
        for stage, work in zip(stages, chunks, strict=True):
            totals[stage] += work
        ends = [stop - 1 for stop in stops[:-1]]
        sent = sum(left[end] for end in ends) if left else 0
        return max(totals.values()), sent, max(chunks), sum(inside[end] for end in ends) if inside else 0

    stops = tuple(accumulate(cuts))
    while (better := min(_moved(stops), key=judge, default=stops)) and judge(better) < judge(stops):
        stops = better
    return tuple(stop - start for start, stop in pairwise((0, *stops)))


def _moved(stops: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the ends of chunks with one or two of them moved by a block; every chunk keeps one."""
    places = range(len(stops) - 1)
    steps = [((place, by),) for place in places for by in (-1, 1)]
    pairs = [(*one, *other) for one, other in combinations(steps, 2) if one[0][0] != other[0][0]]
    for moves in (*steps, *pairs):
        changed = list(stops)
        for place, by in moves:
            changed[place] += by
        if all(start < stop for start, stop in pairwise((0, *changed))):
            yield tuple(changed)


def busiest(costs: Sequence[float], cuts: Sequence[int], replicas: Sequence[float], stages: Sequence[int]) -> float:
    """Return the work of the busiest stage of a cut, whose replicas share it.

    Args:
        costs: forward work of each block.
        cuts: how many blocks each chunk has.
        replicas: how many ranks share the work of each chunk.
        stages: the stage that runs each chunk.
    """
    sums = [0.0, *accumulate(costs)]
    totals = dict.fromkeys(stages, 0.0)
    for (start, stop), ranks, stage in zip(pairwise(accumulate(cuts, initial=0)), replicas, stages, strict=True):
        totals[stage] += (sums[stop] - sums[start]) / ranks
    return max(totals.values())


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
