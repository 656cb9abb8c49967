"""All-reduces and messages of compressed gradients, with error feedback.

What a rank has not sent stays in its residual (:class:`counterpoint.runtime.params.flat_params.ErrorFeedback`):
``residual' = (grad + residual) - decoded(sent)``. The sum is rounded once, as any float sum. The difference is exact
for casts, ``int8``, ``int4`` and ``topk``, and for ``twobit`` with a power of two as threshold, so that sent values and
residual add up bit for bit; ``sign``, ``onebit`` and ``powersgd`` round it once. A new residual becomes current only
when a commit has decided that the step is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from counterpoint.fabric.cast_reductions import start_cast_all_reduce
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
from counterpoint.fabric.quantized_collectives import start_quantized_all_gather, start_quantized_reduce_scatter
from counterpoint.program.compression import Codec, exchanges_momentum, powersgd_rank
from counterpoint.runtime.params.flat_grads import CombinedWork
from counterpoint.runtime.params.flat_layout import ParamSlot
from counterpoint.runtime.params.flat_params import FlatParams, Momentum


def dense_slots(flat_params: FlatParams) -> list[ParamSlot]:
    """Return the parameters in compressed all-reduces: all but tables with sparse gradients."""
    return [slot for slot in flat_params.layout.slots if slot.name not in flat_params.own_grads.rows.slots]


def compressed_all_reduce(  # noqa: PLR0913 - what a compressed collective depends on
    fabric: Fabric,
    label: str,
    flat_params: FlatParams,
    group: Group,
    codec: Codec,
    sample_fractions: Sequence[float],
    momenta: Callable[[], Sequence[Momentum]],
    loss_scale: float = 1.0,
) -> Work:
    """Start to replace a flat gradient by the sum of the members' compressed gradients.

    Args:
        fabric: this rank's connection to the members.
        label: what is reduced.
        flat_params: whose gradient.
        group: the members.
        codec: how it is compressed.
        sample_fractions: for each member its gradient's samples divided by all samples of the loss.
        momenta: returns the optimizer's momenta of the flat parameters.
        loss_scale: what the gradient is divided by before it is compressed, and its sum multiplied with.
    """
    if loss_scale != 1.0:
        flat_params.own_grads.collect_all().mul_(1.0 / loss_scale)
        work = compressed_all_reduce(fabric, label, flat_params, group, codec, sample_fractions, momenta)
        return _ScaledWork(work, flat_params, loss_scale)
    if codec.name in CAST_DTYPES:
        return _cast_all_reduce(fabric, label, flat_params, group, codec)
    if exchanges_momentum(codec.name):
        own_fraction = sample_fractions[group.index(fabric.rank)]
        return _MomentumReduce(fabric, label, flat_params, group, codec, (momenta(), own_fraction))
    if codec.name == "powersgd":
        return _PowerSGDReduce(fabric, label, flat_params, group, codec)
    return _GatherReduce(fabric, label, flat_params, group, codec, sample_fractions)


class _ScaledWork(Work):
    """A collective whose result is multiplied with a factor."""

    def __init__(self, work: Work, flat_params: FlatParams, factor: float) -> None:
        self.work, self.flat_params, self.factor = work, flat_params, factor

    def wait(self) -> None:
        """Wait, and multiply the gradient once."""
        self.work.wait()
        if self.factor != 1.0:
            self.flat_params.own_grads.collect_all().mul_(self.factor)
        self.factor = 1.0


def scale_tensors(tensors: Sequence[Tensor], scale: float) -> list[Tensor]:
    """Return tensors multiplied with a number; indices of rows stay as they are."""
    if scale == 1.0:
        return list(tensors)
    return [tensor * scale if tensor.is_floating_point() else tensor for tensor in tensors]


def encode_message(flat_params: FlatParams, peer_pair: Group, codec: Codec, scale: float = 1.0) -> list[Tensor]:
    """Return a compressed gradient as tensors to be sent; what the codec drops becomes the residual.

    Tables with sparse gradients follow uncompressed.

    Args:
        flat_params: whose gradient.
        peer_pair: the sender and the receiver, the smaller rank first.
        codec: how it is compressed.
        scale: what the gradient is multiplied with before.
    """
    error_feedback, encoded_parts = flat_params.error_feedback_for(peer_pair), []
    grad = flat_params.own_grads.collect_all()
    if scale != 1.0:
        grad.mul_(scale)
    compensated = error_feedback.add_residual(grad, flat_params.own_grads.rows)
    for slot in dense_slots(flat_params):
        local_part = compensated[slot.start : slot.stop]
        if codec.name in CAST_DTYPES:
            sent = cast_clamped(local_part, CAST_DTYPES[codec.name], 1)
            encoded_parts.append(sent.view(torch.uint8))
            local_part -= sent
        else:
            sent = compress(codec, local_part)
            encoded_parts.append(sent)
            local_part -= decompress(codec, sent, local_part)
    empty = compensated.new_empty(0, dtype=torch.uint8)
    return [
        torch.cat([empty, *encoded_parts]),
        *(scale_tensors(flat_params.own_grads.rows.pack(), scale) if flat_params.own_grads.rows.slots else ()),
    ]


def decode_message(flat_params: FlatParams, message: Iterator[Tensor], codec: Codec) -> list[Tensor]:
    """Return what :meth:`FlatGrads.pack` of the sender would have sent uncompressed."""
    dtype = flat_params.layout.dtype
    encoded_parts, *rest = islice(message, 1 + flat_params.own_grads.rows.num_tensors)
    decoded_parts, start = [encoded_parts.new_empty(0, dtype=dtype)], 0
    for slot in dense_slots(flat_params):
        count = slot.stop - slot.start
        stop = start + codec.encoded_bytes(slot.shape, dtype.itemsize)
        local_part, like = encoded_parts[start:stop], encoded_parts.new_empty(count, dtype=dtype)
        narrow = CAST_DTYPES.get(codec.name)
        decoded_parts.append(
            decompress(codec, local_part, like) if narrow is None else local_part.clone().view(narrow).to(dtype)
        )
        start = stop
    return [torch.cat(decoded_parts), *rest]


def _cast_all_reduce(fabric: Fabric, label: str, flat_params: FlatParams, group: Group, codec: Codec) -> Work:
    """Start an all-reduce in a narrower dtype."""
    grad, rows = flat_params.own_grads.collect_all(), flat_params.own_grads.rows
    compensated, works = flat_params.error_feedback_for(group).add_residual(grad, rows), []
    for start, stop in rows.dense_ranges(0, len(compensated)):
        sent = cast_clamped(compensated[start:stop], CAST_DTYPES[codec.name], len(group))
        compensated[start:stop] -= sent
        works.append(start_cast_all_reduce(fabric, label, grad[start:stop], sent, group))
    return CombinedWork(works)


class _GatherReduce(Work):
    """An all-gather of every member's compressed gradient, decoded and summed in the order of the group."""

    def __init__(
        self,
        fabric: Fabric,
        label: str,
        flat_params: FlatParams,
        group: Group,
        codec: Codec,
        sample_fractions: Sequence[float],
    ) -> None:
        self.slots, self.codec, self.sample_fractions = dense_slots(flat_params), codec, sample_fractions
        self.grad = flat_params.own_grads.collect_all()
        error_feedback = flat_params.error_feedback_for(group)
        compensated = (
            error_feedback.add_residual(self.grad, flat_params.own_grads.rows)
            if codec.spec.has_error_feedback
            else self.grad
        )
        item_bytes = compensated.element_size()
        self.num_bytes = sum(codec.encoded_bytes(slot.shape, item_bytes) for slot in self.slots)
        count = len(group) * self.num_bytes
        self.gather_buffer = error_feedback.get_gather_buffer(partial(flat_params.allocate, count, torch.uint8))
        position = group.index(fabric.rank)
        for slot, chunk in self.member_chunks(position):
            local_part = compensated[slot.start : slot.stop]
            chunk.copy_(compress(codec, local_part))
            if codec.spec.has_error_feedback:
                local_part -= decompress(codec, chunk, local_part)
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
        """Write the sum of all members' decoded gradients to the gradient."""
        self.work.wait()
        for received in zip(*(self.member_chunks(member) for member in range(len(self.sample_fractions))), strict=True):
            slot = received[0][0]
            target = self.grad[slot.start : slot.stop]
            tensors = [decompress(self.codec, chunk, target) for _, chunk in received]
            if self.codec.name == "adasum":
                target.copy_(adasum_of_means(tensors, self.sample_fractions))
                continue
            target.copy_(tensors[0])
            for tensor in tensors[1:]:
                target += tensor


