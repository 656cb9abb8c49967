"""The default partition of a model into chunks: balanced work, and of nearly balanced partitions one that sends least.

The dynamic program over (stage, end of its blocks) minimizes the bytes that are sent, subject to a limit on the work of
the slowest stage::

    best[stage, stop] = min over start of  best[stage - 1, start] + boundary_bytes[stop - 1]
                        where  work(start, stop) / replicas[stage] <= limit
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from math import inf

from counterpoint.errors import PlanError
from counterpoint.model.spec import Block, ModelSpec

IMBALANCE_TOLERANCE = 1.05
"""Maximum ratio of the slowest stage's work to the least possible: counted FLOPs predict seconds no better."""

MIN_SPLIT_GAIN = 1.01
"""Blocks are split only if the busiest stage has more work without it by at least this factor."""


def balance_stages(
    costs: Sequence[float],
    replicas: Sequence[float],
    boundary_bytes: Sequence[int] = (),
    splits_block: Sequence[bool] = (),
) -> tuple[int, ...]:
    """Return the number of blocks of each stage with which the slowest stage is nearly as fast as possible.

    Args:
        costs: forward work of each block.
        replicas: number of replicas that share the work of each stage, or their total speed.
        boundary_bytes: bytes per sample that are sent if a stage ends with each block; equal by default.
        splits_block: if ``costs`` are of parts of blocks, whether a stage that ends with each part splits a block.

    Returns:
        One positive count per stage. Of the partitions whose slowest stage has at most 5 % more work than necessary,
        one that sends least; of these one with the least work for the slowest stage; of these the one whose last stages
        begin first. If ``splits_block`` is given, the fewest split blocks decide before the least work.

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
            f"give at most {num_blocks} stages, or a model with more blocks (layers from the first to the last that "
            "read a buffer which the forward changes are one block: read such a buffer in one layer only)"
        )
    _, least = _min_traffic_partition(costs, replicas, [0] * num_blocks, inf)
    sent = boundary_bytes or [0] * num_blocks
    counts, slowest = _min_traffic_partition(costs, replicas, sent, IMBALANCE_TOLERANCE * least)
    if any(splits_block):
        penalized = [(num_blocks + 1) * size + splits for size, splits in zip(sent, splits_block, strict=True)]
        counts, _ = _min_traffic_partition(costs, replicas, penalized, slowest)
    return counts


def balance_chunks(
    costs: Sequence[float], stages: Sequence[int], boundary_bytes: Sequence[int] = (), splits_block: Sequence[bool] = ()
) -> tuple[int, ...]:
    """Return the number of blocks of each chunk with which the busiest stage, over all its chunks, has little work.

    Args:
        costs: forward work of each block.
        stages: the stage of each chunk.
        boundary_bytes: as for :func:`balance_stages`.
        splits_block: as for :func:`balance_stages`.

    Returns:
        One positive count per chunk. A local search from the most even chunks moves the ends of one or two chunks by a
        block as long as the busiest stage has less work, or less is sent, or the slowest chunk has less work.

    Raises:
        PlanError: there are more chunks than blocks.

    Example:
        >>> balance_chunks([1, 5, 5, 5, 5, 7], (0, 1, 1, 0))  # 13 units of work for one stage, 15 for the other
        (2, 1, 2, 1)
    """
    counts = balance_stages(costs, (1,) * len(stages), boundary_bytes, splits_block)
    if len(set(stages)) == len(stages):
        return counts
    sums = [0.0, *accumulate(costs)]

    def objectives(stops: Sequence[int]) -> tuple[float, int, float, int]:
        """Return the busiest stage's work, the bytes sent, the slowest chunk's work and the number of split blocks."""
        chunks = [sums[stop] - sums[start] for start, stop in pairwise((0, *stops))]
        totals = dict.fromkeys(stages, 0.0)
        for stage, work in zip(stages, chunks, strict=True):
            totals[stage] += work
        ends = [stop - 1 for stop in stops[:-1]]
        sent = sum(boundary_bytes[end] for end in ends) if boundary_bytes else 0
        return max(totals.values()), sent, max(chunks), sum(splits_block[end] for end in ends) if splits_block else 0

    stops = tuple(accumulate(counts))
    while (better := min(_neighbours(stops), key=objectives, default=stops)) and objectives(better) < objectives(stops):
        stops = better
    return tuple(stop - start for start, stop in pairwise((0, *stops)))


def _neighbours(stops: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the ends of chunks with one or two of them moved by a block; every chunk keeps one."""
    steps = [((index, shift),) for index in range(len(stops) - 1) for shift in (-1, 1)]
    pairs = [(*first, *second) for first, second in combinations(steps, 2) if first[0][0] != second[0][0]]
    for moves in (*steps, *pairs):
        changed = list(stops)
        for index, shift in moves:
            changed[index] += shift
        if all(start < stop for start, stop in pairwise((0, *changed))):
            yield tuple(changed)


