"""Models for planning: equal linear layers with independent work and size."""

from collections.abc import Iterable
from dataclasses import replace

from counterpoint.model.spec import Block, ModelSpec, linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.world.cluster import Cluster, Device


def layers(num_blocks: int, *, width: int = 64, cost: float = 1.0) -> ModelSpec:
    """Equal layers; ``cost`` is the forward work of one of them for a sample."""
    model = linear_chain(num_blocks, width=width)
    return replace(
        model,
        blocks=tuple(
            Block(tuple(replace(piece, cost=cost) for piece in block.layers), block.first_layer)
            for block in model.blocks
        ),
    )


def named(plans: Iterable[Plan]) -> list[str]:
    """Plans as text, with their microbatches."""
    return [f"{plan}, {plan.num_microbatches}" for plan in plans]


def memory(num_bytes: int) -> Cluster:
    """A cluster whose ranks have so much memory."""
    return Cluster(Device(memory_bytes=num_bytes))
