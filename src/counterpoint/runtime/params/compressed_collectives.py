"""Gradients that travel in a code, to be summed or to one other rank, and what stays behind on each rank.

What a rank has not sent stays in its residual: ``residual' = (gradient + residual) - decoded(sent)``. The sum is
rounded once, as sums of floats are. The difference is exact for casts, ``int8`` and ``topk``, and for ``twobit`` with a
power of two as threshold, so that there what was sent and what stays add up bit for bit; ``sign`` and ``powersgd``
round it once. A new residual counts only when a commit has decided that the step is applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from counterpoint.fabric.collectives.adasum import adasum
from counterpoint.fabric.compression import (
    CAST_DTYPES,
    cast_clamped,
    compress,
    decompress,
    initial_powersgd_factor,
    next_powersgd_factor,
    orthonormalize,
)
from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.program.compression import Codec, powersgd_rank
from counterpoint.runtime.params.flat_layout import FlatLayout, ParamSlot
from counterpoint.runtime.params.sparse_grads import SparseGrads


class ErrorFeedback:
    """What one code keeps from step to step for one arena."""

    def __init__(self) -> None:
        self.residual: Tensor | None = None
        self.q_factors: dict[str, Tensor] = {}  # by parameter: the factor that powersgd goes on with
        self.gather_buffer: Tensor | None = None  # memory for what is gathered
        self._next_residual: Tensor | None = None
        self._next_q_factors: dict[str, Tensor] = {}
        self._is_pending = False

    def add_residual(self, grad: Tensor, sparse_grads: SparseGrads) -> Tensor:
        """Return what is to be sent, gradient and residual; what the caller leaves in it stays behind."""
        self._is_pending, self._next_q_factors = True, {}
        if self._next_residual is None:
            self._next_residual = torch.empty_like(grad)
        if self.residual is None:
            self._next_residual.copy_(grad)
        else:
            torch.add(grad, self.residual, out=self._next_residual)
        for slot in sparse_grads.slots.values():
            self._next_residual[slot.start : slot.stop].zero_()
        return self._next_residual

    def set_next_q_factor(self, name: str, q_factor: Tensor) -> None:
        """The next step starts with this factor for a parameter."""
        self._next_q_factors[name] = q_factor

    def commit(self, *, applied: bool) -> None:
        """What was left of this step stays behind if the step is applied; else all is as it was."""
        if self._is_pending and applied:
            self.residual, self._next_residual = self._next_residual, self.residual
            self.q_factors.update(self._next_q_factors)
        self._is_pending = False


class CompressibleGrad(Protocol):
    """An arena, as a coded sum sees it; tables with sparse gradients are left out of the sum."""

    layout: FlatLayout
    sparse_grads: SparseGrads

    def collect_flat_grad(self) -> Tensor:
        """Return the flat gradient, complete but for such tables."""
        ...

    def error_feedback_for(self, group: Group) -> ErrorFeedback:
        """Return what this arena keeps for sums over a group."""
        ...


def dense_slots(flat_params: CompressibleGrad) -> list[ParamSlot]:
    """Return the parameters that take part in coded sums: all but tables with sparse gradients."""
    return [slot for slot in flat_params.layout.slots if slot.name not in flat_params.sparse_grads.slots]


def compressed_all_reduce(
    fabric: Fabric,
    label: str,
    flat_params: CompressibleGrad,
    group: Group,
    codec: Codec,
    sample_fractions: Sequence[float],
) -> Work:
    """Start to replace an arena's gradient by the sum of what the members' gradients become in a code.

    Args:
        fabric: the way to the members.
        label: what is summed.
        arena: whose gradient.
        group: the members.
        code: how it travels.
        parts: for each member the part of its gradient's samples in all samples that the loss is a mean over.
    """
    if codec.name in CAST_DTYPES:
        return _CastAllReduce(fabric, label, flat_params, group, codec)
    if codec.name == "powersgd":
        return _PowerSGDReduce(fabric, label, flat_params, group, codec)
    return _GatherReduce(fabric, label, flat_params, group, codec, sample_fractions)


def encode_message(flat_params: CompressibleGrad, peer_pair: Group, codec: Codec) -> list[Tensor]:
    """Return an arena's gradient in a code as tensors to be sent; what it leaves out stays behind.

    Tables with sparse gradients follow as they are.

    Args:
        arena: whose gradient.
        way: the sender and the receiver, upwards.
        code: how it travels.
    """
    total, written = (
        flat_params.error_feedback_for(peer_pair).add_residual(
            flat_params.collect_flat_grad(), flat_params.sparse_grads
        ),
        [],
    )
    for slot in dense_slots(flat_params):
        mine = total[slot.start : slot.stop]
        if codec.name in CAST_DTYPES:
            sent = cast_clamped(mine, CAST_DTYPES[codec.name], 1)
            written.append(sent.view(torch.uint8))
            mine -= sent
        else:
            sent = compress(codec, mine)
            written.append(sent)
            mine -= decompress(codec, sent, mine)
    nothing = total.new_empty(0, dtype=torch.uint8)
    return [
        torch.cat([nothing, *written]),
        *(flat_params.sparse_grads.pack() if flat_params.sparse_grads.slots else ()),
    ]


def decode_message(flat_params: CompressibleGrad, message: Iterator[Tensor], codec: Codec) -> list[Tensor]:
    """Return what :func:`encode_message` of an equal arena stands for, as :meth:`FlatParams.pack_grad` would have sent it."""
    dtype = flat_params.layout.dtype
    written, *rest = islice(message, 1 + flat_params.sparse_grads.num_tensors)
    parts, start = [torch.empty(0, dtype=dtype)], 0
    for slot in dense_slots(flat_params):
        count = slot.stop - slot.start
        stop = start + codec.encoded_bytes(slot.shape, dtype.itemsize)
        mine, like = written[start:stop], torch.empty(count, dtype=dtype)
        narrow = CAST_DTYPES.get(codec.name)
        parts.append(decompress(codec, mine, like) if narrow is None else mine.clone().view(narrow).to(dtype))
        start = stop
    return [torch.cat(parts), *rest]


class _CastAllReduce(Work):
    """A sum in a narrower dtype."""

    def __init__(self, fabric: Fabric, label: str, flat_params: CompressibleGrad, group: Group, codec: Codec) -> None:
        self.grad = flat_params.collect_flat_grad()
        total = flat_params.error_feedback_for(group).add_residual(self.grad, flat_params.sparse_grads)
        self.sent: list[tuple[Tensor, Tensor, Work]] = []
        for start, stop in flat_params.sparse_grads.dense_ranges(0, len(total)):
            sent = cast_clamped(total[start:stop], CAST_DTYPES[codec.name], len(group))
            total[start:stop] -= sent
            self.sent.append((self.grad[start:stop], sent, fabric.all_reduce(label, sent, group)))

    def wait(self) -> None:
        """The gradient is the sum, in its own dtype."""
        for gradient, sent, work in self.sent:
            work.wait()
            gradient.copy_(sent)


class _GatherReduce(Work):
    """A sum of what every member has sent to all, in the order of the group."""

    def __init__(
        self,
        fabric: Fabric,
        label: str,
        flat_params: CompressibleGrad,
        group: Group,
        codec: Codec,
        sample_fractions: Sequence[float],
    ) -> None:
        self.slots, self.codec, self.sample_fractions = dense_slots(flat_params), codec, sample_fractions
        self.grad = flat_params.collect_flat_grad()
        left = flat_params.error_feedback_for(group)
        total = left.add_residual(self.grad, flat_params.sparse_grads) if codec.spec.has_error_feedback else self.grad
        item_bytes = total.element_size()
        self.num_bytes = sum(codec.encoded_bytes(slot.shape, item_bytes) for slot in self.slots)
        if left.gather_buffer is None:
            count, on_host = len(group) * self.num_bytes, total.device.type == "cpu"
            left.gather_buffer = (
                fabric.empty(count, torch.uint8) if on_host else total.new_empty(count, dtype=torch.uint8)
            )
        self.gather_buffer = left.gather_buffer
        at = group.index(fabric.rank)
        for slot, place in self.member_chunks(at):
            mine = total[slot.start : slot.stop]
            place.copy_(compress(codec, mine))
            if codec.spec.has_error_feedback:
                mine -= decompress(codec, place, mine)
        bounds = [member * self.num_bytes for member in range(len(group) + 1)]
        self.work = fabric.all_gather(label, self.gather_buffer, bounds, group)

    def member_chunks(self, member: int) -> Iterator[tuple[ParamSlot, Tensor]]:
        """Yield every parameter with its bytes from a member."""
        start = member * self.num_bytes
        for slot in self.slots:
            stop = start + self.codec.encoded_bytes(slot.shape, self.grad.element_size())
            yield slot, self.gather_buffer[start:stop]
            start = stop

    def wait(self) -> None:
        """The gradient is the sum of what all members' codes say, added up in the order of the group."""
        self.work.wait()
        for came in zip(*(self.member_chunks(member) for member in range(len(self.sample_fractions))), strict=True):
            slot = came[0][0]
            into = self.grad[slot.start : slot.stop]
            tensors = [decompress(self.codec, place, into) for _, place in came]
            if self.codec.name == "adasum":
                into.copy_(adasum_of_means(tensors, self.sample_fractions))
                continue
            into.copy_(tensors[0])
            for tensor in tensors[1:]:
                into += tensor


