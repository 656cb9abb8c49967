"""``allgather``, ``broadcast`` and ``alltoall`` in all their forms; the synchronous ones are differentiable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from counterpoint.compat.horovod import collectives
from counterpoint.compat.horovod.collectives import NamedGroup
from counterpoint.compat.horovod.handles import HorovodHandle
from counterpoint.compat.horovod.process_sets import ProcessSet, global_process_set, member_group
from counterpoint.compat.horovod.reduce_ops import UNNAMED, clone_detached
from counterpoint.compat.horovod.reductions import ReductionOp, ScaledReduction
from counterpoint.compat.horovod.synchronize import wait_result, wait_tensor, wait_tensors
from counterpoint.compat.horovod.world import current_world
from counterpoint.errors import PlanError


def _named_group(name: str | None, process_set: ProcessSet) -> NamedGroup:
    return NamedGroup(name or UNNAMED, member_group(process_set))


def _average_grads(grads: Sequence[Tensor], named_group: NamedGroup) -> list[Tensor]:
    return wait_tensors(
        collectives.all_reduce(
            current_world(), clone_detached(grads), named_group, ScaledReduction(ReductionOp.AVERAGE)
        )
    )


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, named_group: NamedGroup, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401 - torch's own
        """Return the concatenated rows of all members for each tensor, ``(rows of all, ...)``."""
        ctx.named_group, ctx.lengths = named_group, [len(tensor) for tensor in tensors]
        return tuple(wait_tensors(collectives.all_gather(current_world(), tensors, named_group)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ANN401 - torch's own
        """Return the mean over the members of the gradient of this rank's rows, ``(own rows, ...)``."""
        world, among = current_world(), ctx.named_group
        position = among.group.index(world.fabric.rank)
        lengths = world.all_gather_ints("allgather lengths", among.name, ctx.lengths, among.group)
        starts = [sum(member[index] for member in lengths[:position]) for index in range(len(grads))]
        means = _average_grads(grads, among)
        return (
            None,
            *(mean.narrow(0, index, length) for mean, index, length in zip(means, starts, ctx.lengths, strict=True)),
        )


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, named_group: NamedGroup, root: int, tensor: Tensor) -> Tensor:  # noqa: ANN401 - torch's own
        """Return the root's values; the tensor is not changed."""
        ctx.named_group, ctx.root = named_group, root
        return wait_tensor(collectives.broadcast(current_world(), clone_detached([tensor])[0], root, named_group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: ANN401 - torch's own
        """Return the mean of all members' gradients on the root, and zeros on the others."""
        (mean,) = _average_grads([grad], ctx.named_group)
        return None, None, mean if current_world().fabric.rank == ctx.root else torch.zeros_like(mean)


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        named_group: NamedGroup,
        splits: Sequence[int],
        tensor: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the rows that all members sent to this rank, and how many each sent."""
        result = wait_result(collectives.all_to_all(current_world(), tensor, splits, named_group))
        assert isinstance(result, tuple)
        ctx.named_group, ctx.splits = named_group, result[1].tolist()
        ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:  # noqa: ANN401 - torch's own
        """Return the gradient of the rows that this rank sent."""
        result = wait_result(collectives.all_to_all(current_world(), grad, ctx.splits, ctx.named_group))
        assert isinstance(result, tuple)
        return None, None, result[0]


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Return all members' tensors, concatenated along the first dim, in which they may differ.

    Raises:
        HorovodInternalError: they differ in other dims or dtype, or another rank has exited or is late.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Return all members' tensors, concatenated for each position of the list."""
    return list(_AllGather.apply(_named_group(name, process_set), *tensors))  # type: ignore[no-untyped-call]


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> HorovodHandle:
    """Return the handle of an allgather; the shapes are exchanged before it returns."""
    return grouped_allgather_async([tensor], name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> HorovodHandle:
    """Return the handle of an allgather of several tensors."""
    return collectives.all_gather(current_world(), tensors, _named_group(name, process_set))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the root's tensor; this rank's tensor is not changed."""
    result: Tensor = _Broadcast.apply(_named_group(name, process_set), root_rank, tensor)  # type: ignore[no-untyped-call]
    return result


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> HorovodHandle:
    """Return the handle of a broadcast into a new tensor."""
    return collectives.broadcast(
        current_world(), clone_detached([tensor])[0], root_rank, _named_group(name, process_set)
    )


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> HorovodHandle:
    """Return the handle of a broadcast into the tensor itself."""
    return collectives.broadcast(current_world(), tensor.detach(), root_rank, _named_group(name, process_set))


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Broadcast into the tensor itself, and return it."""
    wait_result(broadcast_async_(tensor, root_rank, name, process_set))
    return tensor


def _resolve_splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, named_group: NamedGroup) -> list[int]:
    if splits is not None:
        return splits.tolist() if isinstance(splits, Tensor) else list(splits)
    num_rows, remainder = divmod(len(tensor), len(named_group.group))
    if remainder:
        raise PlanError(
            f"alltoall of {named_group.name}: {len(tensor)} rows cannot be split evenly among {len(named_group.group)} "
            "ranks; "
            "give splits, one count per rank"
        )
    return [num_rows] * len(named_group.group)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:  # noqa: ANN401 - a tensor, or two
    """Return the rows that all members send to this rank; if splits are given, also how many each sent.

    Args:
        tensor: rows for all members, in their order; the other dims are the same on all members.
        splits: number of rows for each member; equal by default.
        name: for errors and the timeline.
        process_set: members.

    Raises:
        HorovodInternalError: the tensors do not match, or another rank has exited or is late.
        PlanError: the splits do not match the tensor.
    """
    among = _named_group(name, process_set)
    rows, received = _AllToAll.apply(among, _resolve_splits(tensor, splits, among), tensor)  # type: ignore[no-untyped-call]
    return rows if splits is None else (rows, received)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> HorovodHandle:
    """Return the handle of an alltoall, whose result is the rows and how many each member sent.

    The splits are exchanged before it returns.
    """
    among = _named_group(name, process_set)
    return collectives.all_to_all(current_world(), tensor, _resolve_splits(tensor, splits, among), among)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: ReductionOp, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Return a function for ``synchronize`` that returns the sum or mean of all members' sparse tensors.

    Args:
        tensor: in COO format.
        name: for errors and the timeline.
        op: Sum or Average.
        process_set: members.
    """
    among = _named_group(name, process_set)
    coalesced = tensor.coalesce()
    parts = [coalesced.indices().T.contiguous(), coalesced.values()]
    handle = collectives.all_gather(current_world(), parts, among)

    def wait_sparse() -> Tensor:
        indices, values = wait_tensors(handle)
        if op == ReductionOp.AVERAGE:
            values = values / len(among.group)
        return torch.sparse_coo_tensor(indices.T, values, tensor.shape, check_invariants=False)

    return wait_sparse
