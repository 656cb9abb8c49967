"""The state of a run as logical tensors, whatever the layout: gathered, written as pieces, and read back.

Names in a checkpoint: ``model:<parameter>``, ``buffer:<buffer>`` and ``optimizer.<key>:<parameter>``; a sliced
parameter has one entry per slice, ``model:<parameter>@1/2``, and one that replicas update apart one for each of them,
``model:<parameter>~1/4``.

Gradients that were set aside, in checkpoints: every replica has its own until they are summed in the next step.

Names in a checkpoint: ``delayed_grad:<parameter>~1/4``, after the slice of a sliced parameter.

What codes have not sent yet, in checkpoints: every rank's own, so that only the same plan can go on with it.

Names in a checkpoint: ``residual@1:0+4/0@0,1`` for what rank 1 has not sent of the first arena of unit 0+4 to the group
0,1, or by itself to the other of these two, and ``q_factor@1:0+4/0@0,1:JOB_NAME`` for the factor that ``powersgd`` goes on
with for one of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn, optim

from counterpoint.checkpoint.tensor_slice import TensorSlice, dtype_name, torch_dtype, whole_tensor
from counterpoint.errors import CheckpointError
from counterpoint.fabric.fabric import Fabric, Group, Json
from counterpoint.model.spec import Unit
from counterpoint.program.compression import find_codec
from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Forward,
    Free,
    Instruction,
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
from counterpoint.runtime.params.flat_layout import WHOLE, FlatLayout, ParamSlot, ShardSpan, build_layouts
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

SCALAR_STATE_KEYS: frozenset[str] = frozenset({"step", "mu_product", "eta", "mu"})
"""What torch's optimizers keep as one number for a whole tensor, however small that tensor is."""


@dataclass(frozen=True, slots=True)
class ShardMap:
    """Who answers for what, and how it lies in arenas; the same on every rank.

    Args:
        parts: what all ranks are built from.
        dtypes: of every trainable parameter.
    """

    run_spec: RunSpec
    dtypes: Mapping[str, torch.dtype]

    def layouts(self, unit: tuple[int, ...]) -> tuple[FlatLayout, ...]:
        """Return how a unit lies in its arenas on any rank that holds it."""
        spec, face = self.run_spec.model_spec, self.run_spec.optimizer_spec
        described = [
            (name, spec.shard_shape(name), self.dtypes[name], face.group_index[name]) for name in spec.units[unit]
        ]
        return build_layouts(described, may_split_params=face.is_elementwise)

    def shard_owners(self) -> list[ShardOwner]:
        """Return who answers for every part."""
        return find_shard_owners(self.run_spec)

    @property
    def num_replicas(self) -> int:
        """How many replicas have weights of their own."""
        return max(1, len(independent_replicas(self.run_spec.step_variants[-1])))

    @property
    def center_replica(self) -> int | None:
        """The replica whose weights are the model's; None where these are the mean of all."""
        return self.num_replicas - 1 if self.run_spec.step_variants[-1].server_ranks else None

    def replica_of_rank(self, rank: int) -> int:
        """Return the replica that a rank belongs to."""
        owners = independent_replicas(self.run_spec.step_variants[-1])
        return next((index for index, own in enumerate(owners) if rank in own), 0)

    def name_suffix(self, name: str, slice_index: int, replica: int) -> str:
        """Return ``@1/2`` for a sliced parameter and ``~1/4`` where replicas have their own, nothing for any other."""
        sliced = sliced_params(self.run_spec.model_spec)
        own = f"~{replica}/{self.num_replicas}" if self.num_replicas > 1 else ""
        return (f"@{slice_index}/{sliced[name][1]}" if name in sliced else "") + own


def flat_weights(unit_params: UnitParams, layout: FlatLayout, low: int, high: int) -> Tensor:
    """Return the elements from ``low`` to ``high`` of a unit's weights in one dtype."""
    for arena in unit_params.flat_params:
        if arena.layout.dtype == layout.dtype:
            return arena.flat_view(low, high)
    flat = torch.cat([unit_params.params[slot.name].detach().reshape(-1) for slot in layout.slots])
    return flat[low:high]


