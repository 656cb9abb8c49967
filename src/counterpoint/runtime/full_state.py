"""State of all ranks in full, by parameter, put together from the slices that the ranks own.

::

    rank 0   optimizer.exp_avg:a.weight      [....    ]
    rank 1   optimizer.exp_avg:a.weight      [    ....]    ->  whole tensors  ->  shards joined, replicas averaged
    rank 2   optimizer.exp_avg:b.weight@1/2  [........]

Ranks of other processes take part by a collective; if all are in this process, none is needed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from counterpoint.checkpoint.tensor_slice import TensorSlice, dtype_name, torch_dtype
from counterpoint.fabric.fabric import Fabric
from counterpoint.runtime.optimizer_spec import is_scalar_state, squared_norm
from counterpoint.runtime.rank_builder import RankRuntime, sliced_params
from counterpoint.runtime.state_dict import (
    ShardMap,
    collect_grads,
    collect_optimizer_state,
    decode_scalar,
    encode_scalars,
    mean_over_replicas,
    restore_optimizers,
)

ParamStates: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The optimizer state of each parameter, as a torch optimizer that holds the whole parameter has it."""


def gather_optimizer_state(
    shard_map: ShardMap, ranks: Collection[RankRuntime], fabric: Fabric | None
) -> dict[str, dict[str, Any]]:
    """Return the optimizer state of every trained parameter.

    Args:
        shard_map: who owns which shard.
        ranks: the ranks of this process.
        fabric: this rank's, if other processes have ranks, too; all of them call this together.
    """
    slices: list[TensorSlice] = []
    scalars: dict[str, dict[str, Any]] = {}
    for rank in ranks:
        own_slices, own_scalars = collect_optimizer_state(shard_map, rank)
        slices += own_slices
        scalars |= own_scalars
    if fabric is not None:
        gathered = fabric.gather_values("scalars of optimizers", encode_scalars(scalars), range_of(fabric))  # type: ignore[arg-type]
        scalars = {
            name: {key: decode_scalar(value) for key, value in values.items()}
            for encoded in cast("list[dict[str, dict[str, Any]]]", gathered)
            for name, values in encoded.items()
        }
    states: dict[str, dict[str, Any]] = {}
    for name, values in scalars.items():
        own = states.setdefault(param_name(name), {})
        own |= {key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()}
    for name, value in join_shards(shard_map, gather_slices(slices, fabric)).items():
        key, _, param = name.removeprefix("optimizer.").partition(":")
        states.setdefault(param, {})[key] = value
    return states


def scatter_optimizer_state(shard_map: ShardMap, ranks: Collection[RankRuntime], states: ParamStates) -> None:
    """Load the state of whole parameters into the optimizers of ranks, each its part; the others are not asked.

    Raises:
        CheckpointError: parameters that are updated as one tensor have different scalars.
    """
    params = {param.name: param for param in shard_map.run_spec.model_spec.params}
    scalars: dict[str, dict[str, Any]] = {}
    tensors: dict[tuple[str, str], Tensor] = {}
    for name, state in states.items():
        whole = torch.empty(params[name].shape, device="meta")
        for key, value in state.items():
            if is_scalar_state(key, value, whole):
                scalars.setdefault(name, {})[key] = value
            else:
                tensors[key, name] = value
    keys = list(dict.fromkeys(key for key, _ in tensors))
    for rank in ranks:
        restore_optimizers(shard_map, rank, keys, lambda key, name: tensors.get((key, name)), scalars)


def gather_grads(shard_map: ShardMap, ranks: Collection[RankRuntime], fabric: Fabric | None) -> dict[str, Tensor]:
    """Return the gradients of the last step by parameter, without those that have none; collective as above."""
    slices = [part for rank in ranks for part in collect_grads(shard_map, rank)]
    joined = join_shards(shard_map, gather_slices(slices, fabric))
    own = {part.tensor.untyped_storage().data_ptr() for part in slices}  # which the next step writes to
    grads = {name: one.clone() if one.untyped_storage().data_ptr() in own else one for name, one in joined.items()}
    return {name.removeprefix("grad:"): grad for name, grad in grads.items()}


