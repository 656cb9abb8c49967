"""Operations in the words of the fabric: what is copied before, what is started, and what is copied then."""

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
    """Which tensor it is, and among whom.

    Args:
        name: of the tensor, the same on all members.
        group: the members.
    """

    name: str
    group: Group


@dataclass(frozen=True, slots=True)
class FusedTensors:
    """Tensors of one dtype that travel as one.

    Args:
        places: of the tensors in their list.
        buffer: their numbers, back to back, or the only tensor itself.
        reduction: of the fabric; None for Adasum.
        part: what the fabric is asked for.
        rows: one per rank, where the fabric cannot reduce; None where it can.
    """

    indices: list[int]
    buffer: Tensor
    reduction: TorchReduction | None
    collective: JoinableCollective
    rows: Tensor | None


def all_reduce(
    world: HorovodWorld, outputs: Sequence[Tensor], named_group: NamedGroup, reduce: ScaledReduction
) -> HorovodHandle:
    """Start to replace the tensors by what becomes of all members' tensors; several of one dtype travel as one.

    Args:
        world: of this rank.
        outputs: detached; they hold this rank's numbers.
        among: whom, and under which name.
        reduce: how.
    """
    fused = [_fuse(world, outputs, places, named_group, reduce) for places in _by_dtype(outputs)]
    kind = "allreduce" if len(outputs) == 1 else "grouped_allreduce"
    call = OpRequest(kind, named_group.name, named_group.group, tuple(each.collective for each in fused))

    def finish() -> Result:
        for each in fused:
            _unfuse(each, outputs, reduce, len(named_group.group))
        return outputs[0] if len(outputs) == 1 else list(outputs)

    return world.start(call, lambda: [_reduce(world, each, named_group.group) for each in fused], finish)


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    places: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(place)
    return list(places.values())


def _fuse(
    world: HorovodWorld, outputs: Sequence[Tensor], indices: list[int], named_group: NamedGroup, reduce: ScaledReduction
) -> FusedTensors:
    tensors = [outputs[place] for place in indices]
    dtype = tensors[0].dtype
    reduction = reduce.fabric_reduction(dtype)
    through = dtype if reduction is None else reduction.compute_dtype
    is_one = len(tensors) == 1 and tensors[0].dtype == through
    buffer = tensors[0] if is_one else torch.cat([tensor.reshape(-1) for tensor in tensors]).to(through)
    scale_in_place(buffer, reduce.prescale)
    if reduction is not None and reduction.combine is None:
        return FusedTensors(
            indices, buffer, reduction, describe_collective(reduction.op, named_group.name, buffer), None
        )
    buffer = buffer.reshape(-1)
    rows = buffer.new_empty(len(named_group.group), buffer.numel())
    rows[named_group.group.index(world.fabric.rank)] = buffer
    how = "Adasum" if reduction is None else "Product"
    return FusedTensors(
        indices, buffer, reduction, describe_collective("gather", f"{named_group.name} for {how}", buffer), rows
    )


def describe_collective(op: str, label: str, tensor: Tensor) -> JoinableCollective:
    """Return what the fabric is asked for, small enough to travel."""
    return JoinableCollective(op, label, dtype_name(tensor.dtype), tuple(tensor.shape))  # type: ignore[arg-type]  # a verb, or gather


def _reduce(world: HorovodWorld, fused: FusedTensors, group: Group) -> Work:
    part = fused.collective
    if fused.rows is not None:
        bounds = [fused.buffer.numel() * place for place in range(len(group) + 1)]
        return world.fabric.all_gather(part.label, fused.rows.view(-1), bounds, group)
    assert part.op != "gather"
    return world.fabric.all_reduce(part.label, fused.buffer, group, part.op)


def _unfuse(fused: FusedTensors, outputs: Sequence[Tensor], reduce: ScaledReduction, num_ranks: int) -> None:
    tensors = [outputs[place] for place in fused.indices]
    sizes = [tensor.numel() for tensor in tensors]
    whole = fused.buffer
    if fused.rows is not None:
        whole = reduce_rows(fused.rows, fused.reduction, sizes)
    if fused.reduction is not None:
        whole = fused.reduction.finalize(whole, num_ranks, tensors[0].dtype)
    scale_in_place(whole, reduce.postscale)
    if whole is not tensors[0]:
        for tensor, piece in zip(tensors, torch.split(whole.reshape(-1), sizes), strict=True):
            tensor.copy_(piece.view(tensor.shape))


