"""Edges: activations that one block produces and later blocks consume; adjacent edges and skip connections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from counterpoint.program.instruction import TensorRef


@dataclass(frozen=True, slots=True)
class Edge:
    """All activations that one block produces for the same consumers; they are sent as one message.

    Between adjacent blocks an edge is ``x3`` and its gradient ``g2``; a skip connection is named by its producer and
    its consumers, ``s2+7`` and ``ds2+7``.

    Args:
        producer: the block that produces it.
        consumers: the blocks that consume it, in order; outputs of the model count as consumed by the last block.
        num_bytes: bytes per sample.
        grad_bytes: bytes per sample of its gradient; None if no gradient can come back.

    Example:
        >>> from counterpoint.program.text import format_tensor_ref
        >>> [format_tensor_ref(Edge(2, consumers).activation(0)) for consumers in ((3,), (7,), (3, 7, 8, 9))]
        ['x3.0', 's2+7.0', 's2+3+7-9.0']
    """

    producer: int
    consumers: tuple[int, ...]
    num_bytes: int = 0
    grad_bytes: int | None = 0

    @property
    def endpoints(self) -> tuple[int, ...]:
        """The producer and the consumers, which identify an edge."""
        return (self.producer, *self.consumers)

    def activation(self, micro: int) -> TensorRef:
        """Return the reference to what is sent to the consumers."""
        return TensorRef("x", self.consumers, micro) if self.is_adjacent else TensorRef("s", self.endpoints, micro)

    def gradient(self, micro: int) -> TensorRef:
        """Return the reference to what is sent back to the producer."""
        return TensorRef("g", (self.producer,), micro) if self.is_adjacent else TensorRef("ds", self.endpoints, micro)

    @property
    def is_adjacent(self) -> bool:
        """Whether it connects a block with the next one only."""
        return self.consumers == (self.producer + 1,)


def chain_edges(num_blocks: int) -> tuple[Edge, ...]:
    """Return the edges of a chain, in which each block passes all its outputs to the next one."""
    return tuple(Edge(block, (block + 1,)) for block in range(num_blocks - 1))


def edge_endpoints(tensor: TensorRef) -> tuple[int, ...]:
    """Return the producer and the consumers of the edge that an activation or its gradient belongs to.

    Example:
        >>> edge_endpoints(TensorRef("x", (3,), 0)), edge_endpoints(TensorRef("ds", (2, 7), 0))
        ((2, 3), (2, 7))
    """
    if tensor.name == "x":
        return tensor.blocks[0] - 1, tensor.blocks[0]
    return (tensor.blocks[0], tensor.blocks[0] + 1) if tensor.name == "g" else tensor.blocks


def skip_edges(tensors: Iterable[TensorRef]) -> frozenset[tuple[int, ...]]:
    """Return the endpoints of all skip connections among tensor references."""
    return frozenset(tensor.blocks for tensor in tensors if tensor.name in {"s", "ds"})
