"""A model as strategies see it: blocks in order, each with parameters and cost, and what they make for each other.

A *piece* is the finest part a model can be cut into; a *block* is a run of pieces that a program names with
one number; a *unit* is the parameters used by exactly the same set of blocks, which move together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from counterpoint.model.dataflow import INPUT, ValueSpec, blocks_of_layers, build_edges
from counterpoint.program.compression import find_codec
from counterpoint.program.edges import Edge
from counterpoint.program.units import Unit as Unit


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of the whole model, before any slicing."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int = 4

    @property
    def num_elements(self) -> int:
        """How many numbers the parameter holds."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """How many bytes the parameter holds."""
        return self.num_elements * self.item_bytes


@dataclass(frozen=True, slots=True)
class TensorParallelSpec:
    """A piece that may run as slices of one named dim, its partial outputs added up afterwards.

    Args:
        dim: the name of the dim that is sliced, ``hidden`` or ``heads`` for instance.
        slices: for each sliced parameter, its name and the index of its sliced dim.
        size: how long the dim is in its own grain (heads, not features); slices must divide it.
        output_bytes: bytes per sample of the partial output ``y``.
        input_bytes: bytes per sample of the partial input gradient ``dx``.
    """

    dim: str
    sharded_dims: tuple[tuple[str, int], ...]
    dim_size: int
    output_bytes: int
    input_bytes: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The finest part of a model.

    Args:
        name: a module path, or what stands between two modules.
        params: names of the parameters it reads.
        cost: forward work of one sample, in any unit that is the same for all pieces.
        output_bytes: bytes per sample of everything it makes for those behind it, or of its part of the output.
        split: how it may be sliced, if it may.
        starts: the modules that begin with it, the outer ones first.
        may_begin: whether a stage may begin with it inside a block, because no more is sent there than between blocks.
    """

    name: str
    params: tuple[str, ...]
    cost: float = 1.0
    output_bytes: int = 0
    tp: TensorParallelSpec | None = None
    modules_started: tuple[str, ...] = ()
    can_start_stage: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """A run of pieces that programs name with one number.

    Args:
        pieces: what it runs, in order.
        first_piece: index of its first piece in the model.
        num_slices: how many ranks share it; more than 1 only for a single piece with a split.
    """

    layers: tuple[LayerSpec, ...]
    first_layer: int
    tp_degree: int = 1

    @property
    def name(self) -> str:
        """The names of the first and the last piece."""
        first, last = self.layers[0].name, self.layers[-1].name
        return first if first == last else f"{first}..{last}"

    @property
    def params(self) -> tuple[str, ...]:
        """Names of all parameters it reads, each once."""
        return tuple(dict.fromkeys(name for piece in self.layers for name in piece.params))

    @property
    def cost(self) -> float:
        """Forward work of one sample on one rank."""
        return sum(piece.cost for piece in self.layers) / self.tp_degree

    @property
    def output_bytes(self) -> int:
        """Bytes per sample of what its last piece makes, which in a chain is all that leaves it."""
        return self.layers[-1].output_bytes

    @property
    def tp(self) -> TensorParallelSpec | None:
        """How the block is sliced; None when every rank runs all of it."""
        return self.layers[0].tp if self.tp_degree > 1 else None