def all_gather(world: HorovodWorld, tensors: Sequence[Tensor], named_group: NamedGroup) -> HorovodHandle:
    """Start to collect every member's tensors, along their first dim; the shapes of all are here already.

    Raises:
        HorovodInternalError: the members' tensors differ in more than their first dim.
        PlanError: a tensor has no dims.
    """
    told = _exchange_shapes(world, "allgather", tensors, named_group)
    place = named_group.group.index(world.fabric.rank)
    wholes: list[Tensor] = []
    edges: list[list[int]] = []
    for index, tensor in enumerate(tensors):
        row = prod(tensor.shape[1:])
        bounds = [0, *accumulate(member[index][0] * row for member in told)]
        whole = tensor.new_empty(bounds[-1])
        whole[bounds[place] : bounds[place + 1]] = tensor.detach().reshape(-1)
        wholes.append(whole)
        edges.append(bounds)

    def works() -> list[Work]:
        return [
            world.fabric.all_gather(label, whole, bounds, named_group.group)
            for label, whole, bounds in zip(_tensor_labels(named_group.name, len(wholes)), wholes, edges, strict=True)
        ]

    def finish() -> Result:
        results = [
            whole.view(sum(member[index][0] for member in told), *tensors[index].shape[1:])
            for index, whole in enumerate(wholes)
        ]
        return results[0] if len(results) == 1 else results

    return world.start(OpRequest("allgather", named_group.name, named_group.group), works, finish)


def _tensor_labels(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name} {index}" for index in range(count)]


def _exchange_shapes(
    world: HorovodWorld, what: str, tensors: Sequence[Tensor], named_group: NamedGroup
) -> list[list[list[int]]]:
    """Return every member's shapes, which fit together."""
    own: list[int] = []
    for tensor in tensors:
        if not 1 <= tensor.dim() <= MAX_DIMS or tensor.dtype not in DTYPES:
            raise PlanError(
                f"{what} of {named_group.name}, {tensor.dtype} with shape {tuple(tensor.shape)}: a tensor needs 1 to "
                f"{MAX_DIMS} dims, and numbers of a size that all ranks know: reshape or convert it"
            )
        shape = list(tensor.shape)
        own += [DTYPES.index(tensor.dtype), len(shape), *shape, *[0] * (MAX_DIMS - len(shape))]
    told = world.all_gather_ints(f"{what} shapes", named_group.name, own, named_group.group)
    width = MAX_DIMS + 2
    looks = [[(row[at], row[at + 2 : at + 2 + row[at + 1]]) for at in range(0, len(row), width)] for row in told]
    for index in range(len(tensors)):
        for member, other in zip(named_group.group, looks, strict=True):
            _check_shapes_match(what, named_group, (named_group.group[0], looks[0][index]), (member, other[index]))
    return [[shape for _, shape in member] for member in looks]


def _check_shapes_match(
    what: str,
    named_group: NamedGroup,
    first: tuple[int, tuple[int, list[int]]],
    other: tuple[int, tuple[int, list[int]]],
) -> None:
    (one, (code, shape)), (two, (other_code, other_shape)) = first, other
    if (code, shape[1:], len(shape)) != (other_code, other_shape[1:], len(other_shape)):
        raise HorovodInternalError(
            f"{what} of {named_group.name}: rank {one} has {DTYPES[code]} of shape {tuple(shape)}, rank {two} has "
            f"{DTYPES[other_code]} of shape {tuple(other_shape)}; they may differ in their first dim only: reshape or "
            "convert one of them; nothing was copied"
        )


def broadcast(world: HorovodWorld, output: Tensor, root: int, named_group: NamedGroup) -> HorovodHandle:
    """Start to replace the tensor by the root's."""
    check_member(f"broadcast of {named_group.name}", root, named_group.group)
    work = lambda: [world.fabric.broadcast(named_group.name, output, named_group.group, root)]  # noqa: E731
    return world.start(OpRequest("broadcast", named_group.name, named_group.group), work, lambda: output)


