"""The collectives of a fabric as calls of any c10d process group, on tensors of any device.

A process group's own collectives give every member an equal share. Shares of a fabric's collectives are ranges, of any
lengths::

    equal ranges            the process group's collective, in place
    nearly equal ranges     the same on a padded copy:      [a a a 0][b b b b][c c 0 0]
    others                  an all-to-all of exactly these ranges; a reduction then adds them up in group order

Nothing here waits for a member or for a device: each function starts operations, and returns what is to be done once
they are complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from counterpoint.device.accelerator import Accelerator
from counterpoint.fabric.c10d import GLOO_TIMEOUT, AllgatherOptions, DataProcessGroup, ReduceScatterOptions
from counterpoint.fabric.fabric import Reduction
from counterpoint.fabric.gloo.ops import (
    REDUCE_OPS,
    ScratchLease,
    ScratchPool,
    StartedOps,
    from_gloo,
    gloo_broadcast,
    start_all_reduce,
    start_all_to_all,
    to_gloo,
)  # fmt: skip
from counterpoint.fabric.reductions import LOW_PRECISION, reduce_in_order
from counterpoint.tensor_bytes import view_bytes

MAX_PADDING: Final = 1 / 8
"""Ranges are padded to one length if this adds at most so much to them."""


class Scratch:
    """Scratch memory of one collective on one device, until :meth:`clear`.

    Args:
        pool: of host memory; a device's allocator has a pool of its own.
        accelerator: that has the memory.
    """

    def __init__(self, pool: ScratchPool, accelerator: Accelerator) -> None:
        self._lease = ScratchLease(pool)
        self._accelerator = accelerator
        self._on_device: list[Tensor] = []

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat uninitialized tensor."""
        if self._accelerator.is_host:
            return self._lease.empty(num_elements, dtype)
        return self.hold(self._accelerator.empty(num_elements, dtype=dtype))

    def hold(self, tensor: Tensor) -> Tensor:
        """Return the tensor, whose memory becomes scratch memory."""
        if not self._accelerator.is_host:
            self._on_device.append(tensor)
        return tensor

    def clear(self) -> None:
        """Release the memory, which may be used again after what the current stream has been given until now."""
        self._lease.clear()
        for tensor in self._on_device:  # allocated on the stream of the start; this may be another one
            self._accelerator.record_stream(tensor, self._accelerator.current_stream())
        self._on_device.clear()


def start_reduce_all(group: DataProcessGroup, tensor: Tensor, op: Reduction, scratch: Scratch) -> StartedOps:
    """Start to replace the tensor by its reduction over all members; 16-bit floats are sent and added up in 32 bits."""
    if not tensor.numel():
        return [], None
    values = to_gloo(tensor, op)
    if values is not tensor:
        scratch.hold(values)

    def finish() -> None:
        result = from_gloo(values, tensor.dtype, op, group.size())
        if result is not tensor:
            tensor.copy_(result)
        scratch.clear()

    return [start_all_reduce(group, values, op)], finish


def start_reduce_ranges(
    group: DataProcessGroup, whole: Tensor, bounds: Sequence[int], op: Reduction, scratch: Scratch
) -> StartedOps:
    """Start to replace member ``i``'s range of a flat tensor by its reduction over all members."""
    lengths, index = range_lengths(bounds), group.rank()
    if not any(lengths):
        return [], None
    own_range = whole[bounds[index] : bounds[index + 1]]
    if op in {"sum", "mean"} and whole.dtype not in LOW_PRECISION and is_nearly_equal(lengths):
        longest = max(lengths)
        padded = whole if min(lengths) == longest else pad_ranges(whole, lengths, scratch)
        reduced = scratch.empty(longest, whole.dtype)
        options = ReduceScatterOptions()
        options.timeout, options.reduceOp = GLOO_TIMEOUT, REDUCE_OPS[op]  # type: ignore[assignment]  # as in gloo.ops
        work = group._reduce_scatter_base(reduced, padded, options)  # noqa: SLF001 - it has no public name

        def finish() -> None:
            own_range.copy_(from_gloo(reduced, whole.dtype, op, group.size())[: len(own_range)])
            scratch.clear()

        return [work], finish
    size = whole.element_size()
    parts = scratch.empty(group.size() * len(own_range), whole.dtype)
    work = start_all_to_all(
        group,
        view_bytes(parts),
        view_bytes(whole),
        [len(own_range) * size] * len(lengths),
        [count * size for count in lengths],
    )

    def add() -> None:
        own_range.copy_(reduce_in_order(list(parts.view(group.size(), -1)), op))
        scratch.clear()

    return [work], add


