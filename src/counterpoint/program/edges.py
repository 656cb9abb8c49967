"""Which values go from block to block: strands, each made by one block and read by others behind it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from counterpoint.program.instruction import TensorRef


@dataclass(frozen=True, slots=True)
class Edge:
    """All that one block makes for the same readers; it travels as one message.

    Between a block and the next one it is ``x3``, its gradient ``g2``; any other one is named by its maker and its
    readers, ``s2+7`` and ``ds2+7``.

    Args:
        maker: the block that makes it.
        readers: the blocks that read it, in order; the last block also reads what it only gives out.
        num_bytes: bytes per sample.
        gradient_bytes: bytes per sample of its gradient; None where no gradient can come back.

    Example:
        >>> from counterpoint.program.text import format_value
        >>> [format_value(Strand(2, readers).value(0)) for readers in ((3,), (7,), (3, 7, 8, 9))]
        ['x3.0', 's2+7.0', 's2+3+7-9.0']
    """

    producer: int
    consumers: tuple[int, ...]
    num_bytes: int = 0
    grad_bytes: int | None = 0

    @property
    def endpoints(self) -> tuple[int, ...]:
        """The maker and the readers, which tell strands apart."""
        return (self.producer, *self.consumers)

    def activation(self, micro: int) -> TensorRef:
        """Return what is sent to those that read it."""
        return TensorRef("x", self.consumers, micro) if self.is_adjacent else TensorRef("s", self.endpoints, micro)

    def gradient(self, micro: int) -> TensorRef:
        """Return what is sent back to the maker."""
        return TensorRef("g", (self.producer,), micro) if self.is_adjacent else TensorRef("ds", self.endpoints, micro)

    @property
    def is_adjacent(self) -> bool:
        """Whether it goes from a block to the next one and no further."""
        return self.consumers == (self.producer + 1,)


def chain_edges(num_blocks: int) -> tuple[Edge, ...]:
    """Return the strands of a chain: each block gives all that it makes to the next one."""
    return tuple(Edge(block, (block + 1,)) for block in range(num_blocks - 1))


def edge_endpoints(value: TensorRef) -> tuple[int, ...]:
    """Return the maker and the readers of the strand that a value or a gradient on its way belongs to.

    Example:
        >>> strand_of(Value("x", (3,), 0)), strand_of(Value("g", (2,), 0)), strand_of(Value("ds", (2, 7), 0))
        ((2, 3), (2, 3), (2, 7))
    """
    if value.name == "x":
        return value.blocks[0] - 1, value.blocks[0]
    return (value.blocks[0], value.blocks[0] + 1) if value.name == "g" else value.blocks


def skip_edges(values: Iterable[TensorRef]) -> frozenset[tuple[int, ...]]:
    """Return the strands that go further than to the next block, as values name them."""
    return frozenset(value.blocks for value in values if value.name in {"s", "ds"})