class _MomentumReduce(Work):
    """1-bit Adam: momenta that members have added their gradients to, and then their sum, are sent in one bit.

    ::

        member i   f_i decay m + (1 - decay) g_i + residual_i  --encode--> bits  --all-to-all--> its range of all
        its range  sum of what they decode to + residual       --encode--> bits  --all-gather--> m' of all members

    ``f_i`` is the member's fraction of the samples, ``g_i`` its part of the gradient. The result is the gradient
    ``(m' - decay m) / (1 - decay)``, with which the optimizer's momentum becomes ``m'``.
    """

    def __init__(
        self,
        fabric: Fabric,
        label: str,
        flat_params: FlatParams,
        group: Group,
        codec: Codec,
        momenta_and_fraction: tuple[Sequence[Momentum], float],
    ) -> None:
        self.fabric, self.label, self.group, self.codec = fabric, label, group, codec
        self.momenta, own_fraction = momenta_and_fraction
        rows = flat_params.own_grads.rows
        rows.require_dense()
        self.grad, self.error_feedback = flat_params.own_grads.collect_all(), flat_params.error_feedback_for(group)
        for start, stop, values, decay in self.momenta:
            self.grad[start:stop].mul_(1 - decay)
            if values is not None:
                self.grad[start:stop].add_(values.view(-1), alpha=own_fraction * decay)
        compensated = self.error_feedback.add_residual(self.grad, rows)
        self.ranges = flat_params.layout.shard_ranges(len(group))
        self.grad.copy_(compensated)
        self.work = start_quantized_reduce_scatter(fabric, label, self.grad, self.ranges, group, codec)
        for start, stop in (one for own in self.ranges for one in own):
            part = compensated[start:stop]
            part -= decompress(codec, compress(codec, part), part)

    def wait(self) -> None:
        """Gather the compressed sum, and write the gradient that the optimizer makes it of."""
        self.work.wait()
        own = self.ranges[self.group.index(self.fabric.rank)]
        total = torch.cat([self.grad[:0], *(self.grad[start:stop] for start, stop in own)])
        total = self.error_feedback.add_server_residual(total)
        gather = start_quantized_all_gather(
            self.fabric, f"{self.label} again", total, self.grad, self.ranges, self.group, self.codec
        )
        gather.wait()
        total -= torch.cat([self.grad[:0], *(self.grad[start:stop] for start, stop in own)])
        for start, stop, values, decay in self.momenta:
            if values is not None:
                self.grad[start:stop].sub_(values.view(-1), alpha=decay)
            self.grad[start:stop].div_(1 - decay)


