"""What pipelines with and without a flush share: the words of one replica's work, block by block."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import TypeAlias

from counterpoint.model.spec import ModelSpec
from counterpoint.program.instruction import Backward, Collective, Forward, Instruction
from counterpoint.program.program import Words
from counterpoint.strategies.strategy import RankForecast, sliced_bytes

Work: TypeAlias = Mapping[tuple[type[Instruction], int, int], Words]
"""For each block's forward or backward on a microbatch: itself and the words that belong to it."""


def work_of(body: Words) -> Work:
    """Attach to each forward and backward the words that stand right behind it and belong to it."""
    work: dict[tuple[type[Instruction], int, int], Words] = {}
    key = None
    for word in body:
        match word:
            case Forward(block, micro) | Backward(block, micro):
                key = (type(word), block, micro)
                work[key] = (word,)
            case Collective() if key is not None:
                work[key] += (word,)
            case _:
                key = None
    return work


def sliced_part(rank: RankForecast, blocks: range, model: ModelSpec) -> Fraction:
    """Return what of an inner rank's traffic, which is all about sliced blocks, belongs to a stage."""
    whole = sliced_bytes(model, rank.blocks)
    return rank.sent * Fraction(sliced_bytes(model, blocks), whole) if whole else Fraction(0)