def max_stage_cost(
    costs: Sequence[float], counts: Sequence[int], replicas: Sequence[float], stages: Sequence[int]
) -> float:
    """Return the work of the busiest stage, divided by its replicas.

    Args:
        costs: forward work of each block.
        counts: number of blocks of each chunk.
        replicas: number of ranks that share the work of each chunk.
        stages: the stage of each chunk.
    """
    sums = [0.0, *accumulate(costs)]
    totals = dict.fromkeys(stages, 0.0)
    for (start, stop), ranks, stage in zip(pairwise(accumulate(counts, initial=0)), replicas, stages, strict=True):
        totals[stage] += (sums[stop] - sums[start]) / ranks
    return max(totals.values())


def _min_traffic_partition(
    costs: Sequence[float], replicas: Sequence[float], boundary_bytes: Sequence[int], limit: float
) -> tuple[tuple[int, ...], float]:
    """Return the partition that sends least with no stage above the limit, and the work of its slowest stage."""
    num_blocks, num_stages = len(costs), len(replicas)
    sums = [0.0, *accumulate(costs)]
    best: dict[tuple[int, int], tuple[int, float, int]] = {(0, 0): (0, 0.0, 0)}  # bytes, slowest work, start
    for stage in range(1, num_stages + 1):
        for stop in range(stage, num_blocks - (num_stages - stage) + 1):
            sent = boundary_bytes[stop - 1] if stop < num_blocks else 0
            work = {start: (sums[stop] - sums[start]) / replicas[stage - 1] for start in range(stage - 1, stop)}
            choices = [
                (best[stage - 1, start][0] + sent, max(best[stage - 1, start][1], own), start)
                for start, own in work.items()
                if (stage - 1, start) in best and own <= limit
            ]
            if choices:
                best[stage, stop] = min(choices)
    counts, stop = [], num_blocks
    for stage in range(num_stages, 0, -1):
        start = best[stage, stop][2]
        counts.append(stop - start)
        stop = start
    return tuple(reversed(counts)), best[num_stages, num_blocks][1]


def choose_chunk_starts(model: ModelSpec, replicas: Sequence[float], stages: Sequence[int]) -> ModelSpec:
    """Return the model with the first layer of each chunk, and with blocks split in two where a chunk begins inside.

    A block is split only if the busiest stage has 1 % less work by it, or if there are fewer blocks than chunks.

    Args:
        model: its layers say where a stage can begin.
        replicas: as for :func:`balance_stages`.
        stages: the stage of each chunk.

    Raises:
        PlanError: there are more chunks than layers with which a stage can begin.
    """
    parts = [part for block in model.blocks for part in _splittable_parts(block)]
    if len(parts) == model.num_blocks or len(parts) < len(replicas):
        return replace(model, chunk_starts=())
    costs = [part.cost for part in parts]
    ends = {block.first_layer + len(block.layers) for block in model.blocks}
    splits_block = [part.first_layer + len(part.layers) not in ends for part in parts]
    fine = default_partition(parts, replicas, stages, splits_block)
    if len(replicas) <= model.num_blocks:
        block_costs = [block.cost for block in model.blocks]
        coarse = default_partition(model.blocks, replicas, stages)
        whole = max_stage_cost(block_costs, coarse, replicas, stages)
        if whole <= MIN_SPLIT_GAIN * max_stage_cost(costs, fine, replicas, stages):
            return replace(model, chunk_starts=())
    chunk_starts = tuple(parts[start].first_layer for start in accumulate(fine[:-1], initial=0))
    return replace(model, blocks=tuple(_split_blocks(model.blocks, chunk_starts)), chunk_starts=chunk_starts)


def split_before(model: ModelSpec, modules: Collection[str]) -> ModelSpec:
    """Return the model with blocks split in two before these modules, where a stage can begin with them."""
    starts = [
        part.first_layer
        for block in model.blocks
        for part in _splittable_parts(block)
        if any(name in modules for name in (*part.layers[0].modules_started, part.layers[0].name))
    ]
    return replace(model, blocks=tuple(_split_blocks(model.blocks, starts)))


def default_partition(
    blocks: Sequence[Block], replicas: Sequence[float], stages: Sequence[int], splits_block: Sequence[bool] = ()
) -> tuple[int, ...]:
    """Return the default number of blocks of each chunk.

    Args:
        blocks: blocks of the model, or parts of them.
        replicas: as for :func:`balance_stages`.
        stages: the stage of each chunk.
        splits_block: as for :func:`balance_stages`.

    Raises:
        PlanError: there are more chunks than blocks.
    """
    costs, boundary_bytes = [block.cost for block in blocks], [block.output_bytes for block in blocks]
    if len(set(stages)) < len(stages):
        return balance_chunks(costs, stages, boundary_bytes, splits_block)
    return balance_stages(costs, replicas, boundary_bytes, splits_block)


def _splittable_parts(block: Block) -> Iterator[Block]:
    return _split_block(block, [index for index, layer in enumerate(block.layers) if index and layer.can_start_stage])


def _split_blocks(blocks: Sequence[Block], starts: Sequence[int]) -> Iterator[Block]:
    for block in blocks:
        offsets = [offset for offset in range(1, len(block.layers)) if block.first_layer + offset in starts]
        yield from _split_block(block, offsets)


def _split_block(block: Block, offsets: Sequence[int]) -> Iterator[Block]:
    for start, stop in pairwise([0, *offsets, len(block.layers)]):
        yield Block(block.layers[start:stop], block.first_layer + start, block.tp_degree)
