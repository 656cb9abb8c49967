"""State of a run as logical tensors, independent of its layout: gathered, written as shards, and loaded back.

Names in a checkpoint: ``model:<parameter>``, ``buffer:<buffer>`` and ``optimizer.<key>:<parameter>``. A tensor-parallel
parameter has one entry per shard, ``model:<parameter>@1/2``; one that replicas update independently has one for each of
them, ``model:<parameter>~1/4``.

Delayed gradients are ``delayed_grad:<parameter>~1/4``, after the shard of a tensor-parallel parameter: every replica
has its own until they are all-reduced in the next step.

Error feedback can only be loaded under the same plan: ``residual@1:0+4/0@0,1`` is what rank 1 has not sent of the first
flat gradient of unit 0+4, in all-reduces over the group 0,1 or in messages between these two;
``q_factor@1:0+4/0@0,1:NAME`` is the PowerSGD factor of one of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn, optim

from counterpoint.checkpoint.tensor_slice import TensorSlice, dtype_name, flat_slice, torch_dtype, whole_tensor
from counterpoint.errors import CheckpointError
from counterpoint.fabric.fabric import Fabric, Group, Json
from counterpoint.model.spec import Unit
from counterpoint.optim.blockwise import count_blocks
from counterpoint.partitioning.dry_run import assign_values
from counterpoint.program.compression import encodes_shards, find_codec
from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Fetch,
    Forward,
    Free,
    Instruction,
    Offload,
    Pull,
    Push,
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    Update,
)
from counterpoint.program.text import format_group, format_unit
from counterpoint.runtime.comm.rank_communication import peer_pair
from counterpoint.runtime.optimizer_spec import is_scalar_state
from counterpoint.runtime.params.flat_layout import (
    WHOLE,
    FlatLayout,
    LayoutKey,
    ParamSlot,
    ShardSpan,
    build_layouts,
    limit_targets,
)
from counterpoint.runtime.params.flat_params import FlatParams
from counterpoint.runtime.params.param_store import UnitParams
from counterpoint.runtime.params.unit_roles import find_unit_roles
from counterpoint.runtime.rank_builder import (
    RankRuntime,
    RunSpec,
    ShardOwner,
    find_shard_owners,
    independent_replicas,
    sliced_params,
    take_slice,
)


@dataclass(frozen=True, slots=True)
class ShardMap:
    """Who owns which shard, and how units are laid out in flat parameters; equal on every rank.

    Args:
        run_spec: what all ranks are built from.
        dtypes: of every trainable parameter.
    """

    run_spec: RunSpec
    dtypes: Mapping[str, torch.dtype]

    def layouts(self, unit: tuple[int, ...]) -> tuple[FlatLayout, ...]:
        """Return the layout of a unit's flat parameters on any rank that has it."""
        spec, optimizer_spec = self.run_spec.model_spec, self.run_spec.optimizer_spec
        params = [
            (name, spec.shard_shape(name), self.dtypes[name], optimizer_spec.group_index[name])
            for name in spec.units[unit]
        ]
        layouts = build_layouts(
            params,
            split_size=self.run_spec.split_size,
            merges_params=optimizer_spec.merges_params,
            read_dtypes=self.run_spec.read_dtypes,
            holds_casts=self.run_spec.holds_casts,
        )
        return limit_targets(layouts, self.run_spec.max_target_elements)

    def shard_owners(self) -> list[ShardOwner]:
        """Return the owner of every shard."""
        return find_shard_owners(self.run_spec)

    @property
    def num_replicas(self) -> int:
        """Number of replicas with weights of their own."""
        return max(1, len(independent_replicas(self.run_spec.step_variants[-1])))

    @property
    def center_replica(self) -> int | None:
        """The replica whose weights are the model's; None if these are the mean over all replicas."""
        return self.num_replicas - 1 if self.run_spec.step_variants[-1].server_ranks else None

    def replica_of_rank(self, rank: int) -> int:
        """Return the replica that a rank belongs to."""
        replicas = independent_replicas(self.run_spec.step_variants[-1])
        return next((index for index, members in enumerate(replicas) if rank in members), 0)

    def name_suffix(self, name: str, tp_rank: int, replica: int) -> str:
        """Return ``@1/2`` for a tensor-parallel parameter and ``~1/4`` if replicas have their own; else nothing."""
        sharded = sliced_params(self.run_spec.model_spec)
        replica_suffix = f"~{replica}/{self.num_replicas}" if self.num_replicas > 1 else ""
        return (f"@{tp_rank}/{sharded[name][1]}" if name in sharded else "") + replica_suffix


