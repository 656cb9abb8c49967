"""The functions of a cut model that a rank computes with, and the values that they make for each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from counterpoint.cutting.cut import Segment


@dataclass(frozen=True, slots=True)
class Model:
    """What is computed with: the cut model's functions and its two ends.

    Args:
        segments: by first block and one past the last.
        num_blocks: blocks of the whole model.
        num_inputs: how many of the values are the model's own inputs; they come first.
        strands: the values of each strand, by its maker and its readers.
        flatten: from a feed's inputs to the values that they are.
        unflatten: from what the last segment gives to the model's output.
        loss: from the model's output and the targets to a scalar, the mean over the samples.
        draws: whether the model draws random numbers.
    """

    segments: Mapping[tuple[int, int], Segment]
    num_blocks: int
    num_inputs: int
    strands: Mapping[tuple[int, ...], Sequence[int]]
    flatten: Callable[[Any], tuple[Tensor, ...]]
    unflatten: Callable[[Sequence[Tensor]], Any]
    loss: Callable[[Any, Any], Tensor]
    draws: bool


class Kept(NamedTuple):
    """A value, detached, and whether a gradient can come back for it."""

    value: Tensor
    carries: bool


def spent_by(segments: Mapping[tuple[int, int], Segment]) -> dict[int, list[int]]:
    """Return for each first block of a segment the values that no other one here needs behind its backward."""
    first_reader: dict[int, int] = {}
    for first, stop in sorted(segments):
        for at in segments[first, stop].inputs:
            first_reader.setdefault(at, first)
    return {first: [at for at, reader in first_reader.items() if reader == first] for first, _ in segments}
