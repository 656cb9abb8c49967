"""Collectives that gloo carries out on one connection, started on the bytes of contiguous tensors."""

from __future__ import annotations

from collections.abc import Callable
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

Launched = tuple[list[GlooWork], Callable[[], object] | None]  # what is under way, and what is to be done after it

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


def swap(gloo: Gloo, received: Tensor, sent: Tensor, incoming: list[int], outgoing: list[int]) -> GlooWork:
    """Start to exchange ranges of bytes with every member: how many come from each, and how many go to each."""
    options = AllToAllOptions()
    options.timeout = GLOO_TIMEOUT
    return gloo.alltoall_base(received, sent, incoming, outgoing, options)


def collect(gloo: Gloo, whole: Tensor, sizes: list[int], place: int) -> GlooWork:
    """Start to replace each member's range of bytes by what that member has there.

    Every member sends its own to each other one at the same time, so that both directions of a link are in use; ranges
    spread one after the other would leave one idle.

    Args:
        gloo: the connection.
        whole: all ranges, one behind the other.
        sizes: of the ranges.
        place: which of them is the own.

    Cost:
        memory of as many copies of the own range as there are members.
    """
    start = sum(sizes[:place])
    own = whole[start : start + sizes[place]]
    return swap(gloo, whole, own.repeat(len(sizes)), sizes, [len(own)] * len(sizes))


def spread(gloo: Gloo, part: Tensor, root: int) -> GlooWork:
    """Start to replace the bytes by those of member ``root``."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = root, 0, GLOO_TIMEOUT
    return gloo.broadcast([part], options)


def raw(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, in its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)
