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

from counterpoint.fabric.algorithms.adasum import adasum
from counterpoint.fabric.coding import NARROW, decoded, encoded, first_columns, narrowed, next_columns, orthogonal
from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.program.codes import Code, factor_rank
from counterpoint.runtime.layout import Layout, Slot
from counterpoint.runtime.strewn import Strewn


class Leftovers:
    """What one code keeps from step to step for one arena."""

    def __init__(self) -> None:
        self.residual: Tensor | None = None
        self.columns: dict[str, Tensor] = {}  # by parameter: the factor that powersgd goes on with
        self.wire: Tensor | None = None  # memory for what is gathered
        self._next: Tensor | None = None
        self._next_columns: dict[str, Tensor] = {}
        self._is_open = False

    def begin(self, gradient: Tensor, strewn: Strewn) -> Tensor:
        """Return what is to be sent, gradient and residual; what the caller leaves in it stays behind."""
        self._is_open, self._next_columns = True, {}
        if self._next is None:
            self._next = torch.empty_like(gradient)
        if self.residual is None:
            self._next.copy_(gradient)
        else:
            torch.add(gradient, self.residual, out=self._next)
        for slot in strewn.slots.values():
            self._next[slot.start : slot.stop].zero_()
        return self._next

    def go_on(self, name: str, columns: Tensor) -> None:
        """The next step starts with this factor for a parameter."""
        self._next_columns[name] = columns

    def settle(self, *, applied: bool) -> None:
        """What was left of this step stays behind if the step is applied; else all is as it was."""
        if self._is_open and applied:
            self.residual, self._next = self._next, self.residual
            self.columns.update(self._next_columns)
        self._is_open = False


class Summand(Protocol):
    """An arena, as a coded sum sees it; tables with sparse gradients are left out of the sum."""

    layout: Layout
    strewn: Strewn

    def fold(self) -> Tensor:
        """Return the flat gradient, complete but for such tables."""
        ...

    def leftovers(self, group: Group) -> Leftovers:
        """Return what this arena keeps for sums over a group."""
        ...


def dense_slots(arena: Summand) -> list[Slot]:
    """Return the parameters that take part in coded sums: all but tables with sparse gradients."""
    return [slot for slot in arena.layout.slots if slot.name not in arena.strewn.slots]


def coded_sum(fabric: Fabric, label: str, arena: Summand, group: Group, code: Code, parts: Sequence[float]) -> Work:
    """Start to replace an arena's gradient by the sum of what the members' gradients become in a code.

    Args:
        fabric: the way to the members.
        label: what is summed.
        arena: whose gradient.
        group: the members.
        code: how it travels.
        parts: for each member the part of its gradient's samples in all samples that the loss is a mean over.
    """
    if code.name in NARROW:
        return _Cast(fabric, label, arena, group, code)
    if code.name == "powersgd":
        return _Factors(fabric, label, arena, group, code)
    return _Gathered(fabric, label, arena, group, code, parts)


def coded_message(arena: Summand, way: Group, code: Code) -> list[Tensor]:
    """Return an arena's gradient in a code as tensors to be sent; what it leaves out stays behind.

    Tables with sparse gradients follow as they are.

    Args:
        arena: whose gradient.
        way: the sender and the receiver, upwards.
        code: how it travels.
    """
    total, written = arena.leftovers(way).begin(arena.fold(), arena.strewn), []
    for slot in dense_slots(arena):
        mine = total[slot.start : slot.stop]
        if code.name in NARROW:
            sent = narrowed(mine, NARROW[code.name], 1)
            written.append(sent.view(torch.uint8))
            mine -= sent
        else:
            sent = encoded(code, mine)
            written.append(sent)
            mine -= decoded(code, sent, mine)
    nothing = total.new_empty(0, dtype=torch.uint8)
    return [torch.cat([nothing, *written]), *(arena.strewn.message() if arena.strewn.slots else ())]


def read_message(arena: Summand, message: Iterator[Tensor], code: Code) -> list[Tensor]:
    """Return what :func:`coded_message` of an equal arena stands for, as :meth:`Arena.message` would have sent it."""
    dtype = arena.layout.dtype
    written, *rest = islice(message, 1 + arena.strewn.num_tensors)
    parts, start = [torch.empty(0, dtype=dtype)], 0
    for slot in dense_slots(arena):
        count = slot.stop - slot.start
        stop = start + code.num_bytes(slot.shape, dtype.itemsize)
        mine, like = written[start:stop], torch.empty(count, dtype=dtype)
        narrow = NARROW.get(code.name)
        parts.append(decoded(code, mine, like) if narrow is None else mine.clone().view(narrow).to(dtype))
        start = stop
    return [torch.cat(parts), *rest]


class _Cast(Work):
    """A sum in a narrower dtype."""

    def __init__(self, fabric: Fabric, label: str, arena: Summand, group: Group, code: Code) -> None:
        self.gradient = arena.fold()
        total = arena.leftovers(group).begin(self.gradient, arena.strewn)
        self.sent: list[tuple[Tensor, Tensor, Work]] = []
        for start, stop in arena.strewn.dense_ranges(0, len(total)):
            sent = narrowed(total[start:stop], NARROW[code.name], len(group))
            total[start:stop] -= sent
            self.sent.append((self.gradient[start:stop], sent, fabric.all_reduce(label, sent, group)))

    def wait(self) -> None:
        """The gradient is the sum, in its own dtype."""
        for gradient, sent, work in self.sent:
            work.wait()
            gradient.copy_(sent)