class _PowerSGDReduce(Work):
    """PowerSGD: all-reduce ``P``, orthogonalize it, then all-reduce ``Q`` in the basis of ``P``."""

    def __init__(self, fabric: Fabric, label: str, flat_params: FlatParams, group: Group, codec: Codec) -> None:
        self.fabric, self.label, self.group = fabric, label, group
        self.grad = flat_params.own_grads.collect_all()
        self.error_feedback = flat_params.error_feedback_for(group)
        self.compensated = self.error_feedback.add_residual(self.grad, flat_params.own_grads.rows)
        ranks = {slot: powersgd_rank(slot.shape, int(codec.number)) for slot in dense_slots(flat_params)}
        self.matrices = {slot: rank for slot, rank in ranks.items() if rank}
        self.uncompressed = [slot for slot, rank in ranks.items() if not rank]
        p_parts = [(self.matrix(slot) @ self.q_factor(slot)).view(-1) for slot in self.matrices]
        self.p_factors = torch.cat(
            [self.compensated[:0], *p_parts, *(self.compensated[slot.start : slot.stop] for slot in self.uncompressed)]
        )
        self.work = fabric.all_reduce(label, self.p_factors, group)

    def matrix(self, slot: ParamSlot) -> Tensor:
        """View a parameter's gradient plus residual as ``(first dim, all others)``."""
        return self.compensated[slot.start : slot.stop].view(slot.shape[0], -1)

    def q_factor(self, slot: ParamSlot) -> Tensor:
        """Return the ``Q`` that this step starts with: that of the last step, or a first one."""
        matrix = self.matrix(slot)
        previous = self.error_feedback.q_factors.get(slot.name)
        initial = partial(initial_powersgd_factor, matrix.shape[1], self.matrices[slot], matrix)
        return self.error_feedback.get_initial_q_factor(slot.name, initial) if previous is None else previous

    def wait(self) -> None:
        """Write the product of the summed factors to the gradient, and keep the rest as residual."""
        self.work.wait()
        sizes = [slot.shape[0] * rank for slot, rank in self.matrices.items()]
        *p_parts, rest = torch.split(self.p_factors, [*sizes, len(self.p_factors) - sum(sizes)])
        bases = {
            slot: orthonormalize(p_part.view(-1, rank))
            for (slot, rank), p_part in zip(self.matrices.items(), p_parts, strict=True)
        }
        q_parts = [self.matrix(slot).t() @ basis for slot, basis in bases.items()]
        for (slot, basis), q_part in zip(bases.items(), q_parts, strict=True):
            matrix = self.matrix(slot)
            matrix -= basis @ q_part.t()
        if q_parts:
            summed = torch.cat([q_part.reshape(-1) for q_part in q_parts])
            self.fabric.all_reduce(f"{self.label} again", summed, self.group).wait()
            self.write_products(bases, torch.split(summed, [q_part.numel() for q_part in q_parts]))
        for slot, received in zip(
            self.uncompressed, torch.split(rest, [s.stop - s.start for s in self.uncompressed]), strict=True
        ):
            self.grad[slot.start : slot.stop].copy_(received)
            self.compensated[slot.start : slot.stop].zero_()

    def write_products(self, bases: dict[ParamSlot, Tensor], summed: Sequence[Tensor]) -> None:
        """Write products ``P Q^T`` to the gradient, and keep ``Q`` for the next step."""
        for (slot, basis), flat in zip(bases.items(), summed, strict=True):
            factor = flat.view(-1, basis.shape[1])
            torch.mm(basis, factor.t(), out=self.grad[slot.start : slot.stop].view(slot.shape[0], -1))
            make_initial = partial(initial_powersgd_factor, factor.shape[0], factor.shape[1], factor)
            initial = self.error_feedback.get_initial_q_factor(slot.name, make_initial)
            self.error_feedback.set_next_q_factor(slot.name, next_powersgd_factor(factor, initial))


def adasum_of_means(grads: Sequence[Tensor], sample_fractions: Sequence[float]) -> Tensor:
    """Return the adaptive sum of the members' mean gradients, weighted as a part of the mean over all samples.

    A member's gradient is its part of the mean over all samples; divided by its fraction it is the mean over its own.
    Members without samples are skipped. The result counts for as many samples as the members have together: over all
    ranks it is the adaptive sum itself.
    """
    means = [grad / fraction for grad, fraction in zip(grads, sample_fractions, strict=True) if fraction > 0]
    return adasum(means) * sum(sample_fractions) if means else torch.zeros_like(grads[0])
