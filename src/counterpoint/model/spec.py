"""Models as strategies see them: blocks in order, each with parameters and cost, and the values between them.

A *layer* is the finest part that a model can be split into; a *block* is a run of layers that a program addresses with
one index; a *unit* (as in FSDP) is the set of parameters used by exactly the same blocks, which are communicated
together.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from counterpoint.model.dataflow import INPUT, ValueSpec, blocks_of_layers, build_edges
from counterpoint.model.precision import Precision
from counterpoint.program.compression import find_codec
from counterpoint.program.edges import Edge
from counterpoint.program.instruction import HeldAs
from counterpoint.program.units import Unit as Unit

ADAM_STATES = 2
"""Values per parameter that Adam keeps."""


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of the whole model, before sharding.

    In mixed precision the model reads casts, of weights that a rank keeps or of shards that ranks gather for each use.

    Args:
        name: its path.
        shape: its shape.
        item_bytes: bytes of an element.
        has_sparse_grad: whether its gradient is exchanged as rows, as that of an embedding with ``sparse=True``.
        cast_bytes: bytes of an element of the casts that the model reads; 0 for none.
        gathers_cast: whether the model reads nothing but casts, so that ranks gather these where they free weights.
        state_bytes: bytes that the optimizer keeps for an element; None for Adam's states in the parameter's dtype.
        reduce_bytes: bytes of an element of its gradient where ranks sum it, if these are fewer; None for no cast.
        master_bytes: bytes of an element of the master weights that a rank keeps of what it updates, if the weights
            that it holds are narrower; 0 for none.
    """

    name: str
    shape: tuple[int, ...]
    item_bytes: int = 4
    has_sparse_grad: bool = False
    cast_bytes: int = 0
    gathers_cast: bool = False
    state_bytes: int | None = None
    reduce_bytes: int | None = None
    master_bytes: int = 0

    def held_as_casts(self, cast_bytes: int) -> Param:
        """Return the parameter as ranks hold it in the dtype of its casts, with master weights of what they update."""
        return replace(self, item_bytes=cast_bytes, master_bytes=self.item_bytes, cast_bytes=0, gathers_cast=False)

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.num_elements * self.item_bytes

    def element_bytes(self, held_as: HeldAs) -> int:
        """Return the bytes of an element where a rank holds or sends it: the one place that knows.

        Args:
            held_as: what of the parameter, see :class:`counterpoint.program.instruction.TensorRef`.

        Example:
            >>> in_bf16 = Param("weight", (8, 8), cast_bytes=2, gathers_cast=True)
            >>> {name: in_bf16.element_bytes(name) for name in ("weight", "gathered_weight", "cast", "grad", "state")}
            {'weight': 4, 'gathered_weight': 2, 'cast': 2, 'grad': 4, 'state': 8}
            >>> held_in_bf16 = Param("weight", (8, 8), item_bytes=2, master_bytes=4)
            >>> {name: held_in_bf16.element_bytes(name) for name in ("weight", "cast", "grad", "state")}
            {'weight': 2, 'cast': 0, 'grad': 2, 'state': 12}
        """
        match held_as:
            case "weight" | "grad" | "delayed_grad":
                return self.item_bytes
            case "reduced_grad":
                return min(self.item_bytes, self.reduce_bytes or self.item_bytes)
            case "gathered_weight":
                return self.cast_bytes if self.gathers_cast else self.item_bytes
            case "cast":
                return self.cast_bytes
            case "gathered_cast":
                return 0 if self.gathers_cast else self.cast_bytes
            case "copied_grad":
                return self.item_bytes if self.cast_bytes else 0
            case "master_weight":
                return self.master_bytes or self.item_bytes
            case "state":
                wide = self.element_bytes("master_weight")
                return self.master_bytes + (ADAM_STATES * wide if self.state_bytes is None else self.state_bytes)