def start_gather_ranges(group: DataProcessGroup, whole: Tensor, bounds: Sequence[int], scratch: Scratch) -> StartedOps:
    """Start to copy member ``i``'s range of a flat tensor to the same range on all members."""
    lengths, index, size = range_lengths(bounds), group.rank(), whole.element_size()
    if not any(lengths):
        return [], None
    own_range = whole[bounds[index] : bounds[index + 1]]
    if is_nearly_equal(lengths):
        longest, options = max(lengths), AllgatherOptions()
        options.timeout = GLOO_TIMEOUT
        if min(lengths) == longest:
            return [group._allgather_base(view_bytes(whole), view_bytes(own_range), options)], None  # noqa: SLF001
        rows = scratch.empty(longest * len(lengths), whole.dtype).view(len(lengths), longest)
        rows[index, : len(own_range)] = own_range

        def finish() -> None:
            for row, target in zip(rows, torch.split(whole, lengths), strict=True):
                target.copy_(row[: len(target)])
            scratch.clear()

        return [group._allgather_base(view_bytes(rows), view_bytes(rows[index]), options)], finish  # noqa: SLF001
    to_send = scratch.empty(len(own_range) * len(lengths), whole.dtype)
    to_send.view(len(lengths), -1).copy_(own_range)
    outgoing = [len(own_range) * size] * len(lengths)
    incoming = [count * size for count in lengths]
    return [start_all_to_all(group, view_bytes(whole), view_bytes(to_send), incoming, outgoing)], scratch.clear


def start_exchange(
    group: DataProcessGroup, received: Tensor, whole: Tensor, counts: Sequence[Sequence[int]]
) -> StartedOps:
    """Start to send each member its range; ``counts[i][j]`` elements go from member ``i`` to member ``j``."""
    if not any(map(any, counts)):
        return [], None
    index, size = group.rank(), whole.element_size()
    incoming, outgoing = [row[index] * size for row in counts], [count * size for count in counts[index]]
    return [start_all_to_all(group, view_bytes(received), view_bytes(whole), incoming, outgoing)], None


def start_broadcast(group: DataProcessGroup, tensor: Tensor, root: int, scratch: Scratch) -> StartedOps:
    """Start to replace the tensor by that of member ``root``."""
    if not tensor.numel():
        return [], None
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    work = gloo_broadcast(group, view_bytes(whole), root)
    if whole is tensor:
        return [work], None
    scratch.hold(whole)

    def finish() -> None:
        tensor.copy_(whole)
        scratch.clear()

    return [work], finish


def range_lengths(bounds: Sequence[int]) -> list[int]:
    """Return the lengths of the ranges between bounds."""
    return [stop - start for start, stop in pairwise(bounds)]


def is_nearly_equal(lengths: Sequence[int]) -> bool:
    """Return whether padding ranges to one length adds little to them.

    Example:
        >>> is_nearly_equal([5, 5, 5]), is_nearly_equal([8, 8, 7]), is_nearly_equal([0, 9, 9])
        (True, True, False)
    """
    return len(lengths) * max(lengths) - sum(lengths) <= MAX_PADDING * sum(lengths)


def pad_ranges(whole: Tensor, lengths: Sequence[int], scratch: Scratch) -> Tensor:
    """Return a flat tensor with all ranges of a flat tensor at equal distances, zeros between them."""
    longest = max(lengths)
    rows = scratch.empty(longest * len(lengths), whole.dtype).view(len(lengths), longest)
    for row, part in zip(rows, torch.split(whole, list(lengths)), strict=True):
        row[: len(part)] = part
        row[len(part) :] = 0
    return rows.view(-1)
