"""What this room asks of gloo, with types: torch's stubs leave most of it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
    TCPStore,
)

__all__ = [
    "GLOO_TIMEOUT",
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "GatherOptions",
    "GlooProcessGroup",
    "GlooWork",
    "PrefixStore",
    "ProcessGroupGloo",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
    "Store",
    "TCPStore",
]


GLOO_TIMEOUT = timedelta(days=1)  # deadlines are ours: one of gloo's would run while nobody waits


class GlooWork(Protocol):
    """A torch ``Work``: its waits and its errors are RuntimeErrors."""

    def wait(self, timeout: timedelta) -> bool:
        """It is complete; expired waits leave a collective under way, but close all pairs of a message's connection."""

    def is_completed(self) -> bool:
        """Whether a collective has ended, well or not; always false for a message that nobody has waited for."""


class GlooAnySourceWork(GlooWork, Protocol):
    """A receive from whoever sends first."""

    def _source_rank(self) -> int: ...


class GlooProcessGroup(Protocol):
    """A torch ``ProcessGroupGloo``; ranks here are places in the group.

    Attributes:
        alltoall_base: start to exchange ranges of elements: output, input, the output's sizes, the input's sizes.
    """

    alltoall_base: Callable[[Tensor, Tensor, list[int], list[int], AllToAllOptions], GlooWork]

    def rank(self) -> int:
        """Return the own place."""

    def size(self) -> int:
        """Return the number of members."""

    def send(self, tensors: Sequence[Tensor], dst_rank: int, tag: int, /) -> GlooWork:
        """Start to send."""

    def recv(self, tensors: Sequence[Tensor], src_rank: int, tag: int, /) -> GlooWork:
        """Start to receive."""

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int, /) -> GlooAnySourceWork:
        """Start to receive from whoever sends first."""

    def allreduce(self, tensors: Sequence[Tensor], opts: AllreduceOptions, /) -> GlooWork:
        """Start to add up."""

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: AllgatherOptions, /
    ) -> GlooWork:
        """Start to collect everybody's tensor."""

    def broadcast(self, tensors: Sequence[Tensor], opts: BroadcastOptions, /) -> GlooWork:
        """Start to copy the root's tensor."""


def is_available() -> bool:
    """Return whether this build of torch has gloo."""
    return dist.is_available() and dist.is_gloo_available()