def gather_weights(shard_map: ShardMap, rank: RankRuntime, fabric: Fabric) -> dict[str, Tensor]:
    """Return every trainable parameter of the model in full on every rank; all ranks call it together."""
    everyone = tuple(range(fabric.num_ranks))
    copies: dict[tuple[tuple[int, ...], int, torch.dtype], dict[int, Tensor]] = {}
    for holding in shard_map.shard_owners():
        for layout in shard_map.layouts(holding.unit):
            low, high = layout.element_range(holding.span)
            key = (holding.unit, holding.slice_index, layout.dtype)
            empty = torch.empty(layout.num_elements, dtype=layout.dtype)
            whole = copies.setdefault(key, {}).setdefault(holding.replica, empty)
            if holding.rank == fabric.rank:
                store = rank.interpreter.store.units[holding.unit]
                whole[low:high].copy_(flat_weights(store, layout, low, high))
            if len(everyone) > 1 and high > low:
                label = f"gather weight{format_unit(holding.unit)}"
                fabric.broadcast(label, whole[low:high], everyone, holding.rank).wait()
    return dict(
        _assemble_params(
            shard_map, {key: combine_replicas(found, shard_map.center_replica) for key, found in copies.items()}
        )
    )


def combine_replicas(copies: Mapping[int, Tensor], center: int | None) -> Tensor:
    """Return what the model has, of what each replica has: the mean, or what the center has where there is one."""
    return mean_over_replicas(list(copies.values())) if center is None else copies[center]


def mean_over_replicas(copies: Sequence[Tensor]) -> Tensor:
    """Return the mean of what replicas have, added up in float64; of what is no fraction, the first replica's."""
    if len(copies) == 1 or not copies[0].is_floating_point():
        return copies[0]
    total = copies[0].double()
    for copy in copies[1:]:
        total = total + copy.double()
    return (total / len(copies)).to(copies[0].dtype)


