"""A schedule on arrays in memory, all ranks at once: what every transport must do, in ten lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from counterpoint.fabric.algorithms.schedule import Extent, Schedule


def interpret(schedule: Schedule, arrays: Sequence[Any]) -> list[Any]:
    """Return every member's array after the all-reduce; those given stay as they are.

    Args:
        schedule: the all-reduce.
        arrays: one flat tensor or numpy array per member, all of one length; of any type that can be added.
    """
    results = [_copy(array) for array in arrays]
    extent, num_chunks = Extent(len(arrays[0])), schedule.num_chunks
    for moves in schedule.rounds:
        places = [slice(*(extent.at(end, num_chunks) for end in (m.chunks.start, m.chunks.stop))) for m in moves]
        messages = [_copy(results[move.sender][place]) for move, place in zip(moves, places, strict=True)]
        for move, place, message in zip(moves, places, messages, strict=True):
            if move.verb == "add":
                results[move.receiver][place] += message
            else:
                results[move.receiver][place] = message
    return results


def _copy(array: Any) -> Any:  # noqa: ANN401 - numpy arrays and tensors have no type in common
    return array.clone() if isinstance(array, Tensor) else array.copy()