@dataclass(frozen=True)
class ModelSpec:
    """The blocks that a plan is compiled for, in the order in which they run.

    Args:
        blocks: the blocks.
        params: all parameters.
        values: what pieces make for later ones; empty for a chain, where each makes one value for the next.
        heads: the pieces with which the chunks of a pipeline begin, where it has chosen them.
        chained: the same model as plans get it that slice no layer, where it is cut otherwise for them.

    Example:
        >>> from counterpoint.model.spec import chain
        >>> chain(3).units[(2,)]
        ('block2.weight',)
    """

    blocks: tuple[Block, ...]
    params: tuple[Param, ...]
    values: tuple[ValueSpec, ...] = ()
    chunk_starts: tuple[int, ...] = ()
    variant_without_tp: ModelSpec | None = None

    @property
    def without_tp(self) -> ModelSpec:
        """The model as plans get it that slice no layer."""
        return self if self.variant_without_tp is None else self.variant_without_tp

    @property
    def num_blocks(self) -> int:
        """How many blocks the model has."""
        return len(self.blocks)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """All pieces of all blocks, in order."""
        return tuple(piece for block in self.blocks for piece in block.layers)

    @cached_property
    def units(self) -> dict[Unit, tuple[str, ...]]:
        """The parameters of each unit, in the model's order; parameters no block uses are left out."""
        users: dict[str, list[int]] = {}
        for index, block in enumerate(self.blocks):
            for name in block.params:
                users.setdefault(name, []).append(index)
        units: dict[Unit, list[str]] = {}
        for param in self.params:
            if param.name in users:
                units.setdefault(tuple(users[param.name]), []).append(param.name)
        return {unit: tuple(units[unit]) for unit in sorted(units, key=lambda unit: (len(unit) > 1, unit))}

    @property
    def block_of_layer(self) -> list[int]:
        """For each piece its block."""
        return blocks_of_layers([len(block.layers) for block in self.blocks])

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """What blocks make for others, by maker and readers."""
        if self.values:
            return build_edges(self.values, self.block_of_layer)
        sizes = [block.output_bytes for block in self.blocks[:-1]]
        return tuple(Edge(block, (block + 1,), size, size) for block, size in enumerate(sizes))

    def find_edge(self, endpoints: tuple[int, ...]) -> Edge | None:
        """Return the strand with this maker and these readers, if there is one."""
        return next((strand for strand in self.edges if strand.endpoints == endpoints), None)

    def outgoing_bytes(self, block: int) -> int:
        """Return how many bytes per sample a block makes for others; of the last one, the output's."""
        if block == self.num_blocks - 1 or not self.values:
            return self.blocks[block].output_bytes
        return sum(strand.num_bytes for strand in self.edges if strand.producer == block)

    @property
    def input_blocks(self) -> frozenset[int]:
        """The blocks that read the model's inputs."""
        block_of = self.block_of_layer
        pieces = {piece for value in self.values if value.producer == INPUT for piece in value.consumers}
        return frozenset(block_of[piece] for piece in pieces) if self.values else frozenset({0})

    def shard_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter on one rank, after slicing."""
        shape = list(next(param.shape for param in self.params if param.name == name))
        for block in self.blocks:
            if block.tp is not None:
                for sliced, dim in block.tp.sharded_dims:
                    if sliced == name:
                        shape[dim] //= block.tp_degree
        return tuple(shape)

    def unit_bytes(self, unit: Unit, codec: str = "") -> int:
        """Return how many parameter bytes one rank holds for a unit, after slicing; or its gradient's in a code."""
        size = {param.name: param.item_bytes for param in self.params}
        if codec:
            found = find_codec(codec)
            return sum(found.encoded_bytes(self.shard_shape(name), size[name]) for name in self.units[unit])
        return sum(math.prod(self.shard_shape(name)) * size[name] for name in self.units[unit])

    def split_out_tp_blocks(self, dims: tuple[str, ...], tp_degree: int) -> ModelSpec:
        """Return the model with every piece that splits along one of ``dims`` as a block of its own."""
        blocks: list[Block] = []
        for block in self.blocks:
            run: list[LayerSpec] = []
            start = block.first_layer
            for index, piece in enumerate(block.layers, block.first_layer):
                if block.tp_degree == 1 and piece.tp is not None and piece.tp.dim in dims:
                    if run:
                        blocks.append(Block(tuple(run), start))
                    blocks.append(Block((piece,), index, tp_degree))
                    run, start = [], index + 1
                else:
                    run.append(piece)
            if run:
                blocks.append(Block(tuple(run), start, block.tp_degree))
        return replace(self, blocks=tuple(blocks))


def linear_chain(num_blocks: int, *, width: int = 256, tied: bool = False) -> ModelSpec:
    """Return a model of equal blocks, each one linear layer with a dim ``hidden`` that may be sliced.

    Args:
        num_blocks: how many blocks.
        width: the layer is ``width x width``; one sample is ``width`` float32 numbers.
        tied: whether the first and the last block use the same weight.
    """
    names = [f"block{index}.weight" for index in range(num_blocks)]
    if tied and num_blocks > 1:
        names[-1] = names[0]
    params = tuple(Param(name, (width, width)) for name in dict.fromkeys(names))
    blocks = []
    for index, name in enumerate(names):
        may_split = not (tied and index in {0, num_blocks - 1})
        split = TensorParallelSpec("hidden", ((name, 0),), width, 4 * width, 4 * width) if may_split else None
        piece = LayerSpec(f"block{index}", (name,), cost=1.0, output_bytes=4 * width, tp=split)
        blocks.append(Block((piece,), index))
    return ModelSpec(tuple(blocks), params)
