"""Horovod's operations as collectives of the fabric: copies before, collectives started, copies after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

from counterpoint.compat.horovod.errors import HorovodInternalError
from counterpoint.compat.horovod.handles import HorovodHandle, JoinableCollective, OpRequest, Result
from counterpoint.compat.horovod.reductions import ScaledReduction, reduce_rows, scale_in_place
from counterpoint.compat.horovod.world import HorovodWorld
from counterpoint.errors import PlanError
from counterpoint.fabric.fabric import Group, Work
from counterpoint.fabric.fingerprint import dtype_name
from counterpoint.fabric.torch_backend.collectives import TorchReduction

MAX_DIMS = 16
DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class NamedGroup:
    """Name of an operation, and its members.

    Args:
        name: of the tensor, the same on all members.
        group: ranks of the members.
    """

    name: str
    group: Group


@dataclass(frozen=True, slots=True)
class FusedTensors:
    """Tensors of one dtype that are reduced in one buffer.

    Args:
        indices: of the tensors in their list.
        buffer: their values, concatenated, or the only tensor itself.
        reduction: of the fabric; None for Adasum.
        collective: of the fabric.
        rows: one per rank, if the fabric cannot do the reduction; None otherwise.
    """

    indices: list[int]
    buffer: Tensor
    reduction: TorchReduction | None
    collective: JoinableCollective
    rows: Tensor | None


def all_reduce(
    world: HorovodWorld, outputs: Sequence[Tensor], named_group: NamedGroup, reduce: ScaledReduction
) -> HorovodHandle:
    """Start to reduce the tensors in place over all members; tensors of one dtype are fused.

    Args:
        world: of this rank.
        outputs: detached; they hold this rank's values.
        named_group: name and members.
        reduce: reduction and factors.
    """
    fused = [_fuse(world, outputs, indices, named_group, reduce) for indices in _by_dtype(outputs)]
    kind = "allreduce" if len(outputs) == 1 else "grouped_allreduce"
    request = OpRequest(
        kind, named_group.name, named_group.group, tuple(group_of_tensors.collective for group_of_tensors in fused)
    )

    def finish() -> Result:
        for group_of_tensors in fused:
            _unfuse(group_of_tensors, outputs, reduce, len(named_group.group))
        return outputs[0] if len(outputs) == 1 else list(outputs)

    return world.start(
        request, lambda: [_reduce(world, group_of_tensors, named_group.group) for group_of_tensors in fused], finish
    )


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    indices_by_dtype: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        indices_by_dtype.setdefault(tensor.dtype, []).append(index)
    return list(indices_by_dtype.values())


def _fuse(
    world: HorovodWorld, outputs: Sequence[Tensor], indices: list[int], named_group: NamedGroup, reduce: ScaledReduction
) -> FusedTensors:
    tensors = [outputs[index] for index in indices]
    dtype = tensors[0].dtype
    reduction = reduce.fabric_reduction(dtype)
    compute_dtype = dtype if reduction is None else reduction.compute_dtype
    is_unfused = len(tensors) == 1 and tensors[0].dtype == compute_dtype
    buffer = tensors[0] if is_unfused else torch.cat([tensor.reshape(-1) for tensor in tensors]).to(compute_dtype)
    scale_in_place(buffer, reduce.prescale)
    if reduction is not None and reduction.combine is None:
        return FusedTensors(
            indices, buffer, reduction, describe_collective(reduction.op, named_group.name, buffer), None
        )
    buffer = buffer.reshape(-1)
    rows = buffer.new_empty(len(named_group.group), buffer.numel())
    rows[named_group.group.index(world.fabric.rank)] = buffer
    suffix = "Adasum" if reduction is None else "Product"
    return FusedTensors(
        indices, buffer, reduction, describe_collective("gather", f"{named_group.name} for {suffix}", buffer), rows
    )


def describe_collective(op: str, label: str, tensor: Tensor) -> JoinableCollective:
    """Return a description of a collective that ranks without data can take part in."""
    return JoinableCollective(op, label, dtype_name(tensor.dtype), tuple(tensor.shape))  # type: ignore[arg-type]  # a reduction or gather


def _reduce(world: HorovodWorld, fused: FusedTensors, group: Group) -> Work:
    collective = fused.collective
    if fused.rows is not None:
        bounds = [fused.buffer.numel() * index for index in range(len(group) + 1)]
        return world.fabric.all_gather(collective.label, fused.rows.view(-1), bounds, group)
    assert collective.op != "gather"
    return world.fabric.all_reduce(collective.label, fused.buffer, group, collective.op)


def _unfuse(fused: FusedTensors, outputs: Sequence[Tensor], reduce: ScaledReduction, num_ranks: int) -> None:
    tensors = [outputs[index] for index in fused.indices]
    sizes = [tensor.numel() for tensor in tensors]
    reduced = fused.buffer
    if fused.rows is not None:
        reduced = reduce_rows(fused.rows, fused.reduction, sizes)
    if fused.reduction is not None:
        reduced = fused.reduction.finalize(reduced, num_ranks, tensors[0].dtype)
    scale_in_place(reduced, reduce.postscale)
    if reduced is not tensors[0]:
        for tensor, part in zip(tensors, torch.split(reduced.reshape(-1), sizes), strict=True):
            tensor.copy_(part.view(tensor.shape))


def all_gather(world: HorovodWorld, tensors: Sequence[Tensor], named_group: NamedGroup) -> HorovodHandle:
    """Start to concatenate every member's tensors along their first dim; the shapes are exchanged synchronously.

    Raises:
        HorovodInternalError: the members' tensors differ in more than their first dim.
        PlanError: a tensor has no dims.
    """
    shapes = _exchange_shapes(world, "allgather", tensors, named_group)
    position = named_group.group.index(world.fabric.rank)
    buffers: list[Tensor] = []
    bounds_by_tensor: list[list[int]] = []
    for index, tensor in enumerate(tensors):
        row_numel = prod(tensor.shape[1:])
        bounds = [0, *accumulate(member[index][0] * row_numel for member in shapes)]
        buffer = tensor.new_empty(bounds[-1])
        buffer[bounds[position] : bounds[position + 1]] = tensor.detach().reshape(-1)
        buffers.append(buffer)
        bounds_by_tensor.append(bounds)

    def works() -> list[Work]:
        return [
            world.fabric.all_gather(label, buffer, bounds, named_group.group)
            for label, buffer, bounds in zip(
                _tensor_labels(named_group.name, len(buffers)), buffers, bounds_by_tensor, strict=True
            )
        ]

    def finish() -> Result:
        results = [
            buffer.view(sum(member[index][0] for member in shapes), *tensors[index].shape[1:])
            for index, buffer in enumerate(buffers)
        ]
        return results[0] if len(results) == 1 else results

    return world.start(OpRequest("allgather", named_group.name, named_group.group), works, finish)


def _tensor_labels(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name} {index}" for index in range(count)]


def _exchange_shapes(
    world: HorovodWorld, operation: str, tensors: Sequence[Tensor], named_group: NamedGroup
) -> list[list[list[int]]]:
    """Return every member's shapes, after checking that they match."""
    local: list[int] = []
    for tensor in tensors:
        if not 1 <= tensor.dim() <= MAX_DIMS or tensor.dtype not in DTYPES:
            raise PlanError(
                f"{operation} of {named_group.name}, {tensor.dtype} with shape {tuple(tensor.shape)}: a tensor needs 1 "
                "to "
                f"{MAX_DIMS} dims and a supported dtype: reshape or convert it"
            )
        shape = list(tensor.shape)
        local += [DTYPES.index(tensor.dtype), len(shape), *shape, *[0] * (MAX_DIMS - len(shape))]
    encoded_by_member = world.all_gather_ints(f"{operation} shapes", named_group.name, local, named_group.group)
    width = MAX_DIMS + 2
    descriptions = [
        [(row[offset], row[offset + 2 : offset + 2 + row[offset + 1]]) for offset in range(0, len(row), width)]
        for row in encoded_by_member
    ]
    for index in range(len(tensors)):
        for member, other in zip(named_group.group, descriptions, strict=True):
            _check_shapes_match(
                operation, named_group, (named_group.group[0], descriptions[0][index]), (member, other[index])
            )
    return [[shape for _, shape in member] for member in descriptions]


