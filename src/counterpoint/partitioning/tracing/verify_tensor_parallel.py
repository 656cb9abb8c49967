"""Verify tensor-parallel layers: run each shard on random values and compare the sum with the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from counterpoint.errors import PlanError, first_line
from counterpoint.model.spec import LayerSpec, ModelSpec, TensorParallelSpec
from counterpoint.partitioning.fx_ops import fake_value
from counterpoint.partitioning.seed_hooks import no_seed
from counterpoint.partitioning.tracing.segment_builder import BuiltSegment, build_segment
from counterpoint.partitioning.tracing.traced import TracedPartition

TOLERANCE = 1e-10


def verify_tensor_parallel(partition: TracedPartition, spec: ModelSpec, params: Mapping[str, Tensor]) -> None:
    """Check that each tensor-parallel block of ``spec``, summed over its shards, returns what the whole block returns.

    Checked on random values in float64, whatever the model's own dtype, to 1e-10 of the largest value.

    Args:
        partition: the model.
        spec: its description with sharded blocks.
        params: the full parameters by name.

    Raises:
        PlanError: a layer does not run on shards, or its shards do not add up.
    """
    trace = partition.split_trace(training=True)
    for block in spec.blocks:
        if block.tp is None:
            continue
        _check_divisible(block.layers[0], block.tp, block.tp_degree)
        built = build_segment(trace, block.first_layer, block.first_layer + 1, dtype=torch.float64)
        buffers = dict(partition.model.named_buffers())
        buffer_values = [_to_float64(buffers[name]) for name in built.buffers]
        output_index = built.outputs.index(trace.pairs[block.first_layer].row)
        _ShardedLayerCheck(built, output_index, buffer_values, block.layers[0], block.tp).check(params, block.tp_degree)


def shard_params(
    params: Mapping[str, Tensor], tp_spec: TensorParallelSpec, index: int, num_shards: int
) -> dict[str, Tensor]:
    """Return the parameters of one shard: a chunk of the sharded ones, all of the others."""
    dims = dict(tp_spec.sharded_dims)
    return {
        name: tensor.chunk(num_shards, dims[name])[index] if name in dims else tensor for name, tensor in params.items()
    }


def _check_divisible(layer: LayerSpec, tp_spec: TensorParallelSpec, num_shards: int) -> None:
    if tp_spec.dim_size % num_shards:
        divisors = [divisor for divisor in range(2, tp_spec.dim_size + 1) if tp_spec.dim_size % divisor == 0]
        raise PlanError(
            f"{layer.name} has {tp_spec.dim_size} {tp_spec.dim}, which {num_shards} ranks do not divide; "
            f"every rank holds the same number of them; use {', '.join(map(str, divisors[:6])) or 'no'} ranks"
        )


@dataclass(frozen=True, slots=True)
class _ShardedLayerCheck:
    """One tensor-parallel layer on random values.

    Args:
        built: the layer as a function.
        output_index: the index of the partial output among its outputs.
        buffers: the values of its buffers.
        layer: the layer.
        tp_spec: how it is sharded.
    """

    built: BuiltSegment
    output_index: int
    buffers: list[Tensor]
    layer: LayerSpec
    tp_spec: TensorParallelSpec

    def check(self, params: Mapping[str, Tensor], num_shards: int) -> None:
        """Run the whole layer and its shards; raise if they differ."""
        generator = torch.Generator().manual_seed(0)
        values = [_random_like(fake_value(node), generator) for node in self.built.inputs]
        weights = {name: _random_like(params[name], generator) for name in self.built.params}
        whole = self._run(values, weights)
        partial_outputs = []
        for index in range(num_shards):
            try:
                partial_outputs.append(self._run(values, shard_params(weights, self.tp_spec, index, num_shards)))
            except (RuntimeError, IndexError, ValueError) as error:
                reason = first_line(error)
                raise PlanError(
                    f"{self.layer.name} does not run on shard {index} of {num_shards} along {self.tp_spec.dim}: "
                    f"{reason}; {self._advice()}"
                ) from error
        error_size = float((torch.stack(partial_outputs).sum(0) - whole).abs().max() / whole.abs().max().clamp(min=1))
        if not error_size <= TOLERANCE:
            raise PlanError(
                f"{num_shards} shards of {self.layer.name} along {self.tp_spec.dim} do not add up: the sum is off by "
                f"{error_size:.1e} of the largest value; {self._advice()}"
            )

    def _run(self, values: list[Tensor], weights: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return self.built.function(no_seed, *values, *weights.values(), *self.buffers)[self.output_index]

    def _advice(self) -> str:
        return (
            "a shard of the column layers may only be combined with the same shard of the row layer, so nothing "
            "between them may mix shards, as one fused layer for query, key and value does, or a softmax over the "
            "features; write separate layers, or keep this dim whole by giving it a name other than "
            f"'{self.tp_spec.dim}' in dims"
        )


def _random_like(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return random numbers in float64; integers become zeros, which are valid indices."""
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    scale = like.shape[-1] ** -0.5 if like.dim() > 1 else 1.0
    return torch.randn(like.shape, dtype=torch.float64, generator=generator) * scale


def _to_float64(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value