def gather_grad_norms(shard_map: ShardMap, ranks: Collection[RankRuntime], fabric: Fabric | None) -> dict[str, float]:
    """Return the norms of :func:`gather_grads`; only numbers are sent."""
    squares: list[tuple[str, float]] = [
        (param_name(part.name.removeprefix("grad:")), squared_norm([part.tensor]))
        for rank in ranks
        for part in collect_grads(shard_map, rank)
    ]
    if fabric is not None:
        gathered = cast("list[list[tuple[str, float]]]", fabric.gather_values("norms", squares, range_of(fabric)))
        squares = [pair for pairs in gathered for pair in pairs]
    totals: dict[str, float] = {}
    for name, value in squares:
        totals[name] = totals.get(name, 0.0) + value
    return {name: math.sqrt(total) for name, total in totals.items()}


def param_name(name: str) -> str:
    """Return a parameter's name from its name in a checkpoint, without shard and replica."""
    return name.partition("~")[0].partition("@")[0]


def gather_slices(slices: Sequence[TensorSlice], fabric: Fabric | None) -> dict[str, Tensor]:
    """Return whole tensors by name: from these slices, or from those of all ranks, which call this together."""
    wholes: dict[str, Tensor] = {}
    if fabric is None:
        for part in slices:
            add_slice(wholes, part)
        return wholes
    described = [
        [part.name, dtype_name(part.tensor.dtype), list(part.global_shape), part.tensor.numel(), first_element(part)]
        for part in slices
    ]
    everyone, own = range_of(fabric), iter(slices)
    gathered = cast("list[list[Any]]", fabric.gather_values("slices", described, everyone))  # type: ignore[arg-type]
    for rank, rows in enumerate(gathered):
        for name, dtype, shape, count, start in rows:
            values = torch.empty(count, dtype=torch_dtype(dtype))
            if rank == fabric.rank:
                values.copy_(next(own).tensor.detach().reshape(-1))
            if count:
                fabric.broadcast(f"gather {name}", values, everyone, rank).wait()
            add_slice(wholes, TensorSlice(name, values, tuple(shape), start))
    return wholes


def range_of(fabric: Fabric) -> tuple[int, ...]:
    """Return all ranks."""
    return tuple(range(fabric.num_ranks))


def first_element(part: TensorSlice) -> int:
    """Return where a slice begins in its flattened tensor; one with an offset in every dim is the whole tensor."""
    return part.offset if isinstance(part.offset, int) else 0


def add_slice(wholes: dict[str, Tensor], part: TensorSlice) -> None:
    """Write a slice into its whole tensor."""
    whole = wholes.setdefault(part.name, torch.zeros(part.global_shape, dtype=part.tensor.dtype))
    start = first_element(part)
    whole.view(-1)[start : start + part.tensor.numel()] = part.tensor.detach().reshape(-1).cpu()


def join_shards(shard_map: ShardMap, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by ``KIND:PARAMETER`` from those that are named as in a checkpoint; replicas are averaged."""
    by_replica: dict[str, list[Tensor]] = {}
    for name, value in wholes.items():
        by_replica.setdefault(name.partition("~")[0], []).append(value)
    by_shard: dict[str, dict[int, Tensor]] = {}
    for name, replicas in by_replica.items():
        key, _, shard = name.partition("@")
        by_shard.setdefault(key, {})[int(shard.partition("/")[0] or 0)] = mean_over_replicas(replicas)
    dims, joined = sliced_params(shard_map.run_spec.model_spec), {}
    for key, shards in by_shard.items():
        ordered = [shards[index] for index in sorted(shards)]
        is_cut = len(ordered) > 1 and ordered[0].dim() > 0
        joined[key] = torch.cat(ordered, dims[key.partition(":")[2]][0]) if is_cut else ordered[0]
    return joined
