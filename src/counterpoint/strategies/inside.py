"""Stages that begin inside a block, where that makes the slowest of them faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from counterpoint.model.spec import Block, ModelSpec
from counterpoint.strategies.balance import even_cuts, slowest

WORTH_A_CUT = 1.01
"""Blocks stay whole where their slowest stage has at most so many times the work of the slowest otherwise."""


def with_heads(model: ModelSpec, replicas: Sequence[float]) -> ModelSpec:
    """Return the model with the pieces chosen with which chunks begin, blocks cut in two where that is inside of one.

    A block is cut only where the slowest chunk has 1 % less work by it, and where there are fewer blocks than chunks;
    as few blocks as can be.

    Args:
        model: its pieces say where a stage may begin.
        replicas: as for :func:`even_cuts`.

    Raises:
        PlanError: there are more chunks than can be.
    """
    parts = [part for block in model.blocks for part in _parts(block)]
    if len(parts) == model.num_blocks or len(parts) < len(replicas):
        return replace(model, heads=())
    costs = [part.cost for part in parts]
    ends = {block.first_piece + len(block.pieces) for block in model.blocks}
    inside = [part.first_piece + len(part.pieces) not in ends for part in parts]
    fine = even_cuts(costs, replicas, [part.output_bytes for part in parts], inside)
    if len(replicas) <= model.num_blocks:
        whole = [block.cost for block in model.blocks]
        coarse = even_cuts(whole, replicas, [block.output_bytes for block in model.blocks])
        if slowest(whole, coarse, replicas) <= WORTH_A_CUT * slowest(costs, fine, replicas):
            return replace(model, heads=())
    starts = list(accumulate(fine, initial=0))[:-1]
    heads = tuple(parts[start].first_piece for start in starts)
    return replace(model, blocks=tuple(_cut(model.blocks, heads)), heads=heads)


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