@dataclass(frozen=True, slots=True)
class TensorParallelSpec:
    """Sharding of a layer along one named dim, with partial outputs that are summed afterwards.

    Args:
        dim: name of the sharded dim, for example ``hidden`` or ``heads``.
        sharded_dims: for each sharded parameter, its name and the index of the sharded dim.
        dim_size: size of the dim in its own granularity (heads instead of features); shards must divide it.
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
        name: a module path, or what is between two modules.
        params: names of the parameters it reads.
        cost: forward work for one sample, in a unit that is the same for all layers.
        output_bytes: bytes per sample of all values it produces for later layers, or of its part of the output.
        tp: how it can be sharded, if it can.
        modules_started: the modules that begin with it, the outermost first.
        can_start_stage: whether a pipeline stage may begin with it inside a block, because no more is sent there than
            between blocks.
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
    """A run of layers that programs address with one index.

    Args:
        layers: its layers, in order.
        first_layer: index of its first layer in the model.
        tp_degree: number of ranks that share it; more than 1 only for a single layer with a tensor-parallel
            specification.
    """

    layers: tuple[LayerSpec, ...]
    first_layer: int
    tp_degree: int = 1

    @property
    def name(self) -> str:
        """The names of its first and last layer."""
        first, last = self.layers[0].name, self.layers[-1].name
        return first if first == last else f"{first}..{last}"

    @property
    def params(self) -> tuple[str, ...]:
        """Names of all parameters it reads, each once."""
        return tuple(dict.fromkeys(name for layer in self.layers for name in layer.params))

    @property
    def cost(self) -> float:
        """Forward work for one sample on one rank."""
        return sum(layer.cost for layer in self.layers) / self.tp_degree

    @property
    def output_bytes(self) -> int:
        """Bytes per sample that its last layer produces; in a chain, all that leaves the block."""
        return self.layers[-1].output_bytes

    @property
    def tp(self) -> TensorParallelSpec | None:
        """How the block is sharded; None if every rank runs all of it."""
        return self.layers[0].tp if self.tp_degree > 1 else None


@dataclass(frozen=True)
class ModelSpec:
    """The blocks that a plan is compiled for, in execution order.

    Args:
        blocks: the blocks.
        params: all parameters.
        values: what layers produce for later ones; empty for a chain, in which each produces one value for the next.
        chunk_starts: the layers with which the chunks of a pipeline begin, if it has chosen them.
        variant_without_tp: the same model for plans without tensor parallelism, if it is split differently for them.
        compute_dtype: dtype of its matrix products, of :data:`counterpoint.world.cluster.DTYPES`.

    Example:
        >>> from counterpoint.model.spec import linear_chain
        >>> linear_chain(3).units[(2,)]
        ('block2.weight',)
    """

    blocks: tuple[Block, ...]
    params: tuple[Param, ...]
    values: tuple[ValueSpec, ...] = ()
    chunk_starts: tuple[int, ...] = ()
    variant_without_tp: ModelSpec | None = None
    compute_dtype: str = "fp32"

    @property
    def without_tp(self) -> ModelSpec:
        """The model for plans without tensor parallelism."""
        return self if self.variant_without_tp is None else self.variant_without_tp

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """All layers of all blocks, in order."""
        return tuple(layer for block in self.blocks for layer in block.layers)

    @cached_property
    def units(self) -> dict[Unit, tuple[str, ...]]:
        """The parameters of each unit, in the model's order, without parameters that no block uses."""
        blocks_using: dict[str, list[int]] = {}
        for index, block in enumerate(self.blocks):
            for name in block.params:
                blocks_using.setdefault(name, []).append(index)
        units: dict[Unit, list[str]] = {}
        for param in self.params:
            if param.name in blocks_using:
                units.setdefault(tuple(blocks_using[param.name]), []).append(param.name)
        return {unit: tuple(units[unit]) for unit in sorted(units, key=lambda unit: (len(unit) > 1, unit))}

    @property
    def sparse_units(self) -> frozenset[Unit]:
        """The units with a parameter whose gradient is sparse."""
        sparse = {param.name for param in self.params if param.has_sparse_grad}
        return frozenset(unit for unit, names in self.units.items() if not sparse.isdisjoint(names))

    @property
    def block_of_layer(self) -> list[int]:
        """The block of each layer."""
        return blocks_of_layers([len(block.layers) for block in self.blocks])

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """The edges between blocks, sorted by producer and consumers."""
        if self.values:
            return build_edges(self.values, self.block_of_layer)
        sizes = [block.output_bytes for block in self.blocks[:-1]]
        return tuple(Edge(block, (block + 1,), size, size) for block, size in enumerate(sizes))

    def find_edge(self, endpoints: tuple[int, ...]) -> Edge | None:
        """Return the edge with these endpoints, if there is one."""
        return next((edge for edge in self.edges if edge.endpoints == endpoints), None)

    def outgoing_bytes(self, block: int) -> int:
        """Return the bytes per sample that a block produces for others; for the last block, those of the output."""
        if block == self.num_blocks - 1 or not self.values:
            return self.blocks[block].output_bytes
        return sum(edge.num_bytes for edge in self.edges if edge.producer == block)

    @property
    def input_blocks(self) -> frozenset[int]:
        """The blocks that read the model's inputs."""
        block_of = self.block_of_layer
        layers = {layer for value in self.values if value.producer == INPUT for layer in value.consumers}
        return frozenset(block_of[layer] for layer in layers) if self.values else frozenset({0})

    def shard_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter on one rank, after tensor-parallel sharding."""
        shape = list(next(param.shape for param in self.params if param.name == name))
        for block in self.blocks:
            if block.tp is not None:
                for name_of_shard, dim in block.tp.sharded_dims:
                    if name_of_shard == name:
                        shape[dim] //= block.tp_degree
        return tuple(shape)

    def unit_elements(self, unit: Unit) -> int:
        """Return the number of elements of a unit on one rank, after tensor-parallel sharding."""
        return sum(math.prod(self.shard_shape(name)) for name in self.units[unit])

    def unit_bytes(self, unit: Unit, codec: str = "", held_as: HeldAs = "weight") -> int:
        """Return the bytes of a unit on one rank: of its gradient if a codec is given, else where it is held so."""
        params = {param.name: param for param in self.params}
        if codec:
            codec_spec = find_codec(codec)
            return sum(
                codec_spec.encoded_bytes(self.shard_shape(name), params[name].element_bytes("grad"))
                for name in self.units[unit]
            )
        return sum(math.prod(self.shard_shape(name)) * params[name].element_bytes(held_as) for name in self.units[unit])

    def reduced_fraction(self, unit: Unit) -> Fraction:
        """Return the bytes that ranks sum of a unit's gradient, as a fraction of those of its weights."""
        return Fraction(self.unit_bytes(unit, held_as="reduced_grad"), self.unit_bytes(unit) or 1)

    @property
    def casts_reductions(self) -> bool:
        """Whether ranks sum gradients in a narrower dtype than that of the weights that are updated."""
        return self.has_masters or any(param.element_bytes("reduced_grad") < param.item_bytes for param in self.params)

    @property
    def has_masters(self) -> bool:
        """Whether ranks hold weights in a narrower dtype than the master weights that they update."""
        return any(param.master_bytes for param in self.params)

    def merge_blocks(self, min_num_params: int) -> ModelSpec:
        """Return the model with adjacent blocks merged until each has this many elements of parameters of its own.

        Blocks are merged from the first on, so that the last one may have fewer. Tensor-parallel blocks stay alone.

        Example:
            >>> merged = linear_chain(5, width=8).merge_blocks(128)
            >>> [block.name for block in merged.blocks]
            ['block0..block1', 'block2..block3', 'block4']
        """
        elements = {param.name: param.num_elements for param in self.params}
        blocks: list[Block] = []
        num_own = 0  # elements of the last block that no block before it reads
        for block in self.blocks:
            own = sum(elements.pop(name, 0) for name in block.params)
            if blocks and num_own < min_num_params and blocks[-1].tp_degree == block.tp_degree == 1:
                blocks[-1] = replace(blocks[-1], layers=blocks[-1].layers + block.layers)
                num_own += own
            else:
                blocks.append(block)
                num_own = own
        return replace(self, blocks=tuple(blocks))

    @property
    def module_starts(self) -> Mapping[str, int]:
        """The index of the first block that begins with each module, by the path of the module."""
        starts: dict[str, int] = {}
        for index, block in enumerate(self.blocks):
            for name in (*block.layers[0].modules_started, block.layers[0].name):
                starts.setdefault(name, index)
        return starts

    def merge_blocks_between(self, starts: Collection[int]) -> ModelSpec:
        """Return the model with adjacent blocks merged, except before some of them.

        Tensor-parallel blocks stay alone.

        Args:
            starts: indices of blocks that are not merged with the one before.

        Example:
            >>> merged = linear_chain(5, width=8).merge_blocks_between({1, 4})
            >>> [block.name for block in merged.blocks]
            ['block0', 'block1..block3', 'block4']
        """
        blocks: list[Block] = []
        for index, block in enumerate(self.blocks):
            if blocks and index not in starts and blocks[-1].tp_degree == block.tp_degree == 1:
                blocks[-1] = replace(blocks[-1], layers=blocks[-1].layers + block.layers)
            else:
                blocks.append(block)
        return replace(self, blocks=tuple(blocks))

    def split_out_tp_blocks(self, dims: tuple[str, ...], tp_degree: int) -> ModelSpec:
        """Return the model with every layer that can be sharded along one of ``dims`` as a block of its own."""
        blocks: list[Block] = []
        for block in self.blocks:
            layer_run: list[LayerSpec] = []
            run_start = block.first_layer
            for index, layer in enumerate(block.layers, block.first_layer):
                if block.tp_degree == 1 and layer.tp is not None and layer.tp.dim in dims:
                    if layer_run:
                        blocks.append(Block(tuple(layer_run), run_start))
                    blocks.append(Block((layer,), index, tp_degree))
                    layer_run, run_start = [], index + 1
                else:
                    layer_run.append(layer)
            if layer_run:
                blocks.append(Block(tuple(layer_run), run_start, block.tp_degree))
        return replace(self, blocks=tuple(blocks))


