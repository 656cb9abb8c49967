"""``allgather``, ``broadcast`` and ``alltoall`` in all their forms; gradients flow through those that wait."""

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
        """Return all members' rows of each tensor, one behind the other, ``(rows of all, ...)``."""
        ctx.named_group, ctx.lengths = named_group, [len(tensor) for tensor in tensors]
        return tuple(wait_tensors(collectives.all_gather(current_world(), tensors, named_group)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ANN401 - torch's own
        """Return the mean over the members of the gradient of what this rank gave, ``(own rows, ...)``."""
        world, among = current_world(), ctx.named_group
        place = among.group.index(world.fabric.rank)
        lengths = world.all_gather_ints("allgather lengths", among.name, ctx.lengths, among.group)
        starts = [sum(member[at] for member in lengths[:place]) for at in range(len(grads))]
        means = _average_grads(grads, among)
        return (
            None,
            *(mean.narrow(0, at, length) for mean, at, length in zip(means, starts, ctx.lengths, strict=True)),
        )


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, named_group: NamedGroup, root: int, tensor: Tensor) -> Tensor:  # noqa: ANN401 - torch's own
        """Return the root's numbers; the tensor stays as it is."""
        ctx.named_group, ctx.root = named_group, root
        return wait_tensor(collectives.broadcast(current_world(), clone_detached([tensor])[0], root, named_group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: ANN401 - torch's own
        """Return the mean of all members' gradients on the root, and zeros elsewhere."""
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
        """Return the rows that all members sent to this rank, and how many came from each."""
        result = wait_result(collectives.all_to_all(current_world(), tensor, splits, named_group))
        assert isinstance(result, tuple)
        ctx.named_group, ctx.splits = named_group, result[1].tolist()
        ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:  # noqa: ANN401 - torch's own
        """Return the gradient of what this rank sent, from those it went to."""
        result = wait_result(collectives.all_to_all(current_world(), grad, ctx.splits, ctx.named_group))
        assert isinstance(result, tuple)
        return None, None, result[0]


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Return all members' tensors, one behind the other along the first dim, in which they may differ.

    Raises:
        HorovodInternalError: they differ in something else, or another rank is gone or late.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Return all members' tensors, each list place by itself."""
    return list(_AllGather.apply(_named_group(name, process_set), *tensors))  # type: ignore[no-untyped-call]


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> HorovodHandle:
    """Return the handle of an allgather; it waits here until all members have told the shapes of their tensors."""
    return grouped_allgather_async([tensor], name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> HorovodHandle:
    """Return the handle of an allgather of several tensors."""
    return collectives.all_gather(current_world(), tensors, _named_group(name, process_set))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the root's tensor; this rank's stays as it is."""
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
    """Return the tensor, which holds the root's numbers."""
    wait_result(broadcast_async_(tensor, root_rank, name, process_set))
    return tensor


def _resolve_splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, named_group: NamedGroup) -> list[int]:
    if splits is not None:
        return splits.tolist() if isinstance(splits, Tensor) else list(splits)
    each, left = divmod(len(tensor), len(named_group.group))
    if left:
        raise PlanError(
            f"alltoall of {named_group.name}: {len(tensor)} rows cannot be split evenly among {len(named_group.group)} ranks; "
            "give splits, one count per rank"
        )
    return [each] * len(named_group.group)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:  # noqa: ANN401 - a tensor, or two
    """Return the rows that all members send to this one; where splits are given, also how many each has sent.

    Args:
        tensor: rows for all members, in their order; all but the first dim are the same everywhere.
        splits: how many rows go to each; evenly many where left out.
        name: for errors and the timeline.
        process_set: who takes part.

    Raises:
        HorovodInternalError: the tensors do not fit, or another rank is gone or late.
        PlanError: the splits do not cut the tensor.
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
    """Return the handle of an alltoall, whose result is the rows and how many each has sent.

    It waits here until all members have told how they split.
    """
    among = _named_group(name, process_set)
    return collectives.all_to_all(current_world(), tensor, _resolve_splits(tensor, splits, among), among)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: ReductionOp, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Return what ``synchronize`` takes: all members' entries of a sparse tensor together, or their mean.

    Args:
        tensor: in coordinate form.
        name: for errors and the timeline.
        op: Sum or Average.
        process_set: who takes part.
    """
    among = _named_group(name, process_set)
    given = tensor.coalesce()
    parts = [given.indices().T.contiguous(), given.values()]
    starting = collectives.all_gather(current_world(), parts, among)

    def gathered() -> Tensor:
        indices, values = wait_tensors(starting)
        if op == ReductionOp.AVERAGE:
            values = values / len(among.group)
        return torch.sparse_coo_tensor(indices.T, values, tensor.shape, check_invariants=False)

    return gathered