def _check_shapes_match(
    operation: str,
    named_group: NamedGroup,
    first: tuple[int, tuple[int, list[int]]],
    other: tuple[int, tuple[int, list[int]]],
) -> None:
    (rank, (dtype_index, shape)), (other_rank, (other_dtype_index, other_shape)) = first, other
    if (dtype_index, shape[1:], len(shape)) != (other_dtype_index, other_shape[1:], len(other_shape)):
        raise HorovodInternalError(
            f"{operation} of {named_group.name}: rank {rank} has {DTYPES[dtype_index]} of shape {tuple(shape)}, rank "
            f"{other_rank} has "
            f"{DTYPES[other_dtype_index]} of shape {tuple(other_shape)}; they may differ in their first dim only: "
            "reshape or "
            "convert one of them; no tensor was changed"
        )


def broadcast(world: HorovodWorld, output: Tensor, root: int, named_group: NamedGroup) -> HorovodHandle:
    """Start to replace the tensor by the root's."""
    check_member(f"broadcast of {named_group.name}", root, named_group.group)
    work = lambda: [world.fabric.broadcast(named_group.name, output, named_group.group, root)]  # noqa: E731
    return world.start(OpRequest("broadcast", named_group.name, named_group.group), work, lambda: output)


def check_member(call: str, root: int, group: Group) -> None:
    """Check that the root is a member.

    Raises:
        PlanError: it is not.
    """
    if root not in group:
        raise PlanError(
            f"{call}: root_rank is {root}, but the members are {list(group)}; the root must be a global rank and "
            "a member of the process set: give one of them"
        )


