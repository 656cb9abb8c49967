"""``allgather``, ``broadcast`` and ``alltoall`` in all their forms; gradients flow through those that wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from counterpoint.compat.horovod import collectives
from counterpoint.compat.horovod.collectives import Among
from counterpoint.compat.horovod.handles import Pending
from counterpoint.compat.horovod.rank_sets import RankSet, global_process_set, member_of
from counterpoint.compat.horovod.reducing import UNNAMED, copies
from counterpoint.compat.horovod.reductions import Op, Reduce
from counterpoint.compat.horovod.waiting import finish, finish_list, finish_one
from counterpoint.compat.horovod.world import the_world
from counterpoint.errors import PlanError


def _among(name: str | None, process_set: RankSet) -> Among:
    return Among(name or UNNAMED, member_of(process_set))


def _mean(grads: Sequence[Tensor], among: Among) -> list[Tensor]:
    return finish_list(collectives.all_reduce(the_world(), copies(grads), among, Reduce(Op.AVERAGE)))


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, among: Among, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401 - torch's own
        """Return all members' rows of each tensor, one behind the other, ``(rows of all, ...)``."""
        ctx.among, ctx.lengths = among, [len(tensor) for tensor in tensors]
        return tuple(finish_list(collectives.all_gather(the_world(), tensors, among)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ANN401 - torch's own
        """Return the mean over the members of the gradient of what this rank gave, ``(own rows, ...)``."""
        world, among = the_world(), ctx.among
        place = among.group.index(world.fabric.rank)
        lengths = world.numbers("allgather lengths", among.name, ctx.lengths, among.group)
        starts = [sum(member[at] for member in lengths[:place]) for at in range(len(grads))]
        means = _mean(grads, among)
        return (
            None,
            *(mean.narrow(0, at, length) for mean, at, length in zip(means, starts, ctx.lengths, strict=True)),
        )


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, among: Among, root: int, tensor: Tensor) -> Tensor:  # noqa: ANN401 - torch's own
        """Return the root's numbers; the tensor stays as it is."""
        ctx.among, ctx.root = among, root
        return finish_one(collectives.broadcast(the_world(), copies([tensor])[0], root, among))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # noqa: ANN401 - torch's own
        """Return the mean of all members' gradients on the root, and zeros elsewhere."""
        (mean,) = _mean([grad], ctx.among)
        return None, None, mean if the_world().fabric.rank == ctx.root else torch.zeros_like(mean)


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        among: Among,
        splits: Sequence[int],
        tensor: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the rows that all members sent to this rank, and how many came from each."""
        result = finish(collectives.all_to_all(the_world(), tensor, splits, among))
        assert isinstance(result, tuple)
        ctx.among, ctx.splits = among, result[1].tolist()
        ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:  # noqa: ANN401 - torch's own
        """Return the gradient of what this rank sent, from those it went to."""
        result = finish(collectives.all_to_all(the_world(), grad, ctx.splits, ctx.among))
        assert isinstance(result, tuple)
        return None, None, result[0]


def allgather(tensor: Tensor, name: str | None = None, process_set: RankSet = global_process_set) -> Tensor:
    """Return all members' tensors, one behind the other along the first dim, in which they may differ.

    Raises:
        HorovodInternalError: they differ in something else, or another rank is gone or late.
    """
    return grouped_allgather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: RankSet = global_process_set
) -> list[Tensor]:
    """Return all members' tensors, each list place by itself."""
    return list(_AllGather.apply(_among(name, process_set), *tensors))  # type: ignore[no-untyped-call]


def allgather_async(tensor: Tensor, name: str | None = None, process_set: RankSet = global_process_set) -> Pending:
    """Return the handle of an allgather; it waits here until all members have told the shapes of their tensors."""
    return grouped_allgather_async([tensor], name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: RankSet = global_process_set
) -> Pending:
    """Return the handle of an allgather of several tensors."""
    return collectives.all_gather(the_world(), tensors, _among(name, process_set))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: RankSet = global_process_set
) -> Tensor:
    """Return the root's tensor; this rank's stays as it is."""
    result: Tensor = _Broadcast.apply(_among(name, process_set), root_rank, tensor)  # type: ignore[no-untyped-call]
    return result


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: RankSet = global_process_set
) -> Pending:
    """Return the handle of a broadcast into a new tensor."""
    return collectives.broadcast(the_world(), copies([tensor])[0], root_rank, _among(name, process_set))


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: RankSet = global_process_set
) -> Pending:
    """Return the handle of a broadcast into the tensor itself."""
    return collectives.broadcast(the_world(), tensor.detach(), root_rank, _among(name, process_set))


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: RankSet = global_process_set
) -> Tensor:
    """Return the tensor, which holds the root's numbers."""
    finish(broadcast_async_(tensor, root_rank, name, process_set))
    return tensor


def _splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, among: Among) -> list[int]:
    if splits is not None:
        return splits.tolist() if isinstance(splits, Tensor) else list(splits)
    each, left = divmod(len(tensor), len(among.group))
    if left:
        raise PlanError(
            f"alltoall of {among.name}: {len(tensor)} rows cannot be split evenly among {len(among.group)} ranks; "
            "give splits, one count per rank"
        )
    return [each] * len(among.group)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: RankSet = global_process_set,
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
    among = _among(name, process_set)
    rows, received = _AllToAll.apply(among, _splits(tensor, splits, among), tensor)  # type: ignore[no-untyped-call]
    return rows if splits is None else (rows, received)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: RankSet = global_process_set,
) -> Pending:
    """Return the handle of an alltoall, whose result is the rows and how many each has sent.

    It waits here until all members have told how they split.
    """
    among = _among(name, process_set)
    return collectives.all_to_all(the_world(), tensor, _splits(tensor, splits, among), among)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: Op, process_set: RankSet = global_process_set
) -> Callable[[], Tensor]:
    """Return what ``synchronize`` takes: all members' entries of a sparse tensor together, or their mean.

    Args:
        tensor: in coordinate form.
        name: for errors and the timeline.
        op: Sum or Average.
        process_set: who takes part.
    """
    among = _among(name, process_set)
    given = tensor.coalesce()
    parts = [given.indices().T.contiguous(), given.values()]
    starting = collectives.all_gather(the_world(), parts, among)

    def gathered() -> Tensor:
        indices, values = finish_list(starting)
        if op == Op.AVERAGE:
            values = values / len(among.group)
        return torch.sparse_coo_tensor(indices.T, values, tensor.shape, check_invariants=False)

    return gathered