def linear_chain(
    num_blocks: int, *, width: int = 256, tied: bool = False, precision: Precision | None = None
) -> ModelSpec:
    """Return a chain of equal blocks, each one linear layer with a dim ``hidden`` that can be sharded.

    Args:
        num_blocks: number of blocks.
        width: the layer is ``width x width``; one sample is ``width`` numbers.
        tied: whether the first and the last block share one weight.
        precision: what the layers compute in; None for float32.
    """
    item_bytes = 4 if precision is None else precision.item_bytes
    output_bytes = [item_bytes * width] * num_blocks
    if precision is not None and precision.output == "fp32":
        output_bytes[-1] = 4 * width
    is_cast = item_bytes < 4
    reduce_bytes = None if precision is None else precision.reduce_bytes
    names = [f"block{index}.weight" for index in range(num_blocks)]
    if tied and num_blocks > 1:
        names[-1] = names[0]
    params = tuple(
        Param(
            name,
            (width, width),
            cast_bytes=item_bytes if is_cast else 0,
            gathers_cast=is_cast,
            reduce_bytes=reduce_bytes,
        )
        for name in dict.fromkeys(names)
    )
    if precision is not None and precision.holds_casts:
        params = tuple(param.held_as_casts(item_bytes) for param in params)
    blocks = []
    for index, name in enumerate(names):
        may_split = not (tied and index in {0, num_blocks - 1})
        sizes = item_bytes * width, item_bytes * width
        split = TensorParallelSpec("hidden", ((name, 0),), width, *sizes) if may_split else None
        layer = LayerSpec(f"block{index}", (name,), cost=1.0, output_bytes=output_bytes[index], tp=split)
        blocks.append(Block((layer,), index))
    return ModelSpec(tuple(blocks), params, compute_dtype="fp32" if precision is None else precision.compute)
