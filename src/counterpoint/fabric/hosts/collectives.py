"""What each collective does inside a host and between hosts, stage by stage.

Every collective has three stages or fewer: one inside the hosts, one between them, one inside. What goes between hosts
is cut into as many parts as the smallest host has members, and each part has one holder on each host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from counterpoint.fabric.encounter import reduce_in_order
from counterpoint.fabric.fabric import Verb
from counterpoint.fabric.fingerprint import Operation, dtype_name
from counterpoint.fabric.gloo import Gloo
from counterpoint.fabric.hosts.layout import Layout
from counterpoint.fabric.hosts.stages import OnWire, Pending, Stage
from counterpoint.fabric.shm.native import Kind
from counterpoint.fabric.shm.transport import ShmFabric
from counterpoint.fabric.wire import add_up, collect, raw, spread, swap
from counterpoint.fabric.workspace import Desk, Workspace

IN, OUT = "in", "out"  # the channels of a group inside a host: towards other hosts, and back


class Inside:
    """The members of a group on one host.

    Args:
        near: the memory they share; None for a rank that is alone.
        layout: where the group is.
    """

    def __init__(self, near: ShmFabric | None, layout: Layout) -> None:
        self._near = near if len(layout.here) > 1 else None
        self._layout = layout
        self._name = ".".join(map(str, layout.group))

    def open(self) -> None:
        """Their channels exist; all of them have come."""
        if self._near is not None:
            for channel in (IN, OUT):
                self._near.open_channel(self._layout.here, f"{channel} {self._name}")

    def empty(self, like: Tensor) -> Tensor:
        """Return a tensor in memory that they share, where they do."""
        return self._near.empty(like.numel(), like.dtype) if self._near is not None else torch.empty_like(like)

    def start(
        self, channel: str, kind: Kind, operation: Operation, whole: Tensor, bounds: Sequence[int] = ()
    ) -> Pending | None:
        """Start one of the library's collectives; errors name the operation, of which it is a part."""
        if self._near is None:
            return None
        part = replace(
            operation, group=self._layout.here, dtype=dtype_name(whole.dtype), shape=tuple(whole.shape),
            bounds=tuple(bounds), channel=f"{channel} {self._name}",
        )  # fmt: skip
        return self._near.begin(kind, part, whole, bounds)


def all_reduce(operation: Operation, whole: Tensor, verb: Verb, inside: Inside, across: Across) -> list[Stage]:
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
    layout = across.layout
    edges = layout.part_edges(whole.numel())
    part = whole[edges[layout.place] : edges[layout.place + 1]]
    plain = replace(operation, kind=operation.kind.replace("mean", "sum"))

    def share() -> Pending | None:
        return inside.start(IN, Kind.REDUCE_SCATTER, plain, whole, edges)

    def complete() -> Pending | None:
        return (
            OnWire(*add_up(across.gloo, part, verb, len(layout.group)))
            if across.gloo is not None and len(part)
            else None
        )

    def gather() -> Pending | None:
        return inside.start(OUT, Kind.ALL_GATHER, plain, whole, edges)

    return [share, complete, gather]


def reduce_scatter(operation: Operation, whole: Tensor, verb: Verb, inside: Inside, across: Across) -> list[Stage]:
    """Each host shares its sum, those of equal places exchange their ranges of it; hosts have equally many members."""
    layout = across.layout
    slabs = layout.slabs(operation.bounds)
    index = layout.group.index(layout.here[layout.place])
    own = whole[operation.bounds[index] : operation.bounds[index + 1]]
    plain = replace(operation, kind=operation.kind.replace("mean", "sum"))
    turned = inside.empty(whole)
    desk = Desk(across.workspace)
    parts = desk.empty(len(layout.hosts) * len(own), own.dtype).view(len(layout.hosts), -1)

    def share() -> Pending | None:
        for (start, stop), at in zip(slabs.ranges, slabs.edges, strict=False):
            turned[at : at + stop - start] = whole[start:stop]
        return inside.start(IN, Kind.REDUCE_SCATTER, plain, turned, slabs.bounds)

    def complete() -> Pending | None:
        pieces = slabs.pieces(layout.place)
        slab = turned[pieces[0][0] : pieces[-1][1]]
        sizes = [(stop - start) * whole.element_size() for start, stop in pieces]
        gives = torch.split(raw(slab), sizes)
        into = [raw(part) for part in parts]
        return OnWire(*swap(living(across.gloo), into, gives, max(sizes), Desk(across.workspace)))

    def finish() -> None:
        own.copy_(reduce_in_order(list(parts), "sum" if verb == "mean" else verb))
        if verb == "mean":
            own.mul_(1 / len(layout.group))
        desk.clear()

    return [share, complete, finish]


def all_gather(operation: Operation, whole: Tensor, inside: Inside, across: Across) -> list[Stage]:
    """Those of equal places exchange their ranges, each host gathers; hosts have equally many members."""
    layout = across.layout
    slabs = layout.slabs(operation.bounds)
    index = layout.group.index(layout.here[layout.place])
    turned = inside.empty(whole)

    def exchange() -> Pending | None:
        """Those of equal places have each other's ranges."""
        pieces = slabs.pieces(layout.place)
        start, stop = pieces[layout.home]
        turned[start:stop] = whole[operation.bounds[index] : operation.bounds[index + 1]]
        sizes = [(b - a) * whole.element_size() for a, b in pieces]
        slab = raw(turned[pieces[0][0] : pieces[-1][1]])
        if not len(slab):
            return None
        return OnWire(*collect(living(across.gloo), slab, sizes, Desk(across.workspace)))

    def gather() -> Pending | None:
        return inside.start(OUT, Kind.ALL_GATHER, operation, turned, slabs.bounds)

    def finish() -> None:
        for (start, stop), at in zip(slabs.ranges, slabs.edges, strict=False):
            whole[start:stop] = turned[at : at + stop - start]

    return [nothing, exchange, gather, finish]


def broadcast(operation: Operation, whole: Tensor, inside: Inside, across: Across) -> list[Stage]:
    """The root's host has the value, the first member of each other host gets it, each of these hosts has it."""
    layout = across.layout
    source = next(number for number, host in enumerate(layout.hosts) if operation.root in host)

    def at_root() -> Pending | None:
        return inside.start(IN, Kind.BROADCAST, operation, whole) if source == layout.home else None

    def between() -> Pending | None:
        is_first = layout.place == 0 and whole.numel()
        return OnWire([spread(living(across.gloo), raw(whole), source)]) if is_first else None

    def elsewhere() -> Pending | None:
        from_first = replace(operation, root=layout.here[0])
        return inside.start(OUT, Kind.BROADCAST, from_first, whole) if source != layout.home else None

    return [at_root, between, elsewhere]


def nothing() -> None:
    """Keep a place in the order of stages."""
    return


class Across:
    """The holders of one part of a group's values.

    Args:
        layout: where the group is.
        gloo: their connection; None where this member holds no part.
        workspace: memory that their exchanges work in.
    """

    def __init__(self, layout: Layout, gloo: Gloo | None, workspace: Workspace) -> None:
        self.layout = layout
        self.gloo = gloo
        self.workspace = workspace


def living(gloo: Gloo | None) -> Gloo:
    """Return the connection of a member that holds a part."""
    assert gloo is not None, "every member of an even group holds a part"
    return gloo
