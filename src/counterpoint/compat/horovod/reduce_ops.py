"""``allreduce`` and ``reducescatter`` in all their forms; the synchronous ones are differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from counterpoint.compat.horovod import collectives
from counterpoint.compat.horovod.collectives import NamedGroup
from counterpoint.compat.horovod.compression import Compression, Compressor
from counterpoint.compat.horovod.handles import HorovodHandle
from counterpoint.compat.horovod.process_sets import ProcessSet, global_process_set, member_group
from counterpoint.compat.horovod.reductions import ReductionOp, ScaledReduction, resolve_op
from counterpoint.compat.horovod.synchronize import wait_result, wait_tensors
from counterpoint.compat.horovod.world import current_world

UNNAMED = "an unnamed tensor"


@dataclass(frozen=True, slots=True)
class ReduceCall:
    """Arguments of a reduction, without its tensors."""

    name: str
    process_set: ProcessSet
    reduce: ScaledReduction

    def named_group(self) -> NamedGroup:
        """Return the name and the members."""
        return NamedGroup(self.name, member_group(self.process_set))

    def start_all_reduce(self, outputs: Sequence[Tensor]) -> HorovodHandle:
        """Start to reduce the tensors in place."""
        return collectives.all_reduce(current_world(), outputs, self.named_group(), self.reduce)

    def start_reduce_scatter(self, tensors: Sequence[Tensor]) -> HorovodHandle:
        """Start to reduce the tensors and give each member its rows."""
        return collectives.reduce_scatter(current_world(), tensors, self.named_group(), self.reduce)

    def gather_grads(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the unreduced tensors from those of all members' rows."""
        factor = self.reduce.prescale * self.reduce.postscale
        if self.reduce.op == ReductionOp.SUM:
            factor *= len(member_group(self.process_set))
        scaled = [grad * factor for grad in grads]
        return wait_tensors(collectives.all_gather(current_world(), scaled, self.named_group()))


def clone_detached(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return detached contiguous copies."""
    return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, call: ReduceCall, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401 - torch's own
        """Return the reduction of copies of the tensors."""
        ctx.call = call
        return tuple(wait_tensors(call.start_all_reduce(clone_detached(tensors))))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ANN401 - torch's own
        """Return the same reduction of the gradients."""
        return (None, *wait_tensors(ctx.call.start_all_reduce(clone_detached(grads))))


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, call: ReduceCall, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401 - torch's own
        """Return this rank's rows of the reduction."""
        ctx.call = call
        return tuple(wait_tensors(call.start_reduce_scatter(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ANN401 - torch's own
        """Return the gradients of the whole tensors from all members' rows."""
        return (None, *ctx.call.gather_grads(grads))


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the reduction of all ranks' tensors; differentiable.

    Args:
        tensor: of one shape and dtype on all ranks; not changed.
        average: deprecated by Horovod: ``op=Average`` (True) or ``op=Sum`` (False).
        name: for errors and the timeline; ranks that pass different names get an error.
        compression: of the tensor in messages.
        op: Average by default.
        prescale_factor: factor before the reduction.
        postscale_factor: factor after the reduction.
        process_set: members.

    Raises:
        HorovodInternalError: the ranks disagree, or one has exited or is late.
        PlanError: both ``average`` and ``op`` are given, or the set was not added.
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
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return the reduction of each of the tensors; those of one dtype are sent as one message."""
    call = ReduceCall(
        name or UNNAMED, process_set, ScaledReduction(resolve_op(op, average), prescale_factor, postscale_factor)
    )
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = _AllReduce.apply(call, *(compressed for compressed, _ in pairs))  # type: ignore[no-untyped-call]
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> HorovodHandle:
    """Return the handle of an allreduce into a new tensor."""
    reduce = ScaledReduction(resolve_op(op, average), prescale_factor, postscale_factor)
    return ReduceCall(name or UNNAMED, process_set, reduce).start_all_reduce(clone_detached([tensor]))


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> HorovodHandle:
    """Return the handle of an in-place allreduce; the tensor must not be used until it is complete."""
    return grouped_allreduce_async_([tensor], average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce the tensor in place and return it."""
    wait_result(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))
    return tensor


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> HorovodHandle:
    """Return the handle of a grouped allreduce into new tensors."""
    reduce = ScaledReduction(resolve_op(op, average), prescale_factor, postscale_factor)
    return ReduceCall(name or UNNAMED, process_set, reduce).start_all_reduce(clone_detached(tensors))


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> HorovodHandle:
    """Return the handle of an in-place grouped allreduce."""
    reduce = ScaledReduction(resolve_op(op, average), prescale_factor, postscale_factor)
    return ReduceCall(name or UNNAMED, process_set, reduce).start_all_reduce([tensor.detach() for tensor in tensors])


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReductionOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce the tensors in place and return them."""
    wait_result(grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set))
    return list(tensors)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReductionOp = ReductionOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of the reduction; the first ranks get one more if they do not divide."""
    results = grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)
    return results[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReductionOp = ReductionOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this rank's rows of the reduction of each of the tensors."""
    call = ReduceCall(
        name or UNNAMED, process_set, ScaledReduction(resolve_op(op, None), prescale_factor, postscale_factor)
    )
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = _ReduceScatter.apply(call, *(compressed for compressed, _ in pairs))  # type: ignore[no-untyped-call]
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)]


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReductionOp = ReductionOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> HorovodHandle:
    """Return the handle of a reducescatter; the tensor is not changed."""
    return grouped_reducescatter_async([tensor], name, op, process_set, prescale_factor, postscale_factor)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReductionOp = ReductionOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> HorovodHandle:
    """Return the handle of a reducescatter of several tensors."""
    reduce = ScaledReduction(resolve_op(op, None), prescale_factor, postscale_factor)
    return ReduceCall(name or UNNAMED, process_set, reduce).start_reduce_scatter(tensors)
