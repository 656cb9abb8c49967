"""Collectives that gloo carries out on one connection, started on the bytes of contiguous tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from counterpoint.fabric.fabric import Verb
from counterpoint.fabric.gloo import (
    GLOO_TIMEOUT,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    Gloo,
    GlooWork,
    ReduceOp,
)  # fmt: skip
from counterpoint.fabric.gloo_numbers import given, restored
from counterpoint.fabric.workspace import Desk

Launched = tuple[list[GlooWork], Callable[[], object] | None]  # what is under way, and what is to be done after it

PIECE_BYTES: Final = 1 << 21
"""So much goes to another member at a time."""
LITTLE_BYTES: Final = 1 << 14
"""For each member; so much goes to all members at once, for each exchange costs a word to everybody."""
REDUCE_OPS: Final = {"sum": ReduceOp.SUM, "mean": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}


def add_up(gloo: Gloo, whole: Tensor, verb: Verb, num_members: int) -> Launched:
    """Start gloo's own all-reduce of so many members, where there is anything to add, on numbers that it gets right."""
    if not whole.numel():
        return [], None
    numbers = given(whole, verb)

    def complete() -> None:
        result = restored(numbers, whole.dtype, verb, num_members)
        if result is not whole:
            whole.copy_(result)

    return [reduced(gloo, numbers, verb)], complete


def reduced(gloo: Gloo, whole: Tensor, verb: Verb) -> GlooWork:
    """Start an all-reduce as gloo does it."""
    options = AllreduceOptions()
    options.timeout = GLOO_TIMEOUT
    options.reduceOp = REDUCE_OPS[verb]  # type: ignore[assignment]  # torch's types know only its class
    return gloo.allreduce([whole], options)


def swap(gloo: Gloo, takes: Sequence[Tensor], gives: Sequence[Tensor], longest: int, desk: Desk) -> Launched:
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
    takes[own].copy_(gives[own])
    if size > 2 and longest <= size * LITTLE_BYTES:
        return swap_at_once(gloo, takes, gives, desk)
    works: list[GlooWork] = []
    for away in range(1, size):
        to, source = (own + away) % size, (own - away) % size
        for low in range(0, longest, PIECE_BYTES):
            room, part = takes[source][low : low + PIECE_BYTES], gives[to][low : low + PIECE_BYTES]
            incoming = [len(room) if member == source else 0 for member in range(size)]
            outgoing = [len(part) if member == to else 0 for member in range(size)]
            works.append(exchanged(gloo, room, part, incoming, outgoing))
    return works, desk.clear


def swap_at_once(gloo: Gloo, takes: Sequence[Tensor], gives: Sequence[Tensor], desk: Desk) -> Launched:
    """Start to exchange bytes with all other members in one go.

    Cost:
        memory of what is sent and received.
    """
    own = gloo.rank()
    others = [member for member in range(gloo.size()) if member != own]
    into, parts = [takes[member] for member in others], [gives[member] for member in others]
    part = torch.cat(parts, out=desk.empty(sum(map(len, parts)), torch.uint8))
    room = desk.empty(sum(map(len, into)), torch.uint8)
    incoming, outgoing = ([0 if at == own else len(one) for at, one in enumerate(ones)] for ones in (takes, gives))

    def complete() -> None:
        for target, found in zip(into, torch.split(room, [len(one) for one in into]), strict=True):
            target.copy_(found)
        desk.clear()

    return [exchanged(gloo, room, part, incoming, outgoing)], complete


def exchanged(gloo: Gloo, received: Tensor, sent: Tensor, incoming: list[int], outgoing: list[int]) -> GlooWork:
    """Start gloo's own exchange: how many bytes come from each member, and how many go to each."""
    options = AllToAllOptions()
    options.timeout = GLOO_TIMEOUT
    return gloo.alltoall_base(received, sent, incoming, outgoing, options)


def collect(gloo: Gloo, whole: Tensor, sizes: list[int], desk: Desk) -> Launched:
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
    return swap(gloo, ranges, [ranges[gloo.rank()]] * len(sizes), max(sizes), desk)


def spread(gloo: Gloo, part: Tensor, root: int) -> GlooWork:
    """Start to replace the bytes by those of member ``root``."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = root, 0, GLOO_TIMEOUT
    return gloo.broadcast([part], options)


def raw(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, in its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)
