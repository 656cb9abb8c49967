"""``allreduce`` and ``reducescatter`` in all their forms; gradients flow through those that wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from counterpoint.compat.horovod import collectives
from counterpoint.compat.horovod.collectives import Among
from counterpoint.compat.horovod.compression import Compression, Compressor
from counterpoint.compat.horovod.handles import Pending
from counterpoint.compat.horovod.rank_sets import RankSet, global_process_set, member_of
from counterpoint.compat.horovod.reductions import Op, Reduce, op_of
from counterpoint.compat.horovod.waiting import finish, finish_list
from counterpoint.compat.horovod.world import the_world

UNNAMED = "an unnamed tensor"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a call asks for, apart from its tensors."""

    name: str
    process_set: RankSet
    reduce: Reduce

    def among(self) -> Among:
        """Return the name and the members."""
        return Among(self.name, member_of(self.process_set))

    def start(self, outputs: Sequence[Tensor]) -> Pending:
        """Start to replace the tensors."""
        return collectives.all_reduce(the_world(), outputs, self.among(), self.reduce)

    def scatter(self, tensors: Sequence[Tensor]) -> Pending:
        """Start to reduce the tensors, and to give each member its rows."""
        return collectives.reduce_scatter(the_world(), tensors, self.among(), self.reduce)

    def scattered_back(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of what was reduced, from those of the rows: a sum gave every rank's numbers to all."""
        factor = self.reduce.prescale * self.reduce.postscale
        if self.reduce.op == Op.SUM:
            factor *= len(member_of(self.process_set))
        given = [grad * factor for grad in grads]
        return finish_list(collectives.all_gather(the_world(), given, self.among()))


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return new tensors with the same numbers, without gradients."""
    return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, asked: Asked, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401 - torch's own
        """Return what the members make of copies of the tensors; these stay as they are."""
        ctx.asked = asked
        return tuple(finish_list(asked.start(copies(tensors))))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ANN401 - torch's own
        """Return what the members make of the gradients, in the same way."""
        return (None, *finish_list(ctx.asked.start(copies(grads))))


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, asked: Asked, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401 - torch's own
        """Return this rank's rows of what the members make of the tensors."""
        ctx.asked = asked
        return tuple(finish_list(asked.scatter(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ANN401 - torch's own
        """Return the gradients of the whole tensors, from all members' rows."""
        return (None, *ctx.asked.scattered_back(grads))


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: RankSet = global_process_set,
) -> Tensor:
    """Return what becomes of all ranks' tensors; gradients flow back the same way.

    Args:
        tensor: of one shape and dtype on all ranks; it stays as it is.
        average: Horovod's older way to say ``op=Average`` (True) or ``op=Sum`` (False).
        name: for errors and the timeline; ranks that name different tensors are told so.
        compression: what is done before and after.
        op: Average where it is left out.
        prescale_factor: every rank's numbers are multiplied by it before.
        postscale_factor: the result is multiplied by it.
        process_set: who takes part.

    Raises:
        HorovodInternalError: the ranks disagree, or one is gone or late.
        PlanError: both ``average`` and ``op`` are given, or the set is not known.
    """
    results = grouped_allreduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
    )
    return results[0]


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: RankSet = global_process_set,
) -> list[Tensor]:
    """Return what becomes of all ranks' tensors, each with its own; those of one dtype travel as one message."""
    asked = Asked(name or UNNAMED, process_set, Reduce(op_of(op, average), prescale_factor, postscale_factor))
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = _AllReduce.apply(asked, *(compressed for compressed, _ in pairs))  # type: ignore[no-untyped-call]
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: RankSet = global_process_set,
) -> Pending:
    """Return the handle of an allreduce into a new tensor."""
    reduce = Reduce(op_of(op, average), prescale_factor, postscale_factor)
    return Asked(name or UNNAMED, process_set, reduce).start(copies([tensor]))


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: RankSet = global_process_set,
) -> Pending:
    """Return the handle of an allreduce in the tensor itself, which nobody may touch until it is over."""
    return grouped_allreduce_async_([tensor], average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: RankSet = global_process_set,
) -> Tensor:
    """Return the tensor, which holds what becomes of all ranks'."""
    finish(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))
    return tensor


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: RankSet = global_process_set,
) -> Pending:
    """Return the handle of a grouped allreduce into new tensors."""
    reduce = Reduce(op_of(op, average), prescale_factor, postscale_factor)
    return Asked(name or UNNAMED, process_set, reduce).start(copies(tensors))


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: RankSet = global_process_set,
) -> Pending:
    """Return the handle of a grouped allreduce in the tensors themselves."""
    reduce = Reduce(op_of(op, average), prescale_factor, postscale_factor)
    return Asked(name or UNNAMED, process_set, reduce).start([tensor.detach() for tensor in tensors])


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: RankSet = global_process_set,
) -> list[Tensor]:
    """Return the tensors, which hold what becomes of all ranks'."""
    finish(grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set))
    return list(tensors)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Op.AVERAGE,
    process_set: RankSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of what becomes of all ranks' tensors; the first ranks have one more where need be."""
    results = grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)
    return results[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Op.AVERAGE,
    process_set: RankSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this rank's rows of what becomes of all ranks' tensors, each with its own."""
    asked = Asked(name or UNNAMED, process_set, Reduce(op_of(op, None), prescale_factor, postscale_factor))
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = _ReduceScatter.apply(asked, *(compressed for compressed, _ in pairs))  # type: ignore[no-untyped-call]
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)]


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Op = Op.AVERAGE,
    process_set: RankSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """Return the handle of a reducescatter; the tensor stays as it is."""
    return grouped_reducescatter_async([tensor], name, op, process_set, prescale_factor, postscale_factor)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Op = Op.AVERAGE,
    process_set: RankSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """Return the handle of a reducescatter of several tensors."""
    reduce = Reduce(op_of(op, None), prescale_factor, postscale_factor)
    return Asked(name or UNNAMED, process_set, reduce).scatter(tensors)
