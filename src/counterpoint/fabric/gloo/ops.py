"""What gloo is given instead of numbers that it would get wrong: it rounds 16-bit sums at every step and loses NaN.

Memory that collectives work in: what one has done with the next one takes.

A step asks for the same memory as the one before. What a thread beside the first one asks for in large blocks, glibc
has from the kernel, page by page, and gives it back as soon as it is freed, whatever else it was told to keep.

Collectives that gloo carries out on one connection, started on the bytes of contiguous tensors.
"""

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

LOW_PRECISION = {torch.bfloat16, torch.float16}
SAME_WIDTH_INT = {torch.float32: torch.int32, torch.float64: torch.int64}  # as wide


def to_gloo(tensor: Tensor, op: Reduction) -> Tensor:
    """Return what gloo reduces: the tensor, contiguous; or wider numbers; or whole ones in the order of the floats.

    gloo compares floats with ``<``, of which NaN is neither side, so that it depends on the order of the ranks whether
    it wins. Whole numbers that are in the same order, NaN at the winning end, are compared right.

    Args:
        tensor: of any dtype that can be reduced.
        verb: how.
    """
    wide = upcast(tensor)
    if op in {"sum", "mean"} or wide.dtype not in SAME_WIDTH_INT:
        return wide
    keys = float_order_bits(wide.view(SAME_WIDTH_INT[wide.dtype]))
    limits = torch.iinfo(keys.dtype)
    return keys.masked_fill_(wide.isnan(), limits.max if op == "max" else limits.min)


def upcast(tensor: Tensor) -> Tensor:
    """Return the tensor, contiguous; in 32 bits where it has fewer, so that a sum is rounded once, at its end."""
    return tensor.float().contiguous() if tensor.dtype in LOW_PRECISION else tensor.contiguous()


def from_gloo(reduced: Tensor, dtype: torch.dtype, op: Reduction, num_ranks: int) -> Tensor:
    """Return the result in the tensor's dtype.

    Args:
        reduced: what gloo has made of everybody's :func:`given`.
        dtype: of the tensor.
        verb: how.
        num_ranks: a mean is scaled by.
    """
    if op == "mean":
        reduced *= 1 / num_ranks
    elif op != "sum" and dtype.is_floating_point:
        floats = {whole: wide for wide, whole in SAME_WIDTH_INT.items()}
        reduced = float_order_bits(reduced).view(floats[reduced.dtype])
    return reduced.to(dtype)


def float_order_bits(bits: Tensor) -> Tensor:
    """Return the bits of floats as whole numbers in their order, and these as bits again: it is its own inverse."""
    num_bits = 8 * bits.element_size()
    return bits ^ ((bits >> (num_bits - 1)) & torch.iinfo(bits.dtype).max)


MIN_POOLED_BYTES: Final = 1 << 16
"""Smaller memory is not worth the looking for it."""
MAX_OVERSIZE_FACTOR: Final = 2
"""Memory is taken for what needs at least this part of it."""


class ScratchPool:
    """Memory of one fabric, for whatever thread goes on with its collectives; at most what was in use at once."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []  # the one that was given back first comes first
        self._in_use_bytes = self._peak_bytes = 0
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """Memory that waits for another collective."""
        return sum(one.numel() for one in self._free)

    def acquire(self, num_bytes: int) -> Tensor:
        """Return so many bytes or more, flat; what is in them is not defined."""
        with self._lock:
            fitting = [
                at for at, one in enumerate(self._free) if num_bytes <= one.numel() <= MAX_OVERSIZE_FACTOR * num_bytes
            ]
            least = min(fitting, key=lambda at: self._free[at].numel(), default=None)
            found = torch.empty(num_bytes, dtype=torch.uint8) if least is None else self._free.pop(least)
            self._in_use_bytes += found.numel()
            self._peak_bytes = max(self._peak_bytes, self._in_use_bytes)
            return found

    def release(self, buffers: Iterable[Tensor]) -> None:
        """Others can have this memory, which nobody looks at any more."""
        with self._lock:
            for one in buffers:
                self._in_use_bytes -= one.numel()
                self._free.append(one)
            while self.num_bytes + self._in_use_bytes > self._peak_bytes:
                del self._free[0]


class ScratchLease:
    """What one collective works in, until it is cleared.

    Args:
        workspace: where its memory is from.
    """

    def __init__(self, pool: ScratchPool) -> None:
        self._pool = pool
        self._buffers: list[Tensor] = []

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor, of which nothing may be seen once the desk is cleared."""
        num_bytes = num_elements * dtype.itemsize
        if num_bytes < MIN_POOLED_BYTES:
            return torch.empty(num_elements, dtype=dtype)
        self._buffers.append(self._pool.acquire(num_bytes))
        return self._buffers[-1][:num_bytes].view(dtype)

    def clear(self) -> None:
        """The collective is complete, and the next one has its memory."""
        self._pool.release(self._buffers)
        self._buffers.clear()


StartedOps = tuple[list[GlooWork], Callable[[], object] | None]  # what is under way, and what is to be done after it

