"""Hierarchical collectives: a stage within each host, a stage between hosts, and another within each host.

::

    all_reduce on hosts (0 1) and (2 3)        stage 1, shm        stage 2, gloo       stage 3, shm
                                               reduce_scatter      all_reduce          all_gather
    host 0: rank 0, rank 1                     0: a   1: b         0 <-> 2: part a     0, 1: a b
    host 1: rank 2, rank 3                     2: a   3: b         1 <-> 3: part b     2, 3: a b

A value is divided between hosts into as many parts as the smallest host has members; each part has one owner per host.

All stages of one group that use one connection must start in the same order on all members. So the n-th stage of every
collective uses the same connection, and starts only after the n-th stage of the collective before it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from math import inf
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from counterpoint.fabric.c10d import GlooProcessGroup, GlooWork
from counterpoint.fabric.fabric import Reduction
from counterpoint.fabric.fingerprint import CollectiveSignature, dtype_name
from counterpoint.fabric.gloo.collective_queue import WAIT_SLICE_S, wait_within
from counterpoint.fabric.gloo.ops import (
    ScratchLease,
    ScratchPool,
    gloo_all_reduce,
    gloo_all_to_all,
    gloo_broadcast,
)
from counterpoint.fabric.hosts.layout import HostLayout
from counterpoint.fabric.reductions import reduce_in_order
from counterpoint.fabric.shm.native import CollectiveKind
from counterpoint.fabric.shm.transport import ShmFabric
from counterpoint.tensor_bytes import view_bytes

MAX_WAIT_S = 0.01  # between two polls of all stages


class StartedStage(Protocol):
    """A stage that has been started."""

    def is_done(self) -> bool:
        """Whether it is complete; raise PeerError or RuntimeError if it cannot be."""

    def wait_for(self, seconds: float) -> None:
        """Wait at most ``seconds`` for it to end, well or not."""


StartStage = Callable[[], StartedStage | None]


class NetworkStage:
    """Works on a connection, and a callback for their completion."""

    def __init__(self, works: Sequence[GlooWork], after: Callable[[], object] | None = None) -> None:
        self._works = works
        self._after = after

    def is_done(self) -> bool:
        """Whether all works are complete."""
        if not all(work.is_completed() for work in self._works):
            return False
        for work in self._works:
            wait_within(work, WAIT_SLICE_S)  # raises its error
        if self._after is not None:
            self._after()
            self._after = None
        return True

    def wait_for(self, seconds: float) -> None:
        """Wait at most ``seconds`` per pending work."""
        for work in self._works:
            if not work.is_completed():
                try:
                    work.wait(timedelta(seconds=seconds))
                except RuntimeError:
                    return


class StagedCollective:
    """A collective of several stages; it has the methods of gloo's works.

    Args:
        queue: that it belongs to.
        stages: started one after the other; a stage that returns None has nothing to wait for.
    """

    def __init__(self, queue: StageQueue, stages: Sequence[StartStage]) -> None:
        self._queue = queue
        self._stages = deque(stages)
        self.num_started = 0
        self.pending: StartedStage | None = None
        self.is_done = False
        self._error: Exception | None = None

    def advance(self, max_stages: float) -> None:
        """Start stages without waiting, until ``max_stages`` have been started."""
        try:
            while self.pending is None or self.pending.is_done():
                self.pending = None
                if not self._stages:
                    self.is_done = True
                if self.is_done or self.num_started >= max_stages:
                    return
                self.num_started += 1
                self.pending = self._stages.popleft()()
        except Exception as error:  # noqa: BLE001 - raised by the wait for the collective
            self._error, self.pending, self.is_done = error, None, True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self.is_done

    def wait(self, timeout: timedelta) -> bool:
        """Block until complete; raise RuntimeError at the timeout."""
        end = time.monotonic() + timeout.total_seconds()
        self._queue.advance()
        while not self.is_completed():
            left = end - time.monotonic()
            if left <= 0:
                raise RuntimeError("not yet")
            self._queue.wait_for(min(left, MAX_WAIT_S))
            self._queue.advance()
        if self._error is not None:
            raise self._error
        return True


class StageQueue:
    """The collectives of one group that are in progress."""

    def __init__(self) -> None:
        self._works: deque[StagedCollective] = deque()
        self._lock = Lock()

    def add(self, stages: Sequence[StartStage]) -> StagedCollective:
        """Start a collective; return it."""
        work = StagedCollective(self, stages)
        with self._lock:
            self._works.append(work)
        self.advance()
        return work

    def advance(self) -> bool:
        """Advance all collectives without waiting; return whether any is left."""
        with self._lock:
            max_stages = inf
            for work in self._works:
                work.advance(max_stages)
                max_stages = inf if work.is_done else work.num_started
            self._works = deque(work for work in self._works if not work.is_done)
            return bool(self._works)

    def wait_for(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the oldest pending stage."""
        pending = next((work.pending for work in list(self._works) if work.pending is not None), None)
        if pending is not None:
            pending.wait_for(seconds)