def flat_weights(unit_params: UnitParams, layout: FlatLayout, low: int, high: int) -> Tensor:
    """Return the elements from ``low`` to ``high`` of a unit's weights in one layout."""
    for flat_params in unit_params.flat_params:
        if flat_params.layout.key == layout.key:
            return flat_params.flat_view(low, high)
    flat = torch.cat([unit_params.params[slot.name].detach().reshape(-1) for slot in layout.slots])
    return flat[low:high]


def gather_weights(shard_map: ShardMap, rank: RankRuntime, fabric: Fabric) -> dict[str, Tensor]:
    """Return every trainable parameter of the model in full on every rank; all ranks call it together."""
    everyone = tuple(range(fabric.num_ranks))
    copies: dict[tuple[tuple[int, ...], int, LayoutKey], dict[int, Tensor]] = {}
    for owner in shard_map.shard_owners():
        for layout in shard_map.layouts(owner.unit):
            low, high = layout.element_range(owner.span)
            key = (owner.unit, owner.tp_rank, layout.key)
            empty = torch.empty(layout.num_elements, dtype=layout.dtype)
            whole = copies.setdefault(key, {}).setdefault(owner.replica, empty)
            if owner.rank == fabric.rank:
                unit_params = rank.interpreter.store.units[owner.unit]
                whole[low:high].copy_(flat_weights(unit_params, layout, low, high))
            if len(everyone) > 1 and high > low:
                label = f"gather weight{format_unit(owner.unit)}"
                fabric.broadcast(label, whole[low:high], everyone, owner.rank).wait()
    return dict(
        _assemble_params(
            shard_map, {key: combine_replicas(replicas, shard_map.center_replica) for key, replicas in copies.items()}
        )
    )


def combine_replicas(copies: Mapping[int, Tensor], center: int | None) -> Tensor:
    """Return the model's weights from those of each replica: their mean, or those of the center if there is one."""
    return mean_over_replicas(list(copies.values())) if center is None else copies[center]


def mean_over_replicas(copies: Sequence[Tensor]) -> Tensor:
    """Return the mean over replicas, accumulated in float64; integers are those of the first replica."""
    if len(copies) == 1 or not copies[0].is_floating_point():
        return copies[0]
    total = copies[0].double()
    for copy in copies[1:]:
        total = total + copy.double()
    return (total / len(copies)).to(copies[0].dtype)


