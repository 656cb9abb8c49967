"""Which blocks go to which stage.

Stages that begin inside a block, where that makes the slowest of them faster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from math import inf

from counterpoint.errors import PlanError
from counterpoint.model.spec import Block, ModelSpec

IMBALANCE_TOLERANCE = 1.05
"""A cut may have a slowest stage with so many times the least work: counted operations say no more of its seconds."""


def balance_stages(
    costs: Sequence[float],
    replicas: Sequence[float],
    boundary_bytes: Sequence[int] = (),
    splits_block: Sequence[bool] = (),
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
        >>> balance_stages([1, 1, 1], (1, 1), boundary_bytes=[8, 2, 0])
        (2, 1)
    """
    num_blocks, num_stages = len(costs), len(replicas)
    if num_stages > num_blocks:
        raise PlanError(
            f"the pipeline has {num_stages} stages, but the model has only {num_blocks} blocks; every stage needs one: "
            f"give at most {num_blocks} stages, or a model with more blocks"
        )
    _, least = _min_traffic_partition(costs, replicas, [0] * num_blocks, inf)
    sent = boundary_bytes or [0] * num_blocks
    cuts, most = _min_traffic_partition(costs, replicas, sent, IMBALANCE_TOLERANCE * least)
    if any(splits_block):
        weighed = [(num_blocks + 1) * size + is_inside for size, is_inside in zip(sent, splits_block, strict=True)]
        cuts, _ = _min_traffic_partition(costs, replicas, weighed, most)
    return cuts


def balance_chunks(
    costs: Sequence[float], stages: Sequence[int], boundary_bytes: Sequence[int] = (), splits_block: Sequence[bool] = ()
) -> tuple[int, ...]:
    """Return how many blocks each chunk has so that the stage with most work, over all its chunks, has little.

    Args:
        costs: forward work of each block.
        stages: the stage that runs each chunk.
        left: as for :func:`balance_stages`.
        inside: as for :func:`balance_stages`.

    Returns:
        One positive count per chunk. Begun as the most even chunks, ends of chunks are moved by a block, one or two at
        a time, as long as the busiest stage has less work by it, or less is sent, or the slowest chunk has less.

    Raises:
        PlanError: there are more chunks than blocks.

    Example:
        >>> balance_chunks([1, 5, 5, 5, 5, 7], (0, 1, 1, 0))  # 13 units of work for one stage, 15 for the other
        (2, 1, 2, 1)
    """
    cuts = balance_stages(costs, (1,) * len(stages), boundary_bytes, splits_block)
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
        sent = sum(boundary_bytes[end] for end in ends) if boundary_bytes else 0
        return max(totals.values()), sent, max(chunks), sum(splits_block[end] for end in ends) if splits_block else 0

    stops = tuple(accumulate(cuts))
    while (better := min(_neighbours(stops), key=judge, default=stops)) and judge(better) < judge(stops):
        stops = better
    return tuple(stop - start for start, stop in pairwise((0, *stops)))


