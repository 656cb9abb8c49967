"""Sums of tensors that are sent in a narrower dtype than their own.

::

    rank 0   whole  [ 1.01  2.02  3.03  4.04 ]  --cast-->  narrow   reduce-scatter      all-gather   --cast-->  whole
    rank 1   whole  [ 1.01  2.02  3.03  4.04 ]  --cast-->  narrow   of narrow ranges    of the sums  --cast-->  whole

Each rank adds up the narrow values of its range, in the order of the group and in 32 bits, and rounds the sum once to
the narrow dtype, as every transport's reduce-scatter does. An all-reduce gathers these sums. Transports' own
all-reduces would send 16-bit floats in 32 bits, to round their sum once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from counterpoint.fabric.fabric import Fabric, Group, Work

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
        target.copy_(narrow)
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

    All members wait for the works of a group in the same order: the wait gathers the sums.

    Args:
        fabric: this rank's connection to the members.
        label: name of the tensor.
        whole: flat and contiguous.
        narrow: what is sent of it, in a narrower dtype; it is overwritten.
        group: the members.
    """
    bounds = [len(narrow) * index // len(group) for index in range(len(group) + 1)]
    work = fabric.reduce_scatter(label, narrow, bounds, group)
    return CastReduction(work, lambda: fabric.all_gather(label, narrow, bounds, group), whole, narrow)