def _assemble_params(
    shard_map: ShardMap, flats: Mapping[tuple[tuple[int, ...], int, torch.dtype], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    sliced = sliced_params(shard_map.run_spec.model_spec)
    for unit in shard_map.run_spec.model_spec.units:
        for layout in shard_map.layouts(unit):
            for slot in layout.slots:
                dim, count = sliced.get(slot.name, (0, 1))
                local = [
                    flats[unit, index, layout.dtype][slot.start : slot.stop].view(slot.shape) for index in range(count)
                ]
                yield slot.name, torch.cat(local, dim=dim) if count > 1 else local[0].clone()


def has_full_model(shard_map: ShardMap) -> bool:
    """Tell whether every rank has all weights as they are, so that nothing has to be gathered.

    Ranks do which update whole units, or have a unit in common with others who do; not those with slices or servers.
    """
    parts = shard_map.run_spec
    if (
        shard_map.num_replicas > 1
        or sliced_params(parts.model_spec)
        or any(isinstance(word, ApplyPushes) for _, word in parts.program.instructions())
    ):
        return False
    for rank, row in enumerate(parts.program.rank_programs):
        roles = find_unit_roles(rank, row.body, parts.model_spec)
        if any(unit not in roles or not roles[unit].has_full_params for unit in parts.model_spec.units):
            return False
    return True


def broadcast_params(shard_map: ShardMap, rank: RankRuntime, fabric: Fabric) -> None:
    """Bring every rank's weights up to date with those that answer for them; all ranks call it together."""
    full = gather_weights(shard_map, rank, fabric)
    load_weights(shard_map, rank, lambda name: full[name])


def load_weights(shard_map: ShardMap, rank: RankRuntime, read: Callable[[str], Tensor]) -> None:
    """Put full parameters, read by name, into whatever part of them this rank holds."""
    row = shard_map.run_spec.program.rank_programs[rank.interpreter.fabric.rank]
    sliced = sliced_params(shard_map.run_spec.model_spec)
    for store in rank.interpreter.store.units.values():
        for name, param in store.params.items():
            local = take_slice(read(name), sliced.get(name), (row.tp_rank, row.tp_degree))
            arena = next((arena for arena in store.flat_params if name in arena.params), None)
            if arena is None:
                param.data.copy_(local)
            else:
                arena.write_param(name, local)


def average_buffers(
    rank: RankRuntime, fabric: Fabric, model_buffers: Sequence[str], num_micros: Mapping[str, int]
) -> None:
    """Replace floating-point buffers by their mean over the ranks that ran their block, weighted by microbatches.

    Running statistics are moving averages, and averaging is linear: the mean of what the replicas have at the
    end is what replicas that average after every step would have.

    Args:
        rank: this rank.
        fabric: its way to the others.
        model_buffers: names of all buffers, in the same order on all ranks.
        num_micros: for each buffer that this rank's row changes, how many microbatches change it in a step.
    """
    everyone = tuple(range(fabric.num_ranks))
    store = rank.interpreter.store
    for name in model_buffers:
        buffer = store.buffers[name]
        weight = float(num_micros.get(name, 0))
        if buffer.is_floating_point():
            total = torch.cat(
                [buffer.detach().reshape(-1).double() * weight, torch.tensor([weight], dtype=torch.float64)]
            )
            fabric.all_reduce(f"buffer {name}", total, everyone).wait()
            if float(total[-1]) > 0:
                buffer.copy_((total[:-1] / total[-1]).view(buffer.shape))
        else:
            counts = fabric.gather_values(f"buffer {name}", [weight, buffer.reshape(-1).tolist()], everyone)
            best = max(cast("list[tuple[float, list[int]]]", counts), key=lambda item: item[0])
            buffer.copy_(torch.tensor(best[1], dtype=buffer.dtype).view(buffer.shape))


@dataclass(frozen=True, slots=True)
class OptimizerTarget:
    """One tensor that an optimizer updates, and where it lies in its unit's arena."""

    optimizer: optim.Optimizer
    tensor: Tensor
    unit: tuple[int, ...]
    layout: FlatLayout
    start: int
    stop: int

    def param_slots(self) -> list[tuple[ParamSlot, int, int]]:
        """Return the parameters it covers, with the elements from and to."""
        spans = ((slot, max(slot.start, self.start), min(slot.stop, self.stop)) for slot in self.layout.slots)
        return [(slot, first, last) for slot, first, last in spans if first < last]


def optimizer_targets(shard_map: ShardMap, rank: RankRuntime) -> Iterator[OptimizerTarget]:
    """Yield every tensor that this rank's optimizers update."""
    store = rank.interpreter.store
    for run in rank.interpreter.optimizer_groups():
        optimizer, tensors = store.optimizer(run)
        ranges = [
            (unit, *where)
            for unit in run
            for where in target_ranges(
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
    """Return what this rank writes into a checkpoint, and the optimizer's plain numbers by parameter."""
    me = rank.interpreter.fabric.rank
    mine = [holding for holding in shard_map.shard_owners() if holding.rank == me]
    pieces = [piece for holding in mine for piece in _weight_slices(shard_map, rank, holding)]
    scalars: dict[str, dict[str, Json]] = {}
    index = shard_map.run_spec.program.rank_programs[me].tp_rank
    for target in optimizer_targets(shard_map, rank):
        if target.unit not in {holding.unit for holding in mine}:
            continue
        for key, value in target.optimizer.state.get(target.tensor, {}).items():
            for slot, first, last in target.param_slots():
                name = f"{slot.name}{shard_map.name_suffix(slot.name, index, shard_map.replica_of_rank(me))}"
                if is_scalar_state(key, value, target.tensor):
                    scalars.setdefault(name, {})[key] = encode_scalar(key, value)
                elif value.shape == target.tensor.shape:
                    part = value.reshape(-1)[first - target.start : last - target.start].contiguous()
                    pieces.append(TensorSlice(f"optimizer.{key}:{name}", part, slot.shape, first - slot.start))
                else:  # of an optimizer that looks at whole tensors, so that the target is the whole parameter
                    pieces.append(whole_tensor(f"optimizer.{key}:{name}", value))
    return pieces, scalars


def is_scalar_state(key: str, value: object, target: Tensor) -> bool:
    """Tell whether an entry of an optimizer's state is one number for all elements, as its step count is."""
    return not isinstance(value, Tensor) or (value.numel() == 1 and (key in SCALAR_STATE_KEYS or target.numel() > 1))


def encode_scalar(key: str, value: object) -> Json:
    """Return a plain number as JSON, a tensor's with its dtype; :func:`decode_scalar` is its opposite.

    Raises:
        CheckpointError: the optimizer keeps something that is no number.
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
    """Return what :func:`encode_scalar` was given."""
    return torch.tensor(saved[0], dtype=torch_dtype(saved[1])) if isinstance(saved, list) else saved


def _weight_slices(shard_map: ShardMap, rank: RankRuntime, owner: ShardOwner) -> Iterator[TensorSlice]:
    store = rank.interpreter.store.units[owner.unit]
    for layout in shard_map.layouts(owner.unit):
        low, high = layout.element_range(owner.span)
        flat = flat_weights(store, layout, low, high)
        for slot, start, stop in layout.slots_in(owner.span):
            name = f"model:{slot.name}{shard_map.name_suffix(slot.name, owner.slice_index, owner.replica)}"
            yield TensorSlice(name, flat[start - low : stop - low].contiguous(), slot.shape, start - slot.start)


def restore_optimizers(
    shard_map: ShardMap,
    rank: RankRuntime,
    keys: Sequence[str],
    read: Callable[[str, str], Tensor | None],
    scalars: Mapping[str, Mapping[str, Json]],
) -> None:
    """Put saved optimizer state into this rank's optimizers.

    Args:
        book: who answers for what.
        rank: this rank.
        keys: the names of the state's tensors, ``exp_avg`` for instance.
        read: returns a key's tensor for a parameter, in the parameter's full shape; None when there is none.
        scalars: the plain numbers by parameter.
    """
    for target in optimizer_targets(shard_map, rank):
        slots = target.param_slots()
        state: dict[str, Any] = {}
        for key in keys:
            fulls = [full for slot, _, _ in slots if (full := read(key, slot.name)) is not None]
            if fulls and len(fulls) == len(slots):
                state[key] = _local_optimizer_state(shard_map, rank, fulls, target)
        for key, number in scalars.get(slots[0][0].name, {}).items():
            state[key] = decode_scalar(number)
        target.optimizer.state[target.tensor] = state


def _local_optimizer_state(
    shard_map: ShardMap, rank: RankRuntime, fulls: Sequence[Tensor], target: OptimizerTarget
) -> Tensor:
    """Return a target's part of the state of the parameters that it covers; state of another shape is not cut."""
    row = shard_map.run_spec.program.rank_programs[rank.interpreter.fabric.rank]
    shapes = {param.name: param.shape for param in shard_map.run_spec.model_spec.params}
    parts = []
    for full, (slot, first, last) in zip(fulls, target.param_slots(), strict=True):
        if tuple(full.shape) != shapes[slot.name]:
            return full
        local = take_slice(
            full, sliced_params(shard_map.run_spec.model_spec).get(slot.name), (row.tp_rank, row.tp_degree)
        )
        parts.append(local.reshape(-1)[first - slot.start : last - slot.start])
    return torch.cat(parts).view(target.tensor.shape)


def frozen_params(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model that are not trained."""
    return {name: param.detach() for name, param in model.named_parameters() if not param.requires_grad}


@dataclass(frozen=True, slots=True)
class DelayedGrad:
    """The gradient of a unit that a rank sets aside.

    Args:
        unit: of what.
        replica: whose it is, of those that are summed.
        num_replicas: how many are summed.
        is_first: whether no lower rank has the same.
    """

    unit: tuple[int, ...]
    replica: int
    num_replicas: int
    is_first: bool


def find_delayed_grads(shard_map: ShardMap, rank: int) -> list[DelayedGrad]:
    """Return what a rank sets aside in every step."""
    program, spec = shard_map.run_spec.program, shard_map.run_spec.model_spec
    sliced = {unit for unit, names in spec.units.items() if not sliced_params(spec).keys().isdisjoint(names)}
    found, seen = [], set()
    for at, row in enumerate(program.rank_programs[: rank + 1]):
        for word in row.body:
            if isinstance(word, Collective) and word.tensor.name == "delayed_grad" and word.phase == "start":
                replica = word.group.index(at)
                key = (word.tensor.blocks, replica, row.tp_rank if word.tensor.blocks in sliced else 0)
                if at == rank:
                    found.append(DelayedGrad(word.tensor.blocks, replica, len(word.group), key not in seen))
                seen.add(key)
    return found


def collect_delayed_grads(shard_map: ShardMap, rank: RankRuntime) -> Iterator[TensorSlice]:
    """Yield what this rank writes into a checkpoint of the gradients that it has set aside."""
    me = rank.interpreter.fabric.rank
    row, sliced = shard_map.run_spec.program.rank_programs[me], sliced_params(shard_map.run_spec.model_spec)
    for aside in find_delayed_grads(shard_map, me):
        if not aside.is_first:
            continue
        for arena in rank.interpreter.store.units[aside.unit].flat_params:
            flat = arena.ensure_delayed_grad()
            for slot in arena.layout.slots:
                at = f"@{row.tp_rank}/{sliced[slot.name][1]}" if slot.name in sliced else ""
                name = f"delayed_grad:{slot.name}{at}~{aside.replica}/{aside.num_replicas}"
                yield TensorSlice(name, flat[slot.start : slot.stop].contiguous(), slot.shape, 0)


def restore_delayed_grads(
    shard_map: ShardMap, rank: RankRuntime, saved_replicas: int, read: Callable[[str, int], Tensor]
) -> None:
    """Set aside what was saved; where as many replicas are not there now, the first one gets the sum.

    Args:
        book: who answers for what.
        rank: this rank.
        saved_replicas: how many gradients of each parameter were saved.
        read: returns a replica's gradient of a parameter, in full.
    """
    me = rank.interpreter.fabric.rank
    row, sliced = shard_map.run_spec.program.rank_programs[me], sliced_params(shard_map.run_spec.model_spec)
    for aside in find_delayed_grads(shard_map, me):
        mine = [aside.replica] if aside.num_replicas == saved_replicas else range(saved_replicas)
        for arena in rank.interpreter.store.units[aside.unit].flat_params:
            arena.delayed_grad = None
            flat = arena.ensure_delayed_grad()
            if aside.num_replicas != saved_replicas and aside.replica > 0:
                continue
            for slot in arena.layout.slots:
                full = torch.stack([read(slot.name, replica) for replica in mine]).sum(0)
                local = take_slice(full, sliced.get(slot.name), (row.tp_rank, row.tp_degree))
                flat[slot.start : slot.stop].copy_(local.reshape(-1))


ERROR_FEEDBACK_KINDS = ("residual", "q_factor")


def error_feedback_key(rank: int, unit: Unit, index: int, group: Group) -> str:
    """Return how the place of one arena's residual is written."""
    return f"{rank}:{format_unit(unit)}/{index}@{format_group(group)}"


def collect_error_feedback(rank: RankRuntime) -> Iterator[TensorSlice]:
    """Yield what this rank writes into a checkpoint."""
    for place, arena, group in _error_feedback_slots(rank):
        left = arena.error_feedbacks.get(group)
        if left is None or left.residual is None:
            continue
        yield whole_tensor(f"residual@{place}", left.residual)
        for name, columns in left.q_factors.items():
            yield whole_tensor(f"q_factor@{place}:{name}", columns.contiguous())


def is_error_feedback(name: str) -> bool:
    """Tell whether an entry of a checkpoint is about what a code has not sent."""
    return name.split("@")[0] in ERROR_FEEDBACK_KINDS


def error_feedback_keys(shard_map: ShardMap) -> set[str]:
    """Return the places of all residuals that the plan's ranks have."""
    return {
        error_feedback_key(rank, unit, index, group)
        for rank, word in shard_map.run_spec.program.instructions()
        for unit, group in _error_feedback_groups(rank, word)
        for index, _ in enumerate(shard_map.layouts(unit))
    }


def _error_feedback_groups(rank: int, instruction: Instruction) -> Iterator[tuple[Unit, Group]]:
    """Yield the unit of which a word leaves something unsent, and to whom; nothing for most words."""
    match instruction:
        case Collective(_, value, group, codec=code) if code and find_codec(code).spec.has_error_feedback:
            yield value.blocks, group
        case Send(value, peer, code) | Push(value, peer, code) if code:
            yield value.blocks, peer_pair(peer, rank)
        case Forward() | Recompute() | Backward() | Collective() | Send() | Push() | Recv() | Pull() | ApplyPushes():
            pass
        case Commit() | Update() | SwapGradBuffers() | Free():
            pass


def restore_error_feedback(rank: RankRuntime, names: Iterable[str], read: Callable[[str], Tensor]) -> None:
    """Put what a checkpoint has of this rank's residuals where it was; the names are those that may be used."""
    for store in rank.interpreter.store.units.values():
        for arena in store.flat_params:
            arena.error_feedbacks.clear()
    known = {name for name in names if is_error_feedback(name)}
    for place, arena, group in _error_feedback_slots(rank):
        if f"residual@{place}" not in known:
            continue
        left = arena.error_feedback_for(group)
        left.residual = read(f"residual@{place}").clone()
        for slot in arena.layout.slots:
            if f"q_factor@{place}:{slot.name}" in known:
                left.q_factors[slot.name] = read(f"q_factor@{place}:{slot.name}").clone()


def _error_feedback_slots(rank: RankRuntime) -> Iterator[tuple[str, FlatParams, Group]]:
    """Yield where this rank's row may leave something behind: the place, the arena, the group."""
    interpreter = rank.interpreter
    me = interpreter.fabric.rank
    for unit, group in dict.fromkeys(
        found for word in interpreter.program.instructions for found in _error_feedback_groups(me, word)
    ):
        for index, arena in enumerate(interpreter.store.units[unit].flat_params):
            yield error_feedback_key(me, unit, index, group), arena, group
