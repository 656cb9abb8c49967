"""A collective of several stages that follow each other while their rank computes.

All stages of one group that use the same connection must be started in one order on all members. So stages of one
number use the same connection in each collective, and none is started before the collective before has started its own
of that number.

What each collective does inside a host and between hosts, stage by stage.

Every collective has three stages or fewer: one inside the hosts, one between them, one inside. What goes between hosts
is cut into as many parts as the smallest host has members, and each part has one holder on each host.
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
    as_bytes,
    gloo_all_gather,
    gloo_all_reduce,
    gloo_all_to_all,
    gloo_broadcast,
)
from counterpoint.fabric.hosts.layout import HostLayout
from counterpoint.fabric.local_collective import reduce_in_order
from counterpoint.fabric.shm.native import CollectiveKind
from counterpoint.fabric.shm.transport import ShmFabric

MAX_WAIT_S = 0.01  # so long a wait for one stage may keep from looking at the others


class StartedStage(Protocol):
    """A stage that has been started."""

    def is_done(self) -> bool:
        """Whether it is complete; a PeerError or a RuntimeError where it cannot be."""

    def wait_for(self, seconds: float) -> None:
        """It is over in whatever way, or so much time has passed."""


StartStage = Callable[[], StartedStage | None]


class NetworkStage:
    """What has been started on a connection, and what is to be done after it."""

    def __init__(self, works: Sequence[GlooWork], after: Callable[[], object] | None = None) -> None:
        self._works = works
        self._after = after

    def is_done(self) -> bool:
        """Whether all is complete."""
        if not all(work.is_completed() for work in self._works):
            return False
        for work in self._works:
            wait_within(work, WAIT_SLICE_S)  # raises what went wrong
        if self._after is not None:
            self._after()
            self._after = None
        return True

    def wait_for(self, seconds: float) -> None:
        """It is over in whatever way, or so much time has passed."""
        for work in self._works:
            if not work.is_completed():
                try:
                    work.wait(timedelta(seconds=seconds))
                except RuntimeError:
                    return


class StagedCollective:
    """One collective of a route; it can be waited for as gloo's works are.

    Args:
        route: what it is one of.
        stages: what to start, one after the other; None as a result says that there is nothing to wait for.
    """

    def __init__(self, queue: StageQueue, stages: Sequence[StartStage]) -> None:
        self._queue = queue
        self._stages = deque(stages)
        self.num_started = 0
        self.pending: StartedStage | None = None
        self.is_done = False
        self._error: Exception | None = None

    def advance(self, max_stages: float) -> None:
        """Whatever can go on without waiting has gone on, but no more than so many stages have been started."""
        try:
            while self.pending is None or self.pending.is_done():
                self.pending = None
                if not self._stages:
                    self.is_done = True
                if self.is_done or self.num_started >= max_stages:
                    return
                self.num_started += 1
                self.pending = self._stages.popleft()()
        except Exception as error:  # noqa: BLE001 - whoever waits for the collective raises it
            self._error, self.pending, self.is_done = error, None, True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self.is_done

    def wait(self, timeout: timedelta) -> bool:
        """It is complete; a RuntimeError where it is not by then."""
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
    """The collectives of one group that have been launched and are not over."""

    def __init__(self) -> None:
        self._works: deque[StagedCollective] = deque()
        self._lock = Lock()

    def add(self, stages: Sequence[StartStage]) -> StagedCollective:
        """Return the collective, its first stage started."""
        work = StagedCollective(self, stages)
        with self._lock:
            self._works.append(work)
        self.advance()
        return work

    def advance(self) -> bool:
        """Whatever can go on without waiting has gone on; return whether anything is left."""
        with self._lock:
            most = inf
            for work in self._works:
                work.advance(most)
                most = inf if work.is_done else work.num_started
            self._works = deque(work for work in self._works if not work.is_done)
            return bool(self._works)

    def wait_for(self, seconds: float) -> None:
        """The oldest stage under way is over, or so much time has passed."""
        pending = next((work.pending for work in list(self._works) if work.pending is not None), None)
        if pending is not None:
            pending.wait_for(seconds)


IN, OUT = "in", "out"  # the channels of a group inside a host: towards other hosts, and back


class IntraHost:
    """The members of a group on one host.

    Args:
        near: the memory they share; None for a rank that is alone.
        layout: where the group is.
    """

    def __init__(self, shm: ShmFabric | None, layout: HostLayout) -> None:
        self._shm = shm if len(layout.local_members) > 1 else None
        self._layout = layout
        self._name = ".".join(map(str, layout.group))

    def open(self) -> None:
        """Their channels exist; all of them have come."""
        if self._shm is not None:
            for channel in (IN, OUT):
                self._shm.open_channel(self._layout.local_members, f"{channel} {self._name}")

    def empty(self, like: Tensor) -> Tensor:
        """Return a tensor in memory that they share, where they do."""
        return self._shm.empty(like.numel(), like.dtype) if self._shm is not None else torch.empty_like(like)

    def start(
        self,
        channel: str,
        kind: CollectiveKind,
        operation: CollectiveSignature,
        whole: Tensor,
        bounds: Sequence[int] = (),
    ) -> StartedStage | None:
        """Start one of the library's collectives; errors name the operation, of which it is a part."""
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
    """Each host shares its sum among its members, the holders of each part complete it, each host gathers.

    Args:
        operation: as errors name it.
        whole: flat and contiguous.
        verb: how numbers become one; a mean is a sum that its holders scale.
        inside: the members on this host.
        across: the holders of this member's part.

    Source:
        Cho et al., BlueConnect, decomposing all-reduce for deep learning on heterogeneous network hierarchy, 2019.
    """
    layout = inter.layout
    edges = layout.part_bounds(whole.numel())
    part = whole[edges[layout.local_index] : edges[layout.local_index + 1]]
    plain = replace(operation, kind=operation.kind.replace("mean", "sum"))

    def share() -> StartedStage | None:
        return intra.start(IN, CollectiveKind.REDUCE_SCATTER, plain, whole, edges)

    def complete() -> StartedStage | None:
        return (
            NetworkStage(*gloo_all_reduce(inter.gloo, part, op, len(layout.group)))
            if inter.gloo is not None and len(part)
            else None
        )

    def gather() -> StartedStage | None:
        return intra.start(OUT, CollectiveKind.ALL_GATHER, plain, whole, edges)

    return [share, complete, gather]