def all_to_all(world: HorovodWorld, tensor: Tensor, splits: Sequence[int], named_group: NamedGroup) -> HorovodHandle:
    """Start to send every member its rows; the result is the received rows, and how many each member sent.

    Raises:
        HorovodInternalError: the members' tensors differ in more than their first dim.
        PlanError: the number of splits or their sum is wrong.
    """
    if len(splits) != len(named_group.group) or min(splits, default=0) < 0 or sum(splits) != len(tensor):
        raise PlanError(
            f"alltoall of {named_group.name}: splits {list(splits)} do not split {len(tensor)} rows for "
            f"{len(named_group.group)} "
            "ranks; give one count per rank, at least 0, whose sum is the number of rows"
        )
    _exchange_shapes(world, "alltoall", [tensor], named_group)
    splits_by_member = world.all_gather_ints("alltoall splits", named_group.name, splits, named_group.group)
    row_numel, position = prod(tensor.shape[1:]), named_group.group.index(world.fabric.rank)
    counts = [[number * row_numel for number in member_splits] for member_splits in splits_by_member]
    received: list[Tensor] = []

    def works() -> list[Work]:
        whole = tensor.detach().reshape(-1)
        result, work = world.fabric.all_to_all(named_group.name, whole, counts, named_group.group)
        received.append(result)
        return [work]

    def finish() -> Result:
        received_splits = torch.tensor(
            [member_splits[position] for member_splits in splits_by_member], dtype=torch.int32
        )
        return received[0].view(int(received_splits.sum()), *tensor.shape[1:]), received_splits

    return world.start(OpRequest("alltoall", named_group.name, named_group.group), works, finish)


def reduce_scatter(
    world: HorovodWorld, tensors: Sequence[Tensor], named_group: NamedGroup, reduce: ScaledReduction
) -> HorovodHandle:
    """Start to reduce the tensors and give each member its rows; the first members get one more if they do not divide.

    Raises:
        PlanError: the reduction is Adasum or Product, or a tensor has no dims.
    """
    for tensor in tensors:
        reduction = reduce.fabric_reduction(tensor.dtype)
        if reduction is None or reduction.combine is not None or tensor.dim() == 0:
            raise PlanError(
                f"reducescatter of {named_group.name} with op={reduce.op.name} and shape {tuple(tensor.shape)}: it "
                "needs a "
                "first dim to split, and Average, Sum, Min or Max; use allreduce and select your rows"
            )
    finishes: list[Callable[[], Tensor]] = []
    starts = [
        _reduce_scatter(world, tensor, NamedGroup(label, named_group.group), reduce, finishes)
        for label, tensor in zip(_tensor_labels(named_group.name, len(tensors)), tensors, strict=True)
    ]

    def finish() -> Result:
        results = [step() for step in finishes]
        return results[0] if len(results) == 1 else results

    return world.start(
        OpRequest("reducescatter", named_group.name, named_group.group), lambda: [step() for step in starts], finish
    )


def _reduce_scatter(
    world: HorovodWorld,
    tensor: Tensor,
    named_group: NamedGroup,
    reduce: ScaledReduction,
    finishes: list[Callable[[], Tensor]],
) -> Callable[[], Work]:
    """Return the function that starts it; append the function that finishes it to ``finishes``."""
    reduction = reduce.fabric_reduction(tensor.dtype)
    assert reduction is not None
    num_ranks, position, row_numel = (
        len(named_group.group),
        named_group.group.index(world.fabric.rank),
        prod(tensor.shape[1:]),
    )
    num_rows, num_longer = divmod(len(tensor), num_ranks)
    bounds = [0, *accumulate((num_rows + (member < num_longer)) * row_numel for member in range(num_ranks))]
    buffer = tensor.detach().to(reduction.compute_dtype, copy=True).reshape(-1)
    scale_in_place(buffer, reduce.prescale)
    start, stop = list(pairwise(bounds))[position]

    def finish() -> Tensor:
        part = reduction.finalize(buffer[start:stop], num_ranks, tensor.dtype).clone()
        scale_in_place(part, reduce.postscale)
        return part.view(num_rows + (position < num_longer), *tensor.shape[1:])

    finishes.append(finish)
    return lambda: world.fabric.reduce_scatter(named_group.name, buffer, bounds, named_group.group, reduction.op)