IN, OUT = "in", "out"  # channels of a group within a host: before and after the stage between hosts


class IntraHost:
    """The members of a group on one host.

    Args:
        shm: their shared memory; None for a rank without any.
        layout: placement of the group.
    """

    def __init__(self, shm: ShmFabric | None, layout: HostLayout) -> None:
        self._shm = shm if len(layout.local_members) > 1 else None
        self._layout = layout
        self._name = ".".join(map(str, layout.group))

    def open(self) -> None:
        """Open their channels; all local members call it."""
        if self._shm is not None:
            for channel in (IN, OUT):
                self._shm.open_channel(self._layout.local_members, f"{channel} {self._name}")

    def empty(self, like: Tensor) -> Tensor:
        """Return an uninitialized tensor, in shared memory if they have any."""
        return self._shm.empty(like.numel(), like.dtype) if self._shm is not None else torch.empty_like(like)

    def start(
        self,
        channel: str,
        kind: CollectiveKind,
        operation: CollectiveSignature,
        whole: Tensor,
        bounds: Sequence[int] = (),
    ) -> StartedStage | None:
        """Start a collective of the local members; errors name the operation that it is a part of."""
        if self._shm is None:
            return None
        part = replace(
            operation, group=self._layout.local_members, dtype=dtype_name(whole.dtype), shape=tuple(whole.shape),
            bounds=tuple(bounds), channel=f"{channel} {self._name}",
        )  # fmt: skip
        return self._shm.start_on_channel(kind, part, whole, bounds)


def all_reduce(
    operation: CollectiveSignature, whole: Tensor, op: Reduction, intra: IntraHost, inter: InterHost
) -> list[StartStage]:
    """Return the stages: reduce-scatter within hosts, all-reduce of each part between hosts, all-gather within hosts.

    Args:
        operation: for errors.
        whole: flat and contiguous.
        op: the reduction; a mean is scaled between hosts.
        intra: the members on this host.
        inter: the owners of this member's part.

    Source:
        Cho et al., BlueConnect, decomposing all-reduce for deep learning on heterogeneous network hierarchy, 2019.
    """
    layout = inter.layout
    bounds = layout.part_bounds(whole.numel())
    part = whole[bounds[layout.local_index] : bounds[layout.local_index + 1]]
    sum_operation = replace(operation, kind=operation.kind.replace("mean", "sum"))

    def reduce_scatter_parts() -> StartedStage | None:
        return intra.start(IN, CollectiveKind.REDUCE_SCATTER, sum_operation, whole, bounds)

    def all_reduce_part() -> StartedStage | None:
        return (
            NetworkStage(*gloo_all_reduce(inter.gloo, part, op, len(layout.group)))
            if inter.gloo is not None and len(part)
            else None
        )

    def all_gather_parts() -> StartedStage | None:
        return intra.start(OUT, CollectiveKind.ALL_GATHER, sum_operation, whole, bounds)

    return [reduce_scatter_parts, all_reduce_part, all_gather_parts]


def reduce_scatter(
    operation: CollectiveSignature, whole: Tensor, op: Reduction, intra: IntraHost, inter: InterHost
) -> list[StartStage]:
    """Return the stages: reduce-scatter within hosts, then an exchange in which each host sends each range once.

    What hosts exchange has the dtype of the tensor, so that a 16-bit sum is rounded twice: that of a host before it is
    sent, and that of all hosts. A mean is one of means, and needs equally many members on all hosts.
    """
    layout, exchange = inter.layout, RangeExchange(inter, operation.bounds)
    start, stop = exchange.range_of(layout.rank)
    own_range, reordered = whole[start:stop], intra.empty(whole)
    scratch = ScratchLease(inter.scratch_pool)
    parts = scratch.empty(len(layout.hosts) * len(own_range), own_range.dtype).view(len(layout.hosts), -1)

    def reduce_scatter_slabs() -> StartedStage | None:
        for (low, high), at in zip(exchange.slabs.ranges, exchange.slabs.offsets, strict=False):
            reordered[at : at + high - low] = whole[low:high]
        return intra.start(IN, CollectiveKind.REDUCE_SCATTER, operation, reordered, exchange.slabs.bounds)

    def exchange_ranges() -> StartedStage | None:
        sent = [
            exchange.slab_range(reordered, member) if member in exchange.targets else reordered[:0]
            for member in layout.neighbors
        ]
        host_of, nothing = exchange.sources, own_range[:0]
        received = [parts[host_of[member]] if member in host_of else nothing for member in layout.neighbors]
        return exchange.start(received, sent)

    def finish() -> None:
        own_range.copy_(reduce_in_order(list(parts), op))
        scratch.clear()

    return [reduce_scatter_slabs, exchange_ranges, finish]


