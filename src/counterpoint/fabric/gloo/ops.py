"""Start gloo's collectives on tensors, with correct rounding and NaN, balanced links, and pooled scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Final

import torch
from torch import Tensor

from counterpoint.fabric.c10d import (
    GLOO_TIMEOUT,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GlooProcessGroup,
    GlooWork,
    ReduceOp,
)  # fmt: skip
from counterpoint.fabric.fabric import Reduction
from counterpoint.fabric.reductions import LOW_PRECISION

SAME_WIDTH_INT = {torch.float32: torch.int32, torch.float64: torch.int64}  # as wide


def to_gloo(tensor: Tensor, op: Reduction) -> Tensor:
    """Return the tensor that gloo reduces: contiguous, upcast, or for max and min reinterpreted as ordered integers.

    gloo compares floats with ``<``, which is false for NaN on either side, so whether NaN wins depends on the order of
    the ranks. Integers in the same order, with NaN at the winning end, are compared correctly.

    Args:
        tensor: of any dtype that can be reduced.
        op: the reduction.
    """
    upcasted = upcast(tensor)
    if op in {"sum", "mean"} or upcasted.dtype not in SAME_WIDTH_INT:
        return upcasted
    keys = float_order_bits(upcasted.view(SAME_WIDTH_INT[upcasted.dtype]))
    limits = torch.iinfo(keys.dtype)
    return keys.masked_fill_(upcasted.isnan(), limits.max if op == "max" else limits.min)


def upcast(tensor: Tensor) -> Tensor:
    """Return the tensor, contiguous; 16-bit floats in 32 bits, so that a sum is rounded once, at its end."""
    return (tensor.float() if tensor.dtype in LOW_PRECISION else tensor.resolve_neg()).contiguous()


def from_gloo(reduced: Tensor, dtype: torch.dtype, op: Reduction, num_ranks: int) -> Tensor:
    """Return gloo's result in the tensor's dtype.

    Args:
        reduced: the reduction of all members' :func:`to_gloo`.
        dtype: of the tensor.
        op: the reduction.
        num_ranks: divisor of a mean.
    """
    if op == "mean":
        reduced *= 1 / num_ranks
    elif op != "sum" and dtype.is_floating_point:
        floats = {whole: wide for wide, whole in SAME_WIDTH_INT.items()}
        reduced = float_order_bits(reduced).view(floats[reduced.dtype])
    return reduced.to(dtype)


def float_order_bits(bits: Tensor) -> Tensor:
    """Map the bits of floats to integers in the same order, and back: the function is its own inverse."""
    num_bits = 8 * bits.element_size()
    return bits ^ ((bits >> (num_bits - 1)) & torch.iinfo(bits.dtype).max)


MIN_POOLED_BYTES: Final = 1 << 16
"""Smaller buffers are allocated directly."""
MAX_OVERSIZE_FACTOR: Final = 2
"""A pooled buffer is at most this many times as large as requested."""


class ScratchPool:
    """Pool of scratch buffers of one fabric, thread-safe; it holds at most the peak of memory in use at once.

    glibc returns large blocks that a secondary thread frees to the kernel at once, and page faults on every new one; a
    step needs the same buffers as the one before.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []  # oldest first
        self._in_use_bytes = self._peak_bytes = 0
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes in the pool, not in use."""
        return sum(one.numel() for one in self._free)

    def acquire(self, num_bytes: int) -> Tensor:
        """Return a flat uninitialized uint8 buffer of at least this many bytes."""
        with self._lock:
            candidates = [
                index
                for index, free_buffer in enumerate(self._free)
                if num_bytes <= free_buffer.numel() <= MAX_OVERSIZE_FACTOR * num_bytes
            ]
            smallest = min(candidates, key=lambda index: self._free[index].numel(), default=None)
            buffer = torch.empty(num_bytes, dtype=torch.uint8) if smallest is None else self._free.pop(smallest)
            self._in_use_bytes += buffer.numel()
            self._peak_bytes = max(self._peak_bytes, self._in_use_bytes)
            return buffer

    def release(self, buffers: Iterable[Tensor]) -> None:
        """Return buffers to the pool; the caller uses them no more."""
        with self._lock:
            for buffer in buffers:
                self._in_use_bytes -= buffer.numel()
                self._free.append(buffer)
            while self.num_bytes + self._in_use_bytes > self._peak_bytes:
                del self._free[0]


class ScratchLease:
    """Scratch buffers of one collective, until :meth:`clear`.

    Args:
        pool: where its memory comes from.
    """

    def __init__(self, pool: ScratchPool) -> None:
        self._pool = pool
        self._buffers: list[Tensor] = []

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat uninitialized tensor, valid until :meth:`clear`."""
        num_bytes = num_elements * dtype.itemsize
        if num_bytes < MIN_POOLED_BYTES:
            return torch.empty(num_elements, dtype=dtype)
        self._buffers.append(self._pool.acquire(num_bytes))
        return self._buffers[-1][:num_bytes].view(dtype)

    def clear(self) -> None:
        """Return all buffers to the pool."""
        self._pool.release(self._buffers)
        self._buffers.clear()


StartedOps = tuple[list[GlooWork], Callable[[], object] | None]  # pending works, and a callback for their completion