def reduce_scatter(
    operation: CollectiveSignature, whole: Tensor, op: Reduction, intra: IntraHost, inter: InterHost
) -> list[StartStage]:
    """Each host shares its sum, those of equal places exchange their ranges of it; hosts have equally many members."""
    layout = inter.layout
    slabs = layout.host_major(operation.bounds)
    index = layout.group.index(layout.local_members[layout.local_index])
    own = whole[operation.bounds[index] : operation.bounds[index + 1]]
    plain = replace(operation, kind=operation.kind.replace("mean", "sum"))
    turned = intra.empty(whole)
    desk = ScratchLease(inter.scratch_pool)
    parts = desk.empty(len(layout.hosts) * len(own), own.dtype).view(len(layout.hosts), -1)

    def share() -> StartedStage | None:
        for (start, stop), at in zip(slabs.ranges, slabs.offsets, strict=False):
            turned[at : at + stop - start] = whole[start:stop]
        return intra.start(IN, CollectiveKind.REDUCE_SCATTER, plain, turned, slabs.bounds)

    def complete() -> StartedStage | None:
        pieces = slabs.slab_ranges(layout.local_index)
        slab = turned[pieces[0][0] : pieces[-1][1]]
        sizes = [(stop - start) * whole.element_size() for start, stop in pieces]
        gives = torch.split(as_bytes(slab), sizes)
        into = [as_bytes(part) for part in parts]
        return NetworkStage(
            *gloo_all_to_all(require_connection(inter.gloo), into, gives, max(sizes), ScratchLease(inter.scratch_pool))
        )

    def finish() -> None:
        own.copy_(reduce_in_order(list(parts), "sum" if op == "mean" else op))
        if op == "mean":
            own.mul_(1 / len(layout.group))
        desk.clear()

    return [share, complete, finish]


def all_gather(operation: CollectiveSignature, whole: Tensor, intra: IntraHost, inter: InterHost) -> list[StartStage]:
    """Those of equal places exchange their ranges, each host gathers; hosts have equally many members."""
    layout = inter.layout
    slabs = layout.host_major(operation.bounds)
    index = layout.group.index(layout.local_members[layout.local_index])
    turned = intra.empty(whole)

    def exchange() -> StartedStage | None:
        """Those of equal places have each other's ranges."""
        pieces = slabs.slab_ranges(layout.local_index)
        start, stop = pieces[layout.host_index]
        turned[start:stop] = whole[operation.bounds[index] : operation.bounds[index + 1]]
        sizes = [(b - a) * whole.element_size() for a, b in pieces]
        slab = as_bytes(turned[pieces[0][0] : pieces[-1][1]])
        if not len(slab):
            return None
        return NetworkStage(
            *gloo_all_gather(require_connection(inter.gloo), slab, sizes, ScratchLease(inter.scratch_pool))
        )

    def gather() -> StartedStage | None:
        return intra.start(OUT, CollectiveKind.ALL_GATHER, operation, turned, slabs.bounds)

    def finish() -> None:
        for (start, stop), at in zip(slabs.ranges, slabs.offsets, strict=False):
            whole[start:stop] = turned[at : at + stop - start]

    return [noop_stage, exchange, gather, finish]


def broadcast(operation: CollectiveSignature, whole: Tensor, intra: IntraHost, inter: InterHost) -> list[StartStage]:
    """The root's host has the value, the first member of each other host gets it, each of these hosts has it."""
    layout = inter.layout
    source = next(number for number, host in enumerate(layout.hosts) if operation.root in host)

    def at_root() -> StartedStage | None:
        return intra.start(IN, CollectiveKind.BROADCAST, operation, whole) if source == layout.host_index else None

    def between() -> StartedStage | None:
        is_first = layout.local_index == 0 and whole.numel()
        return (
            NetworkStage([gloo_broadcast(require_connection(inter.gloo), as_bytes(whole), source)])
            if is_first
            else None
        )

    def elsewhere() -> StartedStage | None:
        from_first = replace(operation, root=layout.local_members[0])
        return intra.start(OUT, CollectiveKind.BROADCAST, from_first, whole) if source != layout.host_index else None

    return [at_root, between, elsewhere]


def noop_stage() -> None:
    """Keep a place in the order of stages."""
    return


class InterHost:
    """The holders of one part of a group's values.

    Args:
        layout: where the group is.
        gloo: their connection; None where this member holds no part.
        workspace: memory that their exchanges work in.
    """

    def __init__(self, layout: HostLayout, gloo: GlooProcessGroup | None, scratch_pool: ScratchPool) -> None:
        self.layout = layout
        self.gloo = gloo
        self.scratch_pool = scratch_pool


def require_connection(gloo: GlooProcessGroup | None) -> GlooProcessGroup:
    """Return the connection of a member that holds a part."""
    assert gloo is not None, "every member of an even group holds a part"
    return gloo