def all_gather(operation: CollectiveSignature, whole: Tensor, intra: IntraHost, inter: InterHost) -> list[StartStage]:
    """Return the stages: an exchange in which each host receives each range once, all-gather within hosts."""
    layout, exchange = inter.layout, RangeExchange(inter, operation.bounds)
    reordered = intra.empty(whole)

    def exchange_ranges() -> StartedStage | None:
        own_range = exchange.slab_range(reordered, layout.rank)
        start, stop = exchange.range_of(layout.rank)
        own_range.copy_(whole[start:stop])
        sent = [own_range if member in exchange.sources else own_range[:0] for member in layout.neighbors]
        received = [
            exchange.slab_range(reordered, member) if member in exchange.targets else own_range[:0]
            for member in layout.neighbors
        ]
        return exchange.start(received, sent)

    def all_gather_slabs() -> StartedStage | None:
        return intra.start(OUT, CollectiveKind.ALL_GATHER, operation, reordered, exchange.slabs.bounds)

    def finish() -> None:
        for (low, high), at in zip(exchange.slabs.ranges, exchange.slabs.offsets, strict=False):
            whole[low:high] = reordered[at : at + high - low]

    return [noop_stage, exchange_ranges, all_gather_slabs, finish]


class RangeExchange:
    """An exchange of members' ranges between hosts, among the neighbors of one member.

    Args:
        inter: their connection.
        bounds: of the ranges of all members.

    Attributes:
        slabs: where the ranges are on this host.
        targets: the members whose ranges this one exchanges for its host, and itself.
        sources: for this member's range the one of each host that exchanges it, and the number of the host.
    """

    def __init__(self, inter: InterHost, bounds: Sequence[int]) -> None:
        self._inter, self._bounds, layout = inter, bounds, inter.layout
        self.slabs = layout.slabs(bounds)
        self.targets = layout.slab_members(layout.local_index)
        own_host = layout.host_index
        self.sources = {
            layout.rank if number == own_host else host[layout.part]: number for number, host in enumerate(layout.hosts)
        }

    def range_of(self, member: int) -> tuple[int, int]:
        """Return the start and end of a member's range in the whole."""
        index = self._inter.layout.group.index(member)
        return self._bounds[index], self._bounds[index + 1]

    def slab_range(self, reordered: Tensor, member: int) -> Tensor:
        """Return the view of a member's range in a tensor in the order of the slabs."""
        start, stop = self.slabs.place_of(member)
        return reordered[start:stop]

    def start(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> StartedStage:
        """Start to exchange one tensor with each neighbor."""
        ranges = [self.range_of(member) for member in self._inter.layout.neighbors]
        max_bytes = max(stop - start for start, stop in ranges) * sent[0].element_size()
        scratch = ScratchLease(self._inter.scratch_pool)
        outputs, inputs = list(map(view_bytes, received)), list(map(view_bytes, sent))
        return NetworkStage(*gloo_all_to_all(self._inter.ranges, outputs, inputs, max_bytes, scratch))


def broadcast(operation: CollectiveSignature, whole: Tensor, intra: IntraHost, inter: InterHost) -> list[StartStage]:
    """Return the stages: broadcast on the root's host, to the first member of each other host, and on those hosts."""
    layout = inter.layout
    root_host = next(number for number, host in enumerate(layout.hosts) if operation.root in host)

    def on_root_host() -> StartedStage | None:
        return intra.start(IN, CollectiveKind.BROADCAST, operation, whole) if root_host == layout.host_index else None

    def between_hosts() -> StartedStage | None:
        is_first = layout.local_index == 0 and whole.numel()
        return (
            NetworkStage([gloo_broadcast(require_connection(inter.gloo), view_bytes(whole), root_host)])
            if is_first
            else None
        )

    def on_other_hosts() -> StartedStage | None:
        from_first = replace(operation, root=layout.local_members[0])
        return intra.start(OUT, CollectiveKind.BROADCAST, from_first, whole) if root_host != layout.host_index else None

    return [on_root_host, between_hosts, on_other_hosts]


def noop_stage() -> None:
    """Do nothing: a placeholder, so that later stages keep their number."""
    return


class InterHost:
    """The owners of one part of a group's values.

    Args:
        layout: placement of the group.
        gloo: their connection; None if this member owns no part.
        ranges: the connection of the member's neighbors, on uniform hosts the same.
        scratch_pool: memory for their exchanges.
    """

    def __init__(
        self, layout: HostLayout, gloo: GlooProcessGroup | None, ranges: GlooProcessGroup, scratch_pool: ScratchPool
    ) -> None:
        self.layout = layout
        self.gloo = gloo
        self.ranges = ranges
        self.scratch_pool = scratch_pool


def require_connection(gloo: GlooProcessGroup | None) -> GlooProcessGroup:
    """Return the connection of a member that owns a part."""
    assert gloo is not None, "every member of a group on uniform hosts owns a part"
    return gloo
