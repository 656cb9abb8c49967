"""Stages that begin inside a block, where that makes the slowest of them faster."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from counterpoint.model.spec import Block, ModelSpec
from counterpoint.strategies.balance import busiest, dealt_evenly, even_cuts

WORTH_A_CUT = 1.01
"""Blocks stay whole where their busiest stage has at most so many times the work of the busiest otherwise."""


def with_heads(model: ModelSpec, replicas: Sequence[float], stages: Sequence[int]) -> ModelSpec:
    """Return the model with the pieces chosen with which chunks begin, blocks cut in two where that is inside of one.

    A block is cut only where the busiest stage has 1 % less work by it, and where there are fewer blocks than chunks;
    as few blocks as can be.

    Args:
        model: its pieces say where a stage may begin.
        replicas: as for :func:`even_cuts`.
        stages: the stage that runs each chunk.

    Raises:
        PlanError: there are more chunks than can be.
    """
    parts = [part for block in model.blocks for part in _parts(block)]
    if len(parts) == model.num_blocks or len(parts) < len(replicas):
        return replace(model, heads=())
    costs = [part.cost for part in parts]
    ends = {block.first_piece + len(block.pieces) for block in model.blocks}
    inside = [part.first_piece + len(part.pieces) not in ends for part in parts]
    fine = cuts_for(parts, replicas, stages, inside)
    if len(replicas) <= model.num_blocks:
        whole = [block.cost for block in model.blocks]
        coarse = busiest(whole, cuts_for(model.blocks, replicas, stages), replicas, stages)
        if coarse <= WORTH_A_CUT * busiest(costs, fine, replicas, stages):
            return replace(model, heads=())
    starts = list(accumulate(fine, initial=0))[:-1]
    heads = tuple(parts[start].first_piece for start in starts)
    return replace(model, blocks=tuple(_cut(model.blocks, heads)), heads=heads)


def cut_before(model: ModelSpec, modules: Collection[str]) -> ModelSpec:
    """Return the model with blocks cut in two where a stage may begin inside with one of these modules."""
    heads = [
        part.first_piece
        for block in model.blocks
        for part in _parts(block)
        if any(name in modules for name in (*part.pieces[0].starts, part.pieces[0].name))
    ]
    return replace(model, blocks=tuple(_cut(model.blocks, heads)))


def cuts_for(
    blocks: Sequence[Block], replicas: Sequence[float], stages: Sequence[int], inside: Sequence[bool] = ()
) -> tuple[int, ...]:
    """Return how many blocks each chunk has by default; arguments as above.

    Raises:
        PlanError: there are more chunks than blocks.
    """
    costs, left = [block.cost for block in blocks], [block.output_bytes for block in blocks]
    if len(set(stages)) < len(stages):
        return dealt_evenly(costs, stages, left, inside)
    return even_cuts(costs, replicas, left, inside)


def _parts(block: Block) -> Iterator[Block]:
    """Yield what of a block may be a stage of its own."""
    return _runs(block, [at for at, piece in enumerate(block.pieces) if at and piece.may_begin])


def _cut(blocks: Sequence[Block], heads: Sequence[int]) -> Iterator[Block]:
    for block in blocks:
        yield from _runs(block, [at for at in range(1, len(block.pieces)) if block.first_piece + at in heads])


def _runs(block: Block, places: Sequence[int]) -> Iterator[Block]:
    """Yield the block in parts that begin at these of its pieces."""
    for start, stop in pairwise([0, *places, len(block.pieces)]):
        yield Block(block.pieces[start:stop], block.first_piece + start, block.num_slices)