CHUNK_BYTES: Final = 1 << 21
"""So much goes to another member at a time."""
SMALL_BYTES: Final = 1 << 14
"""For each member; so much goes to all members at once, for each exchange costs a word to everybody."""
REDUCE_OPS: Final = {"sum": ReduceOp.SUM, "mean": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}


def gloo_all_reduce(gloo: GlooProcessGroup, whole: Tensor, op: Reduction, num_members: int) -> StartedOps:
    """Start gloo's own all-reduce of so many members, where there is anything to add, on numbers that it gets right."""
    if not whole.numel():
        return [], None
    numbers = to_gloo(whole, op)

    def complete() -> None:
        result = from_gloo(numbers, whole.dtype, op, num_members)
        if result is not whole:
            whole.copy_(result)

    return [start_all_reduce(gloo, numbers, op)], complete


def start_all_reduce(gloo: GlooProcessGroup, whole: Tensor, op: Reduction) -> GlooWork:
    """Start an all-reduce as gloo does it."""
    options = AllreduceOptions()
    options.timeout = GLOO_TIMEOUT
    options.reduceOp = REDUCE_OPS[op]  # type: ignore[assignment]  # torch's types know only its class
    return gloo.allreduce([whole], options)


def gloo_all_to_all(
    gloo: GlooProcessGroup, outputs: Sequence[Tensor], inputs: Sequence[Tensor], max_bytes: int, scratch: ScratchLease
) -> StartedOps:
    """Start to exchange bytes with every member.

    Each member gives to one other at a time, and takes from one, so that several never fill the link to the same one.
    What goes between two goes in pieces, of which gloo carries some at a time: in one go the two directions of a link
    take turns. Little goes to all at once.

    Args:
        gloo: the connection.
        takes: for each member the place of what comes from it.
        gives: for each member what it gets.
        longest: of all that any member gets from any other, so that all members cut alike.
        desk: what it works in; it is cleared when the exchange is complete.
    """
    own, size = gloo.rank(), gloo.size()
    outputs[own].copy_(inputs[own])
    if size > 2 and max_bytes <= size * SMALL_BYTES:
        return gloo_all_to_all_small(gloo, outputs, inputs, scratch)
    works: list[GlooWork] = []
    for away in range(1, size):
        to, source = (own + away) % size, (own - away) % size
        for low in range(0, max_bytes, CHUNK_BYTES):
            room, part = outputs[source][low : low + CHUNK_BYTES], inputs[to][low : low + CHUNK_BYTES]
            incoming = [len(room) if member == source else 0 for member in range(size)]
            outgoing = [len(part) if member == to else 0 for member in range(size)]
            works.append(start_all_to_all(gloo, room, part, incoming, outgoing))
    return works, scratch.clear


def gloo_all_to_all_small(
    gloo: GlooProcessGroup, outputs: Sequence[Tensor], inputs: Sequence[Tensor], scratch: ScratchLease
) -> StartedOps:
    """Start to exchange bytes with all other members in one go.

    Cost:
        memory of what is sent and received.
    """
    own = gloo.rank()
    others = [member for member in range(gloo.size()) if member != own]
    into, parts = [outputs[member] for member in others], [inputs[member] for member in others]
    part = torch.cat(parts, out=scratch.empty(sum(map(len, parts)), torch.uint8))
    room = scratch.empty(sum(map(len, into)), torch.uint8)
    incoming, outgoing = ([0 if at == own else len(one) for at, one in enumerate(ones)] for ones in (outputs, inputs))

    def complete() -> None:
        for target, found in zip(into, torch.split(room, [len(one) for one in into]), strict=True):
            target.copy_(found)
        scratch.clear()

    return [start_all_to_all(gloo, room, part, incoming, outgoing)], complete


def start_all_to_all(
    gloo: GlooProcessGroup, received: Tensor, sent: Tensor, incoming: list[int], outgoing: list[int]
) -> GlooWork:
    """Start gloo's own exchange: how many bytes come from each member, and how many go to each."""
    options = AllToAllOptions()
    options.timeout = GLOO_TIMEOUT
    return gloo.alltoall_base(received, sent, incoming, outgoing, options)


def gloo_all_gather(gloo: GlooProcessGroup, whole: Tensor, sizes: list[int], scratch: ScratchLease) -> StartedOps:
    """Start to replace each member's range of bytes by what that member has there.

    Every member sends its own to each other one at the same time, so that both directions of a link are in use; ranges
    spread one after the other would leave one idle.

    Args:
        gloo: the connection.
        whole: all ranges, one behind the other.
        sizes: of the ranges.
        desk: what it works in; it is cleared when the ranges are there.
    """
    ranges = torch.split(whole, sizes)
    return gloo_all_to_all(gloo, ranges, [ranges[gloo.rank()]] * len(sizes), max(sizes), scratch)


def gloo_broadcast(gloo: GlooProcessGroup, part: Tensor, root: int) -> GlooWork:
    """Start to replace the bytes by those of member ``root``."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = root, 0, GLOO_TIMEOUT
    return gloo.broadcast([part], options)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, in its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)