def _neighbours(stops: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
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


def max_stage_cost(
    costs: Sequence[float], counts: Sequence[int], replicas: Sequence[float], stages: Sequence[int]
) -> float:
    """Return the work of the busiest stage of a cut, whose replicas share it.

    Args:
        costs: forward work of each block.
        cuts: how many blocks each chunk has.
        replicas: how many ranks share the work of each chunk.
        stages: the stage that runs each chunk.
    """
    sums = [0.0, *accumulate(costs)]
    totals = dict.fromkeys(stages, 0.0)
    for (start, stop), ranks, stage in zip(pairwise(accumulate(counts, initial=0)), replicas, stages, strict=True):
        totals[stage] += (sums[stop] - sums[start]) / ranks
    return max(totals.values())


def _min_traffic_partition(
    costs: Sequence[float], replicas: Sequence[float], boundary_bytes: Sequence[int], limit: float
) -> tuple[tuple[int, ...], float]:
    """Return the cuts that send least with no stage above the limit, and the work of their slowest stage."""
    num_blocks, num_stages = len(costs), len(replicas)
    sums = [0.0, *accumulate(costs)]
    best: dict[tuple[int, int], tuple[int, float, int]] = {(0, 0): (0, 0.0, 0)}
    for stage in range(1, num_stages + 1):
        for stop in range(stage, num_blocks - (num_stages - stage) + 1):
            sent = boundary_bytes[stop - 1] if stop < num_blocks else 0
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


MIN_SPLIT_GAIN = 1.01
"""Blocks stay whole where their busiest stage has at most so many times the work of the busiest otherwise."""


def choose_chunk_starts(model: ModelSpec, replicas: Sequence[float], stages: Sequence[int]) -> ModelSpec:
    """Return the model with the pieces chosen with which chunks begin, blocks cut in two where that is inside of one.

    A block is cut only where the busiest stage has 1 % less work by it, and where there are fewer blocks than chunks;
    as few blocks as can be.

    Args:
        model: its pieces say where a stage may begin.
        replicas: as for :func:`balance_stages`.
        stages: the stage that runs each chunk.

    Raises:
        PlanError: there are more chunks than can be.
    """
    parts = [part for block in model.blocks for part in _splittable_parts(block)]
    if len(parts) == model.num_blocks or len(parts) < len(replicas):
        return replace(model, chunk_starts=())
    costs = [part.cost for part in parts]
    ends = {block.first_layer + len(block.layers) for block in model.blocks}
    inside = [part.first_layer + len(part.layers) not in ends for part in parts]
    fine = default_partition(parts, replicas, stages, inside)
    if len(replicas) <= model.num_blocks:
        whole = [block.cost for block in model.blocks]
        coarse = max_stage_cost(whole, default_partition(model.blocks, replicas, stages), replicas, stages)
        if coarse <= MIN_SPLIT_GAIN * max_stage_cost(costs, fine, replicas, stages):
            return replace(model, chunk_starts=())
    starts = list(accumulate(fine, initial=0))[:-1]
    heads = tuple(parts[start].first_layer for start in starts)
    return replace(model, blocks=tuple(_split_blocks(model.blocks, heads)), chunk_starts=heads)


def split_before(model: ModelSpec, modules: Collection[str]) -> ModelSpec:
    """Return the model with blocks cut in two where a stage may begin inside with one of these modules."""
    heads = [
        part.first_layer
        for block in model.blocks
        for part in _splittable_parts(block)
        if any(name in modules for name in (*part.layers[0].modules_started, part.layers[0].name))
    ]
    return replace(model, blocks=tuple(_split_blocks(model.blocks, heads)))


def default_partition(
    blocks: Sequence[Block], replicas: Sequence[float], stages: Sequence[int], splits_block: Sequence[bool] = ()
) -> tuple[int, ...]:
    """Return how many blocks each chunk has by default; arguments as above.

    Raises:
        PlanError: there are more chunks than blocks.
    """
    costs, left = [block.cost for block in blocks], [block.output_bytes for block in blocks]
    if len(set(stages)) < len(stages):
        return balance_chunks(costs, stages, left, splits_block)
    return balance_stages(costs, replicas, left, splits_block)


def _splittable_parts(block: Block) -> Iterator[Block]:
    """Yield what of a block may be a stage of its own."""
    return _split_block(block, [at for at, piece in enumerate(block.layers) if at and piece.can_start_stage])


def _split_blocks(blocks: Sequence[Block], starts: Sequence[int]) -> Iterator[Block]:
    for block in blocks:
        yield from _split_block(block, [at for at in range(1, len(block.layers)) if block.first_layer + at in starts])


def _split_block(block: Block, offsets: Sequence[int]) -> Iterator[Block]:
    """Yield the block in parts that begin at these of its pieces."""
    for start, stop in pairwise([0, *offsets, len(block.layers)]):
        yield Block(block.layers[start:stop], block.first_layer + start, block.tp_degree)
