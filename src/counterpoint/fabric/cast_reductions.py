"""Sums of tensors that are sent in a narrower dtype than their own.

::

    rank 0   whole  [ 1.01  2.02  3.03  4.04 ]  --cast-->  narrow   reduce-scatter      all-gather   --cast-->  whole
    rank 1   whole  [ 1.01  2.02  3.03  4.04 ]  --cast-->  narrow   of narrow ranges    of the sums  --cast-->  whole

Each rank adds up the narrow values of its range, in the order of the group and in 32 bits, and rounds the sum once to
the narrow dtype, as every transport's reduce-scatter does. An all-reduce gathers these sums, where a transport's own
would send 16-bit floats in 32 bits, to round their sum once (:meth:`Fabric.all_reduces_in_16_bits`). Two ranks then
all-reduce by one gather of both narrow tensors, which each of them adds up: as many bytes, and nothing is left to send
when the result is waited for.

::

    all-reduce                 ranks of one host       two ranks            more ranks
    sent as 16 bits by         the transport's own     a gather of both     a reduce-scatter, then a gather
    narrow memory, lengths     1                       2                    1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.fabric.reductions import reduce_in_order_into

_Pending: TypeAlias = tuple[Work, Callable[[], Work] | None, Tensor, Tensor]


class CastReduction(Work):
    """A sum of narrow tensors, which the wait writes to a tensor in its own dtype.

    Args:
        reduce_scatter: the sum of ranges.
        start_gather: starts to gather the sums; None if they stay where they are.
        target: receives the result.
        narrow: has it.
    """

    def __init__(
        self, reduce_scatter: Work, start_gather: Callable[[], Work] | None, target: Tensor, narrow: Tensor
    ) -> None:
        self._pending: _Pending | None = (reduce_scatter, start_gather, target, narrow)

    def wait(self) -> None:
        """Write the result once, and free the narrow tensor."""
        if self._pending is None:
            return
        reduce_scatter, start_gather, target, narrow = self._pending
        reduce_scatter.wait()
        if start_gather is not None:
            start_gather().wait()
        if target is not narrow:
            target.copy_(narrow)
        self._pending = None


class CastPairReduction(Work):
    """A sum of the narrow tensors of two ranks, which are gathered, and added up by the wait.

    Args:
        gather: of both.
        both: the narrow tensors, one after the other.
        target: receives the sum.
    """

    def __init__(self, gather: Work, both: Tensor, target: Tensor) -> None:
        self._pending: tuple[Work, Tensor, Tensor] | None = (gather, both, target)

    def wait(self) -> None:
        """Write the result once, and free the narrow tensors."""
        if self._pending is None:
            return
        gather, both, target = self._pending
        gather.wait()
        first, second = both.view(2, -1)
        if len(first):
            reduce_in_order_into(first, [first, second], "sum")
        target.copy_(first)
        self._pending = None


def start_cast_reduce_scatter(
    fabric: Fabric, label: str, whole: Tensor, narrow: Tensor, bounds: Sequence[int], group: Group
) -> Work:
    """Start to replace ``whole[bounds[i]:bounds[i + 1]]`` on member ``i`` by the sum of the members' narrow tensors.

    Args:
        fabric: this rank's connection to the members.
        label: name of the tensor.
        whole: flat and contiguous; its other ranges stay as they are.
        narrow: what is sent of it, in a narrower dtype; it is overwritten.
        bounds: ``len(group) + 1`` offsets, as in :meth:`Fabric.reduce_scatter`.
        group: the members.
    """
    position = group.index(fabric.rank)
    start, stop = bounds[position], bounds[position + 1]
    work = fabric.reduce_scatter(label, narrow, bounds, group)
    return CastReduction(work, None, whole[start:stop], narrow[start:stop])


def start_cast_all_reduce(fabric: Fabric, label: str, whole: Tensor, narrow: Tensor, group: Group) -> Work:
    """Start to replace a flat tensor, on every member, by the sum of the members' narrow tensors.

    All members wait for the works of a group in the same order: the wait may gather the sums.

    Args:
        fabric: this rank's connection to the members.
        label: name of the tensor.
        whole: flat and contiguous.
        narrow: what is sent of it, in a narrower dtype, or the tensor itself; it may be overwritten.
        group: the members.
    """
    if fabric.all_reduces_in_16_bits(narrow, group):
        return CastReduction(fabric.all_reduce(label, narrow, group), None, whole, narrow)
    if len(group) == 2:
        both, position, size = narrow.new_empty(2 * len(narrow)), group.index(fabric.rank), len(narrow)
        both[position * size : (position + 1) * size] = narrow
        return CastPairReduction(fabric.all_gather(label, both, [0, size, 2 * size], group), both, whole)
    bounds = [len(narrow) * index // len(group) for index in range(len(group) + 1)]
    work = fabric.reduce_scatter(label, narrow, bounds, group)
    return CastReduction(work, lambda: fabric.all_gather(label, narrow, bounds, group), whole, narrow)
