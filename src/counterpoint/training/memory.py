"""What optimizers remember, kept while no ranks are there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from counterpoint.runtime.build import Rank

Memory: TypeAlias = Mapping[int, Mapping[tuple[tuple[int, ...], ...], list[dict[str, Any]]]]
"""The state of every tensor that a rank's optimizers update, by rank and by units."""


def memory_of(ranks: Mapping[int, Rank]) -> Memory:
    """Return what the optimizers of ranks remember."""
    return {
        number: {
            units: [dict(made.state.get(tensor, {})) for tensor in tensors] if made is not None else []
            for units, (made, tensors) in rank.interpreter.store.optimizers.items()
        }
        for number, rank in ranks.items()
    }


def remind(ranks: Mapping[int, Rank], memory: Memory) -> None:
    """The optimizers go on from what those of the same ranks, built before for the same plan, remembered."""
    for number, known in memory.items():
        store = ranks[number].interpreter.store
        for units, states in known.items():
            made, tensors = store.optimizer(units)
            if made is not None:
                made.state.update(dict(zip(tensors, states, strict=True)))