class _Gathered(Work):
    """A sum of what every member has sent to all, in the order of the group."""

    def __init__(
        self, fabric: Fabric, label: str, arena: Summand, group: Group, code: Code, parts: Sequence[float]
    ) -> None:
        self.slots, self.code, self.parts = dense_slots(arena), code, parts
        self.gradient = arena.fold()
        left = arena.leftovers(group)
        total = left.begin(self.gradient, arena.strewn) if code.kind.keeps else self.gradient
        item_bytes = total.element_size()
        self.num_bytes = sum(code.num_bytes(slot.shape, item_bytes) for slot in self.slots)
        if left.wire is None:
            count, on_host = len(group) * self.num_bytes, total.device.type == "cpu"
            left.wire = fabric.empty(count, torch.uint8) if on_host else total.new_empty(count, dtype=torch.uint8)
        self.wire = left.wire
        at = group.index(fabric.rank)
        for slot, place in self.places(at):
            mine = total[slot.start : slot.stop]
            place.copy_(encoded(code, mine))
            if code.kind.keeps:
                mine -= decoded(code, place, mine)
        bounds = [member * self.num_bytes for member in range(len(group) + 1)]
        self.work = fabric.all_gather(label, self.wire, bounds, group)

    def places(self, member: int) -> Iterator[tuple[Slot, Tensor]]:
        """Yield every parameter with its bytes from a member."""
        start = member * self.num_bytes
        for slot in self.slots:
            stop = start + self.code.num_bytes(slot.shape, self.gradient.element_size())
            yield slot, self.wire[start:stop]
            start = stop

    def wait(self) -> None:
        """The gradient is the sum of what all members' codes say, added up in the order of the group."""
        self.work.wait()
        for came in zip(*(self.places(member) for member in range(len(self.parts))), strict=True):
            slot = came[0][0]
            into = self.gradient[slot.start : slot.stop]
            tensors = [decoded(self.code, place, into) for _, place in came]
            if self.code.name == "adasum":
                into.copy_(adasum_of_means(tensors, self.parts))
                continue
            into.copy_(tensors[0])
            for tensor in tensors[1:]:
                into += tensor


class _Factors(Work):
    """A sum of thin factors: ``P`` of all members, then ``Q`` of all members in the basis that ``P`` spans."""

    def __init__(self, fabric: Fabric, label: str, arena: Summand, group: Group, code: Code) -> None:
        self.fabric, self.label, self.group = fabric, label, group
        self.gradient = arena.fold()
        self.left = arena.leftovers(group)
        self.total = self.left.begin(self.gradient, arena.strewn)
        ranks = {slot: factor_rank(slot.shape, int(code.number)) for slot in dense_slots(arena)}
        self.matrices = {slot: rank for slot, rank in ranks.items() if rank}
        self.others = [slot for slot, rank in ranks.items() if not rank]
        firsts = [(self.matrix(slot) @ self.columns(slot)).view(-1) for slot in self.matrices]
        self.first = torch.cat([self.total[:0], *firsts, *(self.total[slot.start : slot.stop] for slot in self.others)])
        self.work = fabric.all_reduce(label, self.first, group)

    def matrix(self, slot: Slot) -> Tensor:
        """Return what is to be summed of a parameter, ``(its first dim, all others)``; a view."""
        return self.total[slot.start : slot.stop].view(slot.shape[0], -1)

    def columns(self, slot: Slot) -> Tensor:
        """Return the factor that this step starts with."""
        matrix = self.matrix(slot)
        known = self.left.columns.get(slot.name)
        return first_columns(matrix.shape[1], self.matrices[slot], matrix) if known is None else known

    def wait(self) -> None:
        """The gradient is the product of the summed factors, and what they leave out is kept."""
        self.work.wait()
        sizes = [slot.shape[0] * rank for slot, rank in self.matrices.items()]
        *firsts, rest = torch.split(self.first, [*sizes, len(self.first) - sum(sizes)])
        bases = {
            slot: orthogonal(first.view(-1, rank))
            for (slot, rank), first in zip(self.matrices.items(), firsts, strict=True)
        }
        seconds = [self.matrix(slot).t() @ basis for slot, basis in bases.items()]
        for (slot, basis), second in zip(bases.items(), seconds, strict=True):
            matrix = self.matrix(slot)
            matrix -= basis @ second.t()
        if seconds:
            summed = torch.cat([second.reshape(-1) for second in seconds])
            self.fabric.all_reduce(f"{self.label} again", summed, self.group).wait()
            self.put(bases, torch.split(summed, [second.numel() for second in seconds]))
        for slot, came in zip(self.others, torch.split(rest, [s.stop - s.start for s in self.others]), strict=True):
            self.gradient[slot.start : slot.stop].copy_(came)
            self.total[slot.start : slot.stop].zero_()

    def put(self, bases: dict[Slot, Tensor], summed: Sequence[Tensor]) -> None:
        """Write the products of bases and summed factors into the gradient, and keep the factors."""
        for (slot, basis), flat in zip(bases.items(), summed, strict=True):
            factor = flat.view(-1, basis.shape[1])
            torch.mm(basis, factor.t(), out=self.gradient[slot.start : slot.stop].view(slot.shape[0], -1))
            self.left.go_on(slot.name, next_columns(factor))


def adasum_of_means(gradients: Sequence[Tensor], parts: Sequence[float]) -> Tensor:
    """Return the adaptive sum of the members' mean gradients, as a part of the mean over all samples.

    A member's gradient is its part of the mean over all samples; divided by this part it is the mean over its own.
    Members without samples take no part. The result counts for as many samples as its members have together: for all
    of them it is the adaptive sum itself.
    """
    means = [gradient / part for gradient, part in zip(gradients, parts, strict=True) if part > 0]
    return adasum(means) * sum(parts) if means else torch.zeros_like(gradients[0])
