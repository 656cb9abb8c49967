"""What the pieces of a model make for each other, and as which strands it travels between blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.errors import PlanError
from counterpoint.program.edges import Edge

INPUT = -1
"""The maker of the model's own inputs."""


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """A value that a piece makes and later ones read.

    Args:
        maker: the piece; ``INPUT`` for an input of the model, which nobody sends.
        readers: the pieces that read it, in order; the last piece also reads what it only gives out.
        num_bytes: bytes per sample.
        is_learned: whether a gradient may come back for it.
    """

    producer: int
    consumers: tuple[int, ...]
    num_bytes: int = 0
    needs_grad: bool = True


def blocks_of_layers(counts: Sequence[int]) -> list[int]:
    """Return for each piece its block, given how many pieces each block has."""
    return [block for block, count in enumerate(counts) for _ in range(count)]


def block_endpoints(value: ValueSpec, block_of: Sequence[int]) -> tuple[int, ...]:
    """Return the blocks that make and read a value; one alone where no other reads it, none for inputs."""
    if value.producer == INPUT:
        return ()
    maker = block_of[value.producer]
    return (maker, *sorted({block_of[piece] for piece in value.consumers} - {maker}))


def build_edges(values: Sequence[ValueSpec], block_of: Sequence[int]) -> tuple[Edge, ...]:
    """Return the strands between blocks."""
    found: dict[tuple[int, ...], list[ValueSpec]] = {}
    for value in values:
        blocks = block_endpoints(value, block_of)
        if len(blocks) > 1:
            found.setdefault(blocks, []).append(value)
    return tuple(_build_edge(blocks, found[blocks]) for blocks in sorted(found))


def _build_edge(blocks: tuple[int, ...], values: Sequence[ValueSpec]) -> Edge:
    learned = [value.num_bytes for value in values if value.needs_grad]
    total = sum(value.num_bytes for value in values)
    return Edge(blocks[0], blocks[1:], total, sum(learned) if learned else None)


def assign_values_to_edges(
    values: Sequence[ValueSpec], edges: Sequence[Edge], block_of: Sequence[int], mode: str
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return for each strand the values that travel with it, by their index.

    A value that has fewer readers in one mode than in training travels with a strand that comes to all of them.

    Args:
        values: of one mode.
        strands: those of the program.
        block_of: for each piece its block.
        mode: what errors call it.

    Raises:
        PlanError: a value has readers that no strand of its maker comes to.
    """
    found: dict[tuple[int, ...], list[int]] = {strand.endpoints: [] for strand in edges}
    for index, value in enumerate(values):
        blocks = block_endpoints(value, block_of)
        if len(blocks) < 2:
            continue
        fitting = [other for other in found if other[0] == blocks[0] and set(blocks) <= set(other)]
        if not fitting:
            readers = ", ".join(map(str, blocks[1:]))
            raise PlanError(
                f"in {mode} block {blocks[0]} makes a value for block {readers}, to which it gives none in training; "
                "between its modes a model may hand on less, but not more; have forward do the same in both, or use a "
                "strategy that needs no cut (data, zero, server)"
            )
        found[min(fitting, key=len)].append(index)
    return {blocks: tuple(indices) for blocks, indices in found.items()}