class _PowerSGDReduce(Work):
    """A sum of thin factors: ``P`` of all members, then ``Q`` of all members in the basis that ``P`` spans."""

    def __init__(self, fabric: Fabric, label: str, flat_params: CompressibleGrad, group: Group, codec: Codec) -> None:
        self.fabric, self.label, self.group = fabric, label, group
        self.grad = flat_params.collect_flat_grad()
        self.error_feedback = flat_params.error_feedback_for(group)
        self.compensated = self.error_feedback.add_residual(self.grad, flat_params.sparse_grads)
        ranks = {slot: powersgd_rank(slot.shape, int(codec.number)) for slot in dense_slots(flat_params)}
        self.matrices = {slot: rank for slot, rank in ranks.items() if rank}
        self.uncompressed = [slot for slot, rank in ranks.items() if not rank]
        firsts = [(self.matrix(slot) @ self.q_factor(slot)).view(-1) for slot in self.matrices]
        self.p_factors = torch.cat(
            [self.compensated[:0], *firsts, *(self.compensated[slot.start : slot.stop] for slot in self.uncompressed)]
        )
        self.work = fabric.all_reduce(label, self.p_factors, group)

    def matrix(self, slot: ParamSlot) -> Tensor:
        """Return what is to be summed of a parameter, ``(its first dim, all others)``; a view."""
        return self.compensated[slot.start : slot.stop].view(slot.shape[0], -1)

    def q_factor(self, slot: ParamSlot) -> Tensor:
        """Return the factor that this step starts with."""
        matrix = self.matrix(slot)
        known = self.error_feedback.q_factors.get(slot.name)
        return initial_powersgd_factor(matrix.shape[1], self.matrices[slot], matrix) if known is None else known

    def wait(self) -> None:
        """The gradient is the product of the summed factors, and what they leave out is kept."""
        self.work.wait()
        sizes = [slot.shape[0] * rank for slot, rank in self.matrices.items()]
        *firsts, rest = torch.split(self.p_factors, [*sizes, len(self.p_factors) - sum(sizes)])
        bases = {
            slot: orthonormalize(first.view(-1, rank))
            for (slot, rank), first in zip(self.matrices.items(), firsts, strict=True)
        }
        seconds = [self.matrix(slot).t() @ basis for slot, basis in bases.items()]
        for (slot, basis), second in zip(bases.items(), seconds, strict=True):
            matrix = self.matrix(slot)
            matrix -= basis @ second.t()
        if seconds:
            summed = torch.cat([second.reshape(-1) for second in seconds])
            self.fabric.all_reduce(f"{self.label} again", summed, self.group).wait()
            self.write_products(bases, torch.split(summed, [second.numel() for second in seconds]))
        for slot, came in zip(
            self.uncompressed, torch.split(rest, [s.stop - s.start for s in self.uncompressed]), strict=True
        ):
            self.grad[slot.start : slot.stop].copy_(came)
            self.compensated[slot.start : slot.stop].zero_()

    def write_products(self, bases: dict[ParamSlot, Tensor], summed: Sequence[Tensor]) -> None:
        """Write the products of bases and summed factors into the gradient, and keep the factors."""
        for (slot, basis), flat in zip(bases.items(), summed, strict=True):
            factor = flat.view(-1, basis.shape[1])
            torch.mm(basis, factor.t(), out=self.grad[slot.start : slot.stop].view(slot.shape[0], -1))
            self.error_feedback.set_next_q_factor(slot.name, next_powersgd_factor(factor))


def adasum_of_means(grads: Sequence[Tensor], sample_fractions: Sequence[float]) -> Tensor:
    """Return the adaptive sum of the members' mean gradients, as a part of the mean over all samples.

    A member's gradient is its part of the mean over all samples; divided by this part it is the mean over its own.
    Members without samples take no part. The result counts for as many samples as its members have together: for all
    of them it is the adaptive sum itself.
    """
    means = [gradient / part for gradient, part in zip(grads, sample_fractions, strict=True) if part > 0]
    return adasum(means) * sum(sample_fractions) if means else torch.zeros_like(grads[0])
