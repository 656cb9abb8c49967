"""Proof that a sliced piece is right: its slices, run one by one, add up to the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from counterpoint.errors import PlanError
from counterpoint.model.spec import LayerSpec, ModelSpec, TensorParallelSpec
from counterpoint.partitioning.fx_ops import fake_value
from counterpoint.partitioning.seed_hooks import no_seed
from counterpoint.partitioning.segment_builder import BuiltSegment, build_segment
from counterpoint.partitioning.traced import TracedPartition

TOLERANCE = 1e-10


def verify_tensor_parallel(partition: TracedPartition, spec: ModelSpec, params: Mapping[str, Tensor]) -> None:
    """Every block of ``spec`` that is sliced gives, summed over its slices, what it gives as a whole.

    Checked on random values in float64, whatever the model's own dtype, to 1e-10 of the largest value; a piece
    that does not run on slices, or whose slices do not add up, is refused with a PlanError.

    Args:
        cut: the model.
        spec: the refined description, ``cut.spec.refine(dims, num_slices)``.
        params: the whole parameters by name.
    """
    layout = partition.split_trace(training=True)
    for block in spec.blocks:
        if block.tp is None:
            continue
        _check_divisible(block.layers[0], block.tp, block.tp_degree)
        built = build_segment(layout, block.first_layer, block.first_layer + 1, dtype=torch.float64)
        buffers = dict(partition.model.named_buffers())
        state = [_to_float64(buffers[name]) for name in built.buffers]
        row = built.outputs.index(layout.pairs[block.first_layer].row)
        _ShardedLayerCheck(built, row, state, block.layers[0], block.tp).check(params, block.tp_degree)


def shard_params(
    params: Mapping[str, Tensor], tp_spec: TensorParallelSpec, index: int, num_shards: int
) -> dict[str, Tensor]:
    """Return the parameters of one slice: a part of those that are sliced, all of the others."""
    dims = dict(tp_spec.sharded_dims)
    return {
        name: tensor.chunk(num_shards, dims[name])[index] if name in dims else tensor for name, tensor in params.items()
    }


def _check_divisible(layer: LayerSpec, tp_spec: TensorParallelSpec, num_shards: int) -> None:
    if tp_spec.dim_size % num_shards:
        fitting = [number for number in range(2, tp_spec.dim_size + 1) if tp_spec.dim_size % number == 0]
        raise PlanError(
            f"{layer.name} has {tp_spec.dim_size} {tp_spec.dim}, which {num_shards} slices do not divide; "
            f"every rank holds the same number of them; use {', '.join(map(str, fitting[:6])) or 'no'} slices"
        )


@dataclass(frozen=True, slots=True)
class _ShardedLayerCheck:
    """One sliced piece on random values.

    Args:
        built: the piece as a function.
        row: the place of the partial output among its outputs.
        state: the values of its buffers.
        piece: the piece.
        split: how it is sliced.
    """

    built: BuiltSegment
    output_index: int
    buffers: list[Tensor]
    layer: LayerSpec
    tp_spec: TensorParallelSpec

    def check(self, params: Mapping[str, Tensor], num_shards: int) -> None:
        """Run the whole and the slices; refuse the piece if they differ."""
        generator = torch.Generator().manual_seed(0)
        values = [_random_like(fake_value(node), generator) for node in self.built.inputs]
        own = {name: _random_like(params[name], generator) for name in self.built.params}
        whole = self._run(values, own)
        parts = []
        for index in range(num_shards):
            try:
                parts.append(self._run(values, shard_params(own, self.tp_spec, index, num_shards)))
            except (RuntimeError, IndexError, ValueError) as error:
                reason = str(error).strip().splitlines()[0]
                raise PlanError(
                    f"{self.layer.name} does not run on slice {index} of {num_shards} along {self.tp_spec.dim}: "
                    f"{reason}; {self._advice()}"
                ) from error
        off = float((torch.stack(parts).sum(0) - whole).abs().max() / whole.abs().max().clamp(min=1))
        if not off <= TOLERANCE:
            raise PlanError(
                f"{num_shards} slices of {self.layer.name} along {self.tp_spec.dim} do not add up: the sum is off by "
                f"{off:.1e} of the largest value; {self._advice()}"
            )

    def _run(self, values: list[Tensor], own: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return self.built.function(no_seed, *values, *own.values(), *self.buffers)[self.output_index]

    def _advice(self) -> str:
        return (
            "slices of the layers before may meet only the same slice of the layer behind, so that nothing between "
            "may mix them, as one layer for query, key and value together does, or a softmax over the features; "
            f"write separate layers, or keep this dim whole by giving it a name other than '{self.tp_spec.dim}' in dims"
        )


def _random_like(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return random numbers in float64; whole numbers become zeros, which index anything."""
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    scale = like.shape[-1] ** -0.5 if like.dim() > 1 else 1.0
    return torch.randn(like.shape, dtype=torch.float64, generator=generator) * scale


def _to_float64(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value
