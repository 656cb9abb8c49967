"""Ranks of several hosts: what ranks of one host say to each other stays in its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from counterpoint.fabric.deputy import MAX_PAUSE_S, MIN_PAUSE_S
from counterpoint.fabric.fabric import Fabric, Group, Json, Verb, Work
from counterpoint.fabric.fingerprint import Operation, check_peer, of_ranges, of_tensor
from counterpoint.fabric.gloo_numbers import widened
from counterpoint.fabric.hosts import collectives
from counterpoint.fabric.hosts.attendant import Attendant
from counterpoint.fabric.hosts.collectives import Across, Inside
from counterpoint.fabric.hosts.layout import Layout, layout_of
from counterpoint.fabric.hosts.stages import Route, Stage
from counterpoint.fabric.shm.transport import ShmFabric
from counterpoint.fabric.torch_gloo import TorchFabric


@dataclass(frozen=True, slots=True)
class Ways:
    """How the members of one group over several hosts reach each other."""

    layout: Layout
    inside: Inside
    across: Across
    route: Route


class HostsFabric(Fabric):
    """One rank among processes of several hosts; :func:`~counterpoint.fabric.meeting.connect` makes it.

    A group on one host uses its memory alone. A collective of a group over several hosts is compared among all members
    first, as on sockets; then it goes on by stages, inside the hosts and between them. Sums of fractions are added host
    by host: the same bits on all members, but not those of another placement.

    Cost:
        between hosts goes what one rank of each host would have to send: a sum of ``n`` bytes over ``H`` hosts takes
        ``2 n (H-1) / H`` out of each, however many ranks it has; 16-bit numbers go as 32-bit ones, rounded at the end.
        Waiting for a message of ranks here and elsewhere at once looks for those here every 4 ms at the latest.

    Args:
        near: the ranks of this host; None for a rank that shares memory with nobody.
        far: all ranks, by sockets.
        hosts: the host of each rank, as a number.
    """

    def __init__(self, near: ShmFabric | None, far: TorchFabric, hosts: Sequence[int]) -> None:
        self.rank, self.num_ranks, self.deadline_s = far.rank, far.num_ranks, far.deadline_s
        self._hosts = tuple(hosts)
        self._near = near
        self._far = far
        self._ways: dict[Group, Ways] = {}
        self._attendant: Attendant | None = None
        far.is_part = True
        if near is not None:
            near.companions, far.companions = (far,), (near,)
            self._attendant = far.meanwhile = Attendant(near.take_in)
        far.followers.append(self._advance)

    @property
    def hosts(self) -> Sequence[int]:
        """The first rank of each rank's host; a rank that cannot share memory has one of its own."""
        return self._hosts

    def shared(self, label: str, num_elements: int, dtype: torch.dtype, group: Group) -> Tensor | None:
        """Return memory of this host where it has all members."""
        return self._flat(group).shared(label, num_elements, dtype, group)

    def meet(self, label: str, group: Group) -> Work:
        """Start to announce that this rank is here, in memory where it has all members."""
        return self._flat(group).meet(label, group)

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor in memory that the ranks of this host share, where they do."""
        return (self._near or self._far).empty(num_elements, dtype)

    def spare(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return a flat tensor in memory that the ranks of this host share, where they do and there is enough."""
        return (self._near or self._far).spare(num_elements, dtype)

    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors into the pipe to the peer, or into a frame that goes by a socket."""
        self._towards(peer).send(peer, label, tensors)

    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Wait for the peer's next message and verify it."""
        return self._towards(peer).recv(peer, label)

    def recv_any(self, peers: Sequence[int]) -> tuple[int, str, tuple[Tensor, ...]]:
        """Wait for a message of any of the peers, here or elsewhere."""
        for peer in peers:
            check_peer(peer, self.rank, self.num_ranks, "any message")
        near, far = self._near, self._far
        here = [peer for peer in peers if self._is_here(peer)]
        elsewhere = [peer for peer in peers if not self._is_here(peer)]
        if near is None or not here:
            return far.recv_any(peers)
        if not elsewhere:
            return near.recv_any(peers)
        pause_s = MIN_PAUSE_S
        with far.waiting("any message", peers):
            end = time.monotonic() + self.deadline_s
            while time.monotonic() < end:
                found = far.recv_soon(elsewhere, 0)
                if found is not None:
                    return found
                sender = near.await_any(here, pause_s)
                if sender is not None:
                    return near.recv_any([sender])
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            raise TimeoutError

    def all_reduce(self, label: str, tensor: Tensor, group: Group, verb: Verb = "sum") -> Work:
        """Start to add up: shared inside each host, completed between hosts, gathered inside."""
        way = self._only_way(group)
        if way is not None:
            return way.all_reduce(label, tensor, group, verb)
        target, operation = tensor.detach(), of_tensor(f"all_reduce {verb}", label, tensor, group)
        whole = widened(target)

        def stages(ways: Ways) -> list[Stage]:
            return collectives.all_reduce(operation, whole.view(-1), verb, ways.inside, ways.across)

        return self._start(operation, stages, None if whole is target else lambda: target.copy_(whole))

    def reduce_scatter(
        self, label: str, whole: Tensor, bounds: Sequence[int], group: Group, verb: Verb = "sum"
    ) -> Work:
        """Start to add up ranges, inside the hosts first where they have equally many members."""
        way = self._only_way(group, must_be_even=True)
        if way is not None:
            return way.reduce_scatter(label, whole, bounds, group, verb)
        operation, flat = of_ranges(f"reduce_scatter {verb}", label, whole, bounds, group), whole.detach()
        wide = widened(flat)

        def stages(ways: Ways) -> list[Stage]:
            return collectives.reduce_scatter(operation, wide, verb, ways.inside, ways.across)

        def narrow() -> None:
            place = group.index(self.rank)
            start, stop = bounds[place], bounds[place + 1]
            flat[start:stop] = wide[start:stop]

        return self._start(operation, stages, None if wide is flat else narrow)

    def all_to_all(
        self, label: str, whole: Tensor, counts: Sequence[Sequence[int]], group: Group
    ) -> tuple[Tensor, Work]:
        """Start to exchange ranges, by sockets where the group is on several hosts."""
        return self._flat(group).all_to_all(label, whole, counts, group)

    def all_gather(self, label: str, whole: Tensor, bounds: Sequence[int], group: Group) -> Work:
        """Start to collect the members' ranges, between hosts first where they have equally many members."""
        way = self._only_way(group, must_be_even=True)
        if way is not None:
            return way.all_gather(label, whole, bounds, group)
        operation, flat = of_ranges("all_gather", label, whole, bounds, group), whole.detach()
        return self._start(operation, lambda ways: collectives.all_gather(operation, flat, ways.inside, ways.across))

    def broadcast(self, label: str, tensor: Tensor, group: Group, root: int) -> Work:
        """Start to copy the root's tensor, once to each host."""
        way = self._only_way(group)
        if way is not None:
            return way.broadcast(label, tensor, group, root)
        target, operation = tensor.detach(), of_tensor("broadcast", label, tensor, group, root=root)
        whole = target.contiguous()

        def stages(ways: Ways) -> list[Stage]:
            return collectives.broadcast(operation, whole.view(-1), ways.inside, ways.across)

        return self._start(operation, stages, None if whole is target else lambda: target.copy_(whole))

    def gather_values(self, label: str, value: Json, group: Group) -> list[Json]:
        """Exchange values in memory, or by sockets where the group is on several hosts."""
        return self._flat(group).gather_values(label, value, group)

    def form(self, groups: Sequence[Group]) -> None:
        """Open what the groups need that this rank is in, in sorted order."""
        for group in sorted(set(groups)):
            if self.rank in group and len(group) > 1:
                self._flat(group).form([group])
                if self._only_way(group) is None:
                    self._open(group)

    def stop(self, reason: str) -> None:
        """The ranks here and elsewhere can read the reason."""
        self._far.stop(reason)

    def close(self) -> None:
        """Wait for what was sent, then let go of everything."""
        try:
            self._far.close()
        finally:
            self._ways.clear()
            if self._attendant is not None:
                self._attendant.close()
            if self._near is not None:
                self._near.close()

    def _is_here(self, peer: int) -> bool:
        return self._near is not None and peer in self._near.here

    def _towards(self, peer: int) -> Fabric:
        return self._near if self._near is not None and self._is_here(peer) else self._far

    def _flat(self, group: Group) -> Fabric:
        """Return the way on which all members of the group are alike."""
        return self._near if self._near is not None and all(map(self._is_here, group)) else self._far

    def _only_way(self, group: Group, *, must_be_even: bool = False) -> Fabric | None:
        """Return the way that a collective of the group takes where one is enough; None where both are better.

        Args:
            group: the members.
            must_be_even: both are worth it only where all hosts have equally many of them.
        """
        flat = self._flat(group)
        sizes = [0] * self.num_ranks
        for member in group:
            sizes[self._hosts[member] if 0 <= member < self.num_ranks else 0] += 1
        found = {size for size in sizes if size}
        if flat is self._near or max(found, default=1) == 1 or (must_be_even and len(found) > 1):
            return flat
        return None if self.rank in group else flat  # which says what is wrong with the group

    def _start(
        self, operation: Operation, stages: Callable[[Ways], list[Stage]], after: Callable[[], object] | None = None
    ) -> Work:
        """Announce it to all members; its stages begin when all have announced the same."""
        self._far.check(operation)
        ways = self._open(operation.group)
        return self._far.start(operation, lambda _: ([ways.route.add(stages(ways))], after))

    def _open(self, group: Group) -> Ways:
        """Return how the members reach each other; all have come where it is new."""
        if group not in self._ways:
            self._far.form([group])
            layout = layout_of(group, self._hosts, self.rank)
            inside = Inside(self._near, layout)
            inside.open()
            holders = layout.holders
            gloo = (
                self._far.connection(f"part {layout.place} of {'.'.join(map(str, group))}", holders)
                if holders
                else None
            )
            self._ways[group] = Ways(layout, inside, Across(layout, gloo, self._far.workspace), Route())
        return self._ways[group]

    def _advance(self) -> bool:
        """Whatever can go on without waiting has gone on; return whether any stage is left."""
        left = [ways.route.advance() for ways in list(self._ways.values())]
        return any(left)
