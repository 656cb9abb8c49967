"""Typed view of torch's C++ process group classes, most of which torch's stubs omit."""

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
    "DataProcessGroup",
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


GLOO_TIMEOUT = timedelta(days=1)  # timeouts are applied where a rank waits; gloo's would also run while none does


class GlooWork(Protocol):
    """A torch ``Work`` of gloo: waits and errors raise RuntimeError."""

    def wait(self, timeout: timedelta) -> bool:
        """Block until complete.

        An expired wait leaves a collective running, but closes all connections of a message's group.
        """

    def is_completed(self) -> bool:
        """Whether a collective has ended, with or without an error; always False for a message without a wait."""


class DeviceWork(GlooWork, Protocol):
    """An operation on tensors of a device."""

    def block_current_stream(self) -> None:
        """Make the current stream wait until it is complete."""


class GlooAnySourceWork(GlooWork, Protocol):
    """A receive from any source."""

    def _source_rank(self) -> int: ...


class GlooProcessGroup(Protocol):
    """A torch ``ProcessGroupGloo``; ranks are indices in the group.

    Attributes:
        alltoall_base: start an all-to-all: output, input, output split sizes, input split sizes.
    """

    alltoall_base: Callable[[Tensor, Tensor, list[int], list[int], AllToAllOptions], GlooWork]

    def rank(self) -> int:
        """Return the own index in the group."""

    def size(self) -> int:
        """Return the number of members."""

    def send(self, tensors: Sequence[Tensor], dst_rank: int, tag: int, /) -> GlooWork:
        """Start to send."""

    def recv(self, tensors: Sequence[Tensor], src_rank: int, tag: int, /) -> GlooWork:
        """Start to receive."""

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int, /) -> GlooAnySourceWork:
        """Start to receive from any source."""

    def allreduce(self, tensors: Sequence[Tensor], opts: AllreduceOptions, /) -> GlooWork:
        """Start an all-reduce."""

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: AllgatherOptions, /
    ) -> GlooWork:
        """Start an all-gather."""

    def broadcast(self, tensors: Sequence[Tensor], opts: BroadcastOptions, /) -> GlooWork:
        """Start a broadcast."""


class DataProcessGroup(GlooProcessGroup, Protocol):
    """Any process group of c10d; ranks are indices in the group."""

    _allgather_base: Callable[[Tensor, Tensor, AllgatherOptions], GlooWork]
    _reduce_scatter_base: Callable[[Tensor, Tensor, ReduceScatterOptions], GlooWork]

    def abort(self) -> None:
        """End all that is pending with an error."""


def is_available() -> bool:
    """Return whether this build of torch has gloo."""
    return dist.is_available() and dist.is_gloo_available()