def _assemble_params(
    shard_map: ShardMap, flats: Mapping[tuple[tuple[int, ...], int, LayoutKey], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    sharded = sliced_params(shard_map.run_spec.model_spec)
    for unit in shard_map.run_spec.model_spec.units:
        for layout in shard_map.layouts(unit):
            for slot in layout.slots:
                dim, count = sharded.get(slot.name, (0, 1))
                local = [
                    flats[unit, index, layout.key][slot.start : slot.stop].view(slot.shape) for index in range(count)
                ]
                yield slot.name, torch.cat(local, dim=dim) if count > 1 else local[0].clone()


def has_full_model(shard_map: ShardMap) -> bool:
    """Return whether every rank has all current weights, so that nothing has to be gathered.

    True if ranks update whole units, or share units in memory; never with tensor parallelism or servers, nor if ranks
    hold casts.
    """
    run_spec = shard_map.run_spec
    if (
        shard_map.num_replicas > 1
        or run_spec.holds_casts
        or sliced_params(run_spec.model_spec)
        or any(isinstance(instruction, ApplyPushes) for _, instruction in run_spec.program.instructions())
    ):
        return False
    for rank, rank_program in enumerate(run_spec.program.rank_programs):
        roles = find_unit_roles(rank, rank_program.body, run_spec.model_spec)
        if any(unit not in roles or not roles[unit].has_full_params for unit in run_spec.model_spec.units):
            return False
    return True


def broadcast_params(shard_map: ShardMap, rank: RankRuntime, fabric: Fabric) -> None:
    """Update every rank's weights from their owners; all ranks call it together."""
    full = gather_weights(shard_map, rank, fabric)
    load_weights(shard_map, rank, lambda name: full[name])


def load_weights(shard_map: ShardMap, rank: RankRuntime, read: Callable[[str], Tensor]) -> None:
    """Write full parameters, read by name, into the part of them that this rank has."""
    rank_program = shard_map.run_spec.program.rank_programs[rank.interpreter.fabric.rank]
    sharded = sliced_params(shard_map.run_spec.model_spec)
    for unit_params in rank.interpreter.store.units.values():
        for name, param in unit_params.params.items():
            local = take_slice(read(name), sharded.get(name), (rank_program.tp_rank, rank_program.tp_degree))
            flat_params = next(
                (flat_params for flat_params in unit_params.flat_params if name in flat_params.params), None
            )
            if flat_params is None:
                param.data.copy_(local)
            else:
                flat_params.write_param(name, local)


def average_buffers(
    rank: RankRuntime, fabric: Fabric, model_buffers: Sequence[str], num_micros: Mapping[str, int]
) -> None:
    """Replace floating-point buffers by their mean over the ranks that ran their block, weighted by microbatches.

    Running statistics are moving averages, and averaging is linear: the mean over the replicas at the end equals that
    of replicas which average after every step.

    Args:
        rank: this rank.
        fabric: its connection to the others.
        model_buffers: names of all buffers, in the same order on all ranks.
        num_micros: for each buffer that this rank changes, the number of microbatches per step that change it.
    """
    everyone = tuple(range(fabric.num_ranks))
    store = rank.interpreter.store
    for name in model_buffers:
        buffer = store.buffers[name]
        count = float(num_micros.get(name, 0))
        if buffer.is_floating_point():
            total = torch.cat(
                [buffer.detach().reshape(-1).cpu().double() * count, torch.tensor([count], dtype=torch.float64)]
            )
            fabric.all_reduce(f"buffer {name}", total, everyone).wait()
            if float(total[-1]) > 0:
                assign_values(buffer, (total[:-1] / total[-1]).view(buffer.shape))
        else:
            candidates = fabric.gather_values(f"buffer {name}", [count, buffer.reshape(-1).tolist()], everyone)
            best = max(cast("list[tuple[float, list[int]]]", candidates), key=lambda item: item[0])
            assign_values(buffer, torch.tensor(best[1], dtype=buffer.dtype).view(buffer.shape))


@dataclass(frozen=True, slots=True)
class OptimizerTarget:
    """One tensor that an optimizer updates, and its position in its unit's flat parameters."""

    optimizer: optim.Optimizer
    tensor: Tensor
    unit: tuple[int, ...]
    layout: FlatLayout
    start: int
    stop: int

    def param_slots(self) -> list[tuple[ParamSlot, int, int]]:
        """Return the parameters that it covers, with their first elements in it and one past their last."""
        spans = ((slot, max(slot.start, self.start), min(slot.stop, self.stop)) for slot in self.layout.slots)
        return [(slot, first, last) for slot, first, last in spans if first < last]


def optimizer_targets(shard_map: ShardMap, rank: RankRuntime) -> Iterator[OptimizerTarget]:
    """Yield every tensor that this rank's optimizers update."""
    store = rank.interpreter.store
    for units in rank.interpreter.optimizer_groups():
        optimizer, tensors = store.optimizer(units)
        ranges = [
            (unit, *target_range)
            for unit in units
            for target_range in target_ranges(
                store.units[unit], shard_map.layouts(unit), store.units[unit].role.update_shard or WHOLE
            )
        ]
        for tensor, (unit, layout, start, stop) in zip(tensors, ranges, strict=True):
            assert optimizer is not None, "it updates a tensor"
            yield OptimizerTarget(optimizer, tensor, unit, layout, start, stop)


def target_ranges(
    unit_params: UnitParams, layouts: Sequence[FlatLayout], update_shard: ShardSpan
) -> list[tuple[FlatLayout, int, int]]:
    """Return the range of each tensor that the optimizer updates for a unit, in its order."""
    if unit_params.flat_params:
        return [(layout, start, stop) for layout in layouts for _, start, stop in layout.optimizer_ranges(update_shard)]
    slots = {slot.name: (layout, slot.start, slot.stop) for layout in layouts for slot in layout.slots}
    return [slots[name] for name in unit_params.params]


def collect_state_slices(
    shard_map: ShardMap, rank: RankRuntime
) -> tuple[list[TensorSlice], dict[str, dict[str, Json]]]:
    """Return the slices that this rank writes into a checkpoint, and the optimizer's scalars by parameter."""
    slices, scalars = collect_optimizer_state(shard_map, rank)
    weights = [part for owner in owned_shards(shard_map, rank) for part in _weight_slices(shard_map, rank, owner)]
    return weights + slices, encode_scalars(scalars)


def owned_shards(shard_map: ShardMap, rank: RankRuntime) -> list[ShardOwner]:
    """Return the shards that a rank owns."""
    return [owner for owner in shard_map.shard_owners() if owner.rank == rank.interpreter.fabric.rank]


def collect_optimizer_state(
    shard_map: ShardMap, rank: RankRuntime
) -> tuple[list[TensorSlice], dict[str, dict[str, Any]]]:
    """Return the optimizer state of the shards that a rank owns: slices, and what is not a tensor by parameter."""
    this_rank = rank.interpreter.fabric.rank
    owned_units = {owner.unit for owner in owned_shards(shard_map, rank)}
    slices: list[TensorSlice] = []
    scalars: dict[str, dict[str, Any]] = {}
    tp_rank = shard_map.run_spec.program.rank_programs[this_rank].tp_rank
    for target in optimizer_targets(shard_map, rank):
        if target.unit not in owned_units:
            continue
        for key, value in rank.interpreter.store.read_state(target.optimizer, target.tensor).items():
            for slot, first, last in target.param_slots():
                name = f"{slot.name}{shard_map.name_suffix(slot.name, tp_rank, shard_map.replica_of_rank(this_rank))}"
                if is_scalar_state(key, value, target.tensor):
                    moves = isinstance(value, Tensor) and shard_map.run_spec.optimizer_spec.uses_fused_kernels
                    scalars.setdefault(name, {})[key] = value.cpu() if moves else value
                elif value.shape == target.tensor.shape:
                    whole = value.to_dense() if value.is_sparse else value
                    part = whole.reshape(-1)[first - target.start : last - target.start].contiguous()
                    slices.append(flat_slice(f"optimizer.{key}:{name}", part, slot.shape, first - slot.start))
                elif last - first < slot.stop - slot.start:  # only optimizers with one value per block take parts
                    shape, start = (count_blocks(slot.stop - slot.start),), count_blocks(first - slot.start)
                    slices.append(flat_slice(f"optimizer.{key}:{name}", value, shape, start))
                else:
                    slices.append(whole_tensor(f"optimizer.{key}:{name}", value))
    return slices, scalars


def collect_grads(shard_map: ShardMap, rank: RankRuntime) -> Iterator[TensorSlice]:
    """Yield the kept gradients of the shards that a rank owns; nothing for a parameter without a gradient."""
    for owner in owned_shards(shard_map, rank):
        unit_params = rank.interpreter.store.units[owner.unit]
        for layout in shard_map.layouts(owner.unit):
            for slot, start, stop in layout.slots_in(owner.span):
                grad = unit_params.grad_of(slot.name, start, stop)
                if grad is not None:
                    name = f"grad:{slot.name}{shard_map.name_suffix(slot.name, owner.tp_rank, owner.replica)}"
                    yield TensorSlice(name, grad, slot.shape, start - slot.start)


def encode_scalars(scalars: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, Json]]:
    """Return the scalars of each parameter as JSON."""
    return {name: {key: encode_scalar(key, value) for key, value in own.items()} for name, own in scalars.items()}


def encode_scalar(key: str, value: object) -> Json:
    """Return a scalar as JSON, a tensor's with its dtype; :func:`decode_scalar` is its inverse.

    Raises:
        CheckpointError: it is not a number.
    """
    if isinstance(value, Tensor):
        return [value.item(), dtype_name(value.dtype)]
    if value is None or isinstance(value, int | float):
        return value
    raise CheckpointError(
        f"the optimizer keeps {key!r} as a {type(value).__name__}; a checkpoint holds tensors and numbers: "
        "keep it in one of these, or train without checkpoints"
    )


def decode_scalar(saved: Any) -> Any:  # noqa: ANN401 - JSON in, a number or a tensor of one out
    """Decode the result of :func:`encode_scalar`."""
    return torch.tensor(saved[0], dtype=torch_dtype(saved[1])) if isinstance(saved, list) else saved


def _weight_slices(shard_map: ShardMap, rank: RankRuntime, owner: ShardOwner) -> Iterator[TensorSlice]:
    unit_params = rank.interpreter.store.units[owner.unit]
    for layout in shard_map.layouts(owner.unit):
        low, high = layout.element_range(owner.span)
        flat = flat_weights(unit_params, layout, low, high)
        for slot, start, stop in layout.slots_in(owner.span):
            name = f"model:{slot.name}{shard_map.name_suffix(slot.name, owner.tp_rank, owner.replica)}"
            yield flat_slice(name, flat[start - low : stop - low].contiguous(), slot.shape, start - slot.start)


def restore_optimizers(
    shard_map: ShardMap,
    rank: RankRuntime,
    keys: Sequence[str],
    read: Callable[[str, str], Tensor | None],
    scalars: Mapping[str, Mapping[str, Any]],
) -> None:
    """Load saved optimizer state into this rank's optimizers.

    Args:
        shard_map: who owns which shard.
        rank: this rank.
        keys: the names of the state's tensors, ``exp_avg`` for instance.
        read: returns a key's tensor for a parameter, in the parameter's full shape; None if there is none.
        scalars: the scalars by parameter.

    Raises:
        CheckpointError: parameters that are updated as one tensor have different scalars.
    """
    rank.interpreter.store.num_host_commits = 0  # the host decides the next steps, in which missing state is made
    for target in optimizer_targets(shard_map, rank):
        slots = target.param_slots()
        state: dict[str, Any] = {}
        for key in keys:
            fulls = [full for slot, _, _ in slots if (full := read(key, slot.name)) is not None]
            if fulls and len(fulls) == len(slots):
                local = _local_optimizer_state(shard_map, rank, fulls, target)
                state[key] = as_state_of_run(rank, target, key, local).to(target.tensor.device)
        require_equal_scalars({slot.name: scalars.get(slot.name, {}) for slot, _, _ in slots})
        for key, value in scalars.get(slots[0][0].name, {}).items():
            state[key] = value.to(scalar_device(target), copy=True) if isinstance(value, Tensor) else value
        rank.interpreter.store.write_state(target.optimizer, target.tensor, state)


def as_state_of_run(rank: RankRuntime, target: OptimizerTarget, key: str, value: Tensor) -> Tensor:
    """Return an entry of the state of weights in bf16 in the dtype that this run keeps it in.

    With stochastic rounding that is float32, and bf16 without; torch's ``load_state_dict`` casts as well.
    """
    if target.tensor.dtype != torch.bfloat16 or value.dtype not in {torch.bfloat16, torch.float32}:
        return value
    group = target.param_slots()[0][0].group
    dtypes = rank.interpreter.store.state_dtypes(group, target.tensor, has_masters=False)
    return value.to(dtypes.get(key, value.dtype))


def scalar_device(target: OptimizerTarget) -> torch.device:
    """Return where an optimizer keeps scalars, such as its step count: with its tensors if one kernel uses both."""
    has_kernel = any(group.get("fused") or group.get("capturable") for group in target.optimizer.param_groups)
    return target.tensor.device if has_kernel else torch.device("cpu")


def require_equal_scalars(scalars: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that parameters that are updated as one tensor have the same scalars in their optimizer state.

    Raises:
        CheckpointError: they have not.
    """
    first, *others = scalars
    for other in others:
        if not equal_scalars(scalars[first], scalars[other]):
            raise CheckpointError(
                f"the optimizer's state of {first} has {format_scalars(scalars[first])}, that of {other} has "
                f"{format_scalars(scalars[other])}, as after steps that did not use one of them, but here they are "
                "updated as one tensor; pass unused_parameters='skip', which updates each parameter on its own"
            )


def equal_scalars(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two parameters have the same scalars, which are numbers or tensors of one."""
    return first.keys() == second.keys() and all(
        value is second[key] or bool(value == second[key]) for key, value in first.items()
    )


def format_scalars(scalars: Mapping[str, Any]) -> str:
    """Return scalars as text."""
    return ", ".join(f"{key}={float(value)}" for key, value in scalars.items()) or "none"


def _local_optimizer_state(
    shard_map: ShardMap, rank: RankRuntime, fulls: Sequence[Tensor], target: OptimizerTarget
) -> Tensor:
    """Return a target's part of the state of its parameters.

    State of another shape is returned whole, if the target is a whole parameter; else it has one value per block.
    """
    rank_program = shard_map.run_spec.program.rank_programs[rank.interpreter.fabric.rank]
    shapes = {param.name: param.shape for param in shard_map.run_spec.model_spec.params}
    parts = []
    for full, (slot, first, last) in zip(fulls, target.param_slots(), strict=True):
        if tuple(full.shape) != shapes[slot.name]:
            is_whole = last - first == slot.stop - slot.start
            blocks = slice(count_blocks(first - slot.start), count_blocks(last - slot.start))
            return (full if is_whole else full[blocks]).clone()  # ranks in this process may get the same one
        local = take_slice(
            full,
            sliced_params(shard_map.run_spec.model_spec).get(slot.name),
            (rank_program.tp_rank, rank_program.tp_degree),
        )
        parts.append(local.reshape(-1)[first - slot.start : last - slot.start])
    return torch.cat(parts).view(target.tensor.shape)


def frozen_params(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model that are not trained."""
    return {name: param.detach() for name, param in model.named_parameters() if not param.requires_grad}


@dataclass(frozen=True, slots=True)
class DelayedGrad:
    """The gradient of a unit that a rank delays by a step.

    Args:
        unit: of which unit.
        replica: index of the rank in the all-reduce.
        num_replicas: members of the all-reduce.
        is_first: whether no lower rank has the same gradient.
    """

    unit: tuple[int, ...]
    replica: int
    num_replicas: int
    is_first: bool


def find_delayed_grads(shard_map: ShardMap, rank: int) -> list[DelayedGrad]:
    """Return the gradients that a rank delays in every step."""
    program, spec = shard_map.run_spec.program, shard_map.run_spec.model_spec
    sharded = {unit for unit, names in spec.units.items() if not sliced_params(spec).keys().isdisjoint(names)}
    delayed_grads, seen = [], set()
    for other_rank, rank_program in enumerate(program.rank_programs[: rank + 1]):
        for instruction in rank_program.body:
            if (
                isinstance(instruction, Collective)
                and instruction.tensor.name == "delayed_grad"
                and instruction.phase == "start"
            ):
                replica = instruction.group.index(other_rank)
                key = (
                    instruction.tensor.blocks,
                    replica,
                    rank_program.tp_rank if instruction.tensor.blocks in sharded else 0,
                )
                if other_rank == rank:
                    delayed_grads.append(
                        DelayedGrad(instruction.tensor.blocks, replica, len(instruction.group), key not in seen)
                    )
                seen.add(key)
    return delayed_grads


def collect_delayed_grads(shard_map: ShardMap, rank: RankRuntime) -> Iterator[TensorSlice]:
    """Yield the delayed gradients that this rank writes into a checkpoint."""
    this_rank = rank.interpreter.fabric.rank
    rank_program, sharded = (
        shard_map.run_spec.program.rank_programs[this_rank],
        sliced_params(shard_map.run_spec.model_spec),
    )
    for delayed_grad in find_delayed_grads(shard_map, this_rank):
        if not delayed_grad.is_first:
            continue
        for flat_params in rank.interpreter.store.units[delayed_grad.unit].flat_params:
            flat = flat_params.ensure_delayed_grad()
            for slot in flat_params.layout.slots:
                tp_suffix = f"@{rank_program.tp_rank}/{sharded[slot.name][1]}" if slot.name in sharded else ""
                name = f"delayed_grad:{slot.name}{tp_suffix}~{delayed_grad.replica}/{delayed_grad.num_replicas}"
                yield flat_slice(name, flat[slot.start : slot.stop].contiguous(), slot.shape, 0)


def restore_delayed_grads(
    shard_map: ShardMap, rank: RankRuntime, saved_replicas: int, read: Callable[[str, int], Tensor]
) -> None:
    """Load delayed gradients; if the number of replicas differs, the first one gets their sum.

    Args:
        shard_map: who owns which shard.
        rank: this rank.
        saved_replicas: number of saved gradients of each parameter.
        read: returns a replica's gradient of a parameter, in full.
    """
    this_rank = rank.interpreter.fabric.rank
    rank_program, sharded = (
        shard_map.run_spec.program.rank_programs[this_rank],
        sliced_params(shard_map.run_spec.model_spec),
    )
    for delayed_grad in find_delayed_grads(shard_map, this_rank):
        replicas = [delayed_grad.replica] if delayed_grad.num_replicas == saved_replicas else range(saved_replicas)
        for flat_params in rank.interpreter.store.units[delayed_grad.unit].flat_params:
            flat_params.drop_delayed_grad()
            flat = flat_params.ensure_delayed_grad()
            if delayed_grad.num_replicas != saved_replicas and delayed_grad.replica > 0:
                continue
            for slot in flat_params.layout.slots:
                full = torch.stack([read(slot.name, replica) for replica in replicas]).sum(0)
                local = take_slice(full, sharded.get(slot.name), (rank_program.tp_rank, rank_program.tp_degree))
                flat[slot.start : slot.stop].copy_(local.reshape(-1))


ERROR_FEEDBACK_KINDS = ("residual", "server_residual", "q_factor")


def error_feedback_key(rank: int, unit: Unit, index: int, group: Group) -> str:
    """Return the name of the residual of one flat gradient."""
    return f"{rank}:{format_unit(unit)}/{index}@{format_group(group)}"


def collect_error_feedback(rank: RankRuntime) -> Iterator[TensorSlice]:
    """Yield the error feedback that this rank writes into a checkpoint."""
    for key, flat_params, group in _error_feedback_slots(rank):
        error_feedback = flat_params.error_feedbacks.get(group)
        if error_feedback is None or error_feedback.residual is None:
            continue
        yield whole_tensor(f"residual@{key}", error_feedback.residual)
        if error_feedback.server_residual is not None:
            yield whole_tensor(f"server_residual@{key}", error_feedback.server_residual)
        for name, q_factor in error_feedback.q_factors.items():
            yield whole_tensor(f"q_factor@{key}:{name}", q_factor.contiguous())


def is_error_feedback(name: str) -> bool:
    """Return whether an entry of a checkpoint is error feedback."""
    return name.split("@")[0] in ERROR_FEEDBACK_KINDS


def error_feedback_keys(shard_map: ShardMap) -> set[str]:
    """Return the keys of all residuals of the plan's ranks."""
    return {
        error_feedback_key(rank, unit, index, group)
        for rank, instruction in shard_map.run_spec.program.instructions()
        for unit, group in _error_feedback_groups(rank, instruction)
        for index, _ in enumerate(shard_map.layouts(unit))
    }


def _error_feedback_groups(rank: int, instruction: Instruction) -> Iterator[tuple[Unit, Group]]:
    """Yield the unit and the group of an instruction with error feedback; nothing for most instructions."""
    match instruction:
        case Collective(op, tensor, group, codec=codec) if (
            codec and not encodes_shards(op, codec) and find_codec(codec).spec.has_error_feedback
        ):
            yield tensor.blocks, group
        case Send(tensor, peer, codec) | Push(tensor, peer, codec) if codec:
            yield tensor.blocks, peer_pair(peer, rank)
        case Forward() | Recompute() | Backward() | Collective() | Send() | Push() | Recv() | Pull() | ApplyPushes():
            pass
        case Commit() | Update() | SwapGradBuffers() | Free() | Fetch() | Offload():
            pass


def restore_error_feedback(rank: RankRuntime, names: Iterable[str], read: Callable[[str], Tensor]) -> None:
    """Load this rank's error feedback from those entries of a checkpoint that may be used."""
    for unit_params in rank.interpreter.store.units.values():
        for flat_params in unit_params.flat_params:
            flat_params.error_feedbacks.clear()
    usable = {name for name in names if is_error_feedback(name)}
    for key, flat_params, group in _error_feedback_slots(rank):
        if f"residual@{key}" not in usable:
            continue
        q_factors = {
            slot.name: read(f"q_factor@{key}:{slot.name}").to(flat_params.weights.device, copy=True)
            for slot in flat_params.layout.slots
            if f"q_factor@{key}:{slot.name}" in usable
        }
        residual = read(f"residual@{key}").to(flat_params.weights.device, copy=True)
        name = f"server_residual@{key}"
        server_residual = read(name).to(flat_params.weights.device, copy=True) if name in usable else None
        flat_params.error_feedback_for(group).restore(residual, q_factors, server_residual)


def _error_feedback_slots(rank: RankRuntime) -> Iterator[tuple[str, FlatParams, Group]]:
    """Yield the key, flat parameters and group of all error feedback of this rank."""
    interpreter = rank.interpreter
    this_rank = interpreter.fabric.rank
    for unit, group in dict.fromkeys(
        unit_and_group
        for instruction in interpreter.program.instructions
        for unit_and_group in _error_feedback_groups(this_rank, instruction)
    ):
        for index, flat_params in enumerate(interpreter.store.units[unit].flat_params):
            yield error_feedback_key(this_rank, unit, index, group), flat_params, group