def check_member(what: str, root: int, group: Group) -> None:
    """The root is one of the members.

    Raises:
        PlanError: it is not.
    """
    if root not in group:
        raise PlanError(
            f"{what}: root_rank is {root}, but the members are {list(group)}; the root is a rank of the whole job and "
            "a member of the process set: give one of them"
        )


def all_to_all(world: HorovodWorld, tensor: Tensor, splits: Sequence[int], named_group: NamedGroup) -> HorovodHandle:
    """Start to send every member its rows; the result is what they send, and how many rows each sends.

    Raises:
        HorovodInternalError: the members' tensors differ in more than their first dim.
        PlanError: the splits are not one per member, or do not add up to the rows of the tensor.
    """
    if len(splits) != len(named_group.group) or min(splits, default=0) < 0 or sum(splits) != len(tensor):
        raise PlanError(
            f"alltoall of {named_group.name}: splits {list(splits)} do not cut {len(tensor)} rows for {len(named_group.group)} "
            "ranks; give one count per rank, from 0, that add up to the rows"
        )
    _exchange_shapes(world, "alltoall", [tensor], named_group)
    table = world.all_gather_ints("alltoall splits", named_group.name, splits, named_group.group)
    row, place = prod(tensor.shape[1:]), named_group.group.index(world.fabric.rank)
    counts = [[number * row for number in each] for each in table]
    received: list[Tensor] = []

    def works() -> list[Work]:
        whole = tensor.detach().reshape(-1)
        result, work = world.fabric.all_to_all(named_group.name, whole, counts, named_group.group)
        received.append(result)
        return [work]

    def finish() -> Result:
        theirs = torch.tensor([each[place] for each in table], dtype=torch.int32)
        return received[0].view(int(theirs.sum()), *tensor.shape[1:]), theirs

    return world.start(OpRequest("alltoall", named_group.name, named_group.group), works, finish)


def reduce_scatter(
    world: HorovodWorld, tensors: Sequence[Tensor], named_group: NamedGroup, reduce: ScaledReduction
) -> HorovodHandle:
    """Start to reduce the tensors and to give each member its rows: the first members one more where they do not fit.

    Raises:
        PlanError: the reduction is Adasum or Product, or a tensor has no dims.
    """
    for tensor in tensors:
        reduction = reduce.fabric_reduction(tensor.dtype)
        if reduction is None or reduction.combine is not None or tensor.dim() == 0:
            raise PlanError(
                f"reducescatter of {named_group.name} with op={reduce.op.name} and shape {tuple(tensor.shape)}: it needs a "
                "first dim to cut, and Average, Sum, Min or Max; use allreduce and take your part"
            )
    finishes: list[Callable[[], Tensor]] = []
    starts = [
        _reduce_scatter(world, tensor, NamedGroup(label, named_group.group), reduce, finishes)
        for label, tensor in zip(_tensor_labels(named_group.name, len(tensors)), tensors, strict=True)
    ]

    def finish() -> Result:
        results = [each() for each in finishes]
        return results[0] if len(results) == 1 else results

    return world.start(
        OpRequest("reducescatter", named_group.name, named_group.group), lambda: [each() for each in starts], finish
    )


def _reduce_scatter(
    world: HorovodWorld,
    tensor: Tensor,
    named_group: NamedGroup,
    reduce: ScaledReduction,
    finishes: list[Callable[[], Tensor]],
) -> Callable[[], Work]:
    """Return what starts it; what finishes it is added to the list."""
    reduction = reduce.fabric_reduction(tensor.dtype)
    assert reduction is not None
    num_ranks, place, row = len(named_group.group), named_group.group.index(world.fabric.rank), prod(tensor.shape[1:])
    each, more = divmod(len(tensor), num_ranks)
    bounds = [0, *accumulate((each + (member < more)) * row for member in range(num_ranks))]
    buffer = tensor.detach().to(reduction.compute_dtype, copy=True).reshape(-1)
    scale_in_place(buffer, reduce.prescale)
    start, stop = list(pairwise(bounds))[place]

    def finish() -> Tensor:
        part = reduction.finalize(buffer[start:stop], num_ranks, tensor.dtype).clone()
        scale_in_place(part, reduce.postscale)
        return part.view(each + (place < more), *tensor.shape[1:])

    finishes.append(finish)
    return lambda: world.fabric.reduce_scatter(named_group.name, buffer, bounds, named_group.group, reduction.op)
