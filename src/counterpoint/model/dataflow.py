"""Values that the layers of a model pass to each other, and the edges that carry them between blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.errors import PlanError
from counterpoint.program.edges import Edge

INPUT = -1
"""Producer of the model's own inputs."""


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """A value that one layer produces and later layers consume.

    Args:
        producer: index of the layer; ``INPUT`` for an input of the model, which is never sent.
        consumers: indices of the layers that consume it, in order; outputs of the model count as consumed by the last
            layer.
        num_bytes: bytes per sample.
        needs_grad: whether a gradient may come back for it.
    """

    producer: int
    consumers: tuple[int, ...]
    num_bytes: int = 0
    needs_grad: bool = True


def blocks_of_layers(counts: Sequence[int]) -> list[int]:
    """Return the block of each layer, given the number of layers of each block."""
    return [block for block, count in enumerate(counts) for _ in range(count)]


def block_endpoints(value: ValueSpec, block_of: Sequence[int]) -> tuple[int, ...]:
    """Return the producing and the consuming blocks of a value.

    Only the producer is returned if no other block consumes the value, and nothing for inputs.
    """
    if value.producer == INPUT:
        return ()
    maker = block_of[value.producer]
    return (maker, *sorted({block_of[piece] for piece in value.consumers} - {maker}))


def build_edges(values: Sequence[ValueSpec], block_of: Sequence[int]) -> tuple[Edge, ...]:
    """Return the edges between blocks."""
    indices_of: dict[tuple[int, ...], list[ValueSpec]] = {}
    for value in values:
        blocks = block_endpoints(value, block_of)
        if len(blocks) > 1:
            indices_of.setdefault(blocks, []).append(value)
    return tuple(_build_edge(blocks, indices_of[blocks]) for blocks in sorted(indices_of))


def _build_edge(blocks: tuple[int, ...], values: Sequence[ValueSpec]) -> Edge:
    with_grad = [value.num_bytes for value in values if value.needs_grad]
    total = sum(value.num_bytes for value in values)
    return Edge(blocks[0], blocks[1:], total, sum(with_grad) if with_grad else None)


def assign_values_to_edges(
    values: Sequence[ValueSpec], edges: Sequence[Edge], block_of: Sequence[int], mode: str
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return for each edge the indices of the values that it carries.

    A value that has fewer consumers in one mode than in training is carried by an edge that reaches all of them.

    Args:
        values: the values of one mode.
        edges: the edges of the program.
        block_of: the block of each layer.
        mode: the name of the mode in errors.

    Raises:
        PlanError: no edge of its producer reaches all consumers of a value.
    """
    indices_of: dict[tuple[int, ...], list[int]] = {edge.endpoints: [] for edge in edges}
    for index, value in enumerate(values):
        blocks = block_endpoints(value, block_of)
        if len(blocks) < 2:
            continue
        candidates = [
            endpoints for endpoints in indices_of if endpoints[0] == blocks[0] and set(blocks) <= set(endpoints)
        ]
        if not candidates:
            consumers = ", ".join(map(str, blocks[1:]))
            raise PlanError(
                f"in {mode} block {blocks[0]} produces a value for block {consumers}, but not in training; a model may "
                "pass fewer values between blocks in another mode, but not more; make forward do the same in both "
                "modes, "
                "or use a strategy that does not split the model (data, zero, server)"
            )
        indices_of[min(candidates, key=len)].append(index)
    return {blocks: tuple(indices) for blocks, indices in indices_of.items()}