CHUNK_BYTES: Final = 1 << 21
"""Bytes that are sent to another member in one exchange."""
SMALL_BYTES: Final = 1 << 14
"""Up to this many bytes per member are exchanged with all members at once: every exchange costs a message to each."""
REDUCE_OPS: Final = {"sum": ReduceOp.SUM, "mean": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}


def gloo_all_reduce(gloo: GlooProcessGroup, whole: Tensor, op: Reduction, num_members: int) -> StartedOps:
    """Start an all-reduce of a contiguous tensor, on values that gloo reduces correctly."""
    if not whole.numel():
        return [], None
    values = to_gloo(whole, op)

    def complete() -> None:
        result = from_gloo(values, whole.dtype, op, num_members)
        if result is not whole:
            whole.copy_(result)

    return [start_all_reduce(gloo, values, op)], complete


def start_all_reduce(gloo: GlooProcessGroup, whole: Tensor, op: Reduction) -> GlooWork:
    """Start gloo's own all-reduce."""
    options = AllreduceOptions()
    options.timeout = GLOO_TIMEOUT
    options.reduceOp = REDUCE_OPS[op]  # type: ignore[assignment]  # torch's types know only its class
    return gloo.allreduce([whole], options)


def gloo_all_to_all(
    gloo: GlooProcessGroup, outputs: Sequence[Tensor], inputs: Sequence[Tensor], max_bytes: int, scratch: ScratchLease
) -> StartedOps:
    """Start to exchange bytes with every member.

    In each round a member sends to one other and receives from one, so that no link is shared by several senders::

        round 1: 0>1 1>2 2>3 3>0    round 2: 0>2 1>3 2>0 3>1    round 3: 0>3 1>0 2>1 3>2

    A large range is sent in chunks, several of which are in flight: in one piece, the two directions of a link would
    take turns. Small ranges go to all members at once.

    Args:
        gloo: the connection.
        outputs: the receive buffer for each member.
        inputs: the bytes for each member.
        max_bytes: the largest range between any two members, so that all members make the same rounds.
        scratch: cleared when the exchange is complete.
    """
    own_index, size = gloo.rank(), gloo.size()
    if outputs[own_index].data_ptr() != inputs[own_index].data_ptr():
        outputs[own_index].copy_(inputs[own_index])
    if size > 2 and max_bytes <= size * SMALL_BYTES:
        return gloo_all_to_all_small(gloo, outputs, inputs, scratch)
    works: list[GlooWork] = []
    for distance in range(1, size):
        target, source = (own_index + distance) % size, (own_index - distance) % size
        for start in range(0, max_bytes, CHUNK_BYTES):
            received, sent = outputs[source][start : start + CHUNK_BYTES], inputs[target][start : start + CHUNK_BYTES]
            incoming = [len(received) if member == source else 0 for member in range(size)]
            outgoing = [len(sent) if member == target else 0 for member in range(size)]
            works.append(start_all_to_all(gloo, received, sent, incoming, outgoing))
    return works, scratch.clear


def gloo_all_to_all_small(
    gloo: GlooProcessGroup, outputs: Sequence[Tensor], inputs: Sequence[Tensor], scratch: ScratchLease
) -> StartedOps:
    """Start to exchange bytes with all other members in one exchange.

    Cost:
        scratch memory for all bytes sent and received.
    """
    own_index = gloo.rank()
    others = [member for member in range(gloo.size()) if member != own_index]
    targets, to_send = [outputs[member] for member in others], [inputs[member] for member in others]
    sent = torch.cat(to_send, out=scratch.empty(sum(map(len, to_send)), torch.uint8))
    received = scratch.empty(sum(map(len, targets)), torch.uint8)
    incoming, outgoing = (
        [0 if index == own_index else len(buffer) for index, buffer in enumerate(buffers)]
        for buffers in (outputs, inputs)
    )

    def complete() -> None:
        for target, piece in zip(targets, torch.split(received, [len(buffer) for buffer in targets]), strict=True):
            target.copy_(piece)
        scratch.clear()

    return [start_all_to_all(gloo, received, sent, incoming, outgoing)], complete


def start_all_to_all(
    gloo: GlooProcessGroup, received: Tensor, sent: Tensor, incoming: list[int], outgoing: list[int]
) -> GlooWork:
    """Start gloo's own all-to-all with these split sizes, in bytes."""
    options = AllToAllOptions()
    options.timeout = GLOO_TIMEOUT
    return gloo.alltoall_base(received, sent, incoming, outgoing, options)


def gloo_all_gather(gloo: GlooProcessGroup, whole: Tensor, sizes: list[int], scratch: ScratchLease) -> StartedOps:
    """Start to replace each member's range of bytes by that member's.

    Every member sends its range to each other one, so that both directions of a link are in use; one broadcast after
    the other would leave one direction idle.

    Args:
        gloo: the connection.
        whole: all ranges, concatenated.
        sizes: of the ranges, in bytes.
        scratch: cleared when all ranges have arrived.
    """
    ranges = torch.split(whole, sizes)
    return gloo_all_to_all(gloo, ranges, [ranges[gloo.rank()]] * len(sizes), max(sizes), scratch)


def gloo_broadcast(gloo: GlooProcessGroup, part: Tensor, root: int) -> GlooWork:
    """Start to replace the bytes by those of member ``root``."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = root, 0, GLOO_TIMEOUT
    return gloo.broadcast([part], options)
