"""A thread that takes in what ranks of this host send, while this rank waits for ranks elsewhere.

Ranks of several hosts: what ranks of one host say to each other stays in its memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from counterpoint.fabric.fabric import Fabric, Group, Json, Reduction, Work
from counterpoint.fabric.fingerprint import CollectiveSignature, check_peer, ranges_signature, tensor_signature
from counterpoint.fabric.gloo.ops import upcast
from counterpoint.fabric.gloo.transport import MAX_PAUSE_S, MIN_PAUSE_S, GlooFabric
from counterpoint.fabric.hosts import collectives
from counterpoint.fabric.hosts.collectives import InterHost, IntraHost, StageQueue, StartStage
from counterpoint.fabric.hosts.layout import HostLayout, host_layout
from counterpoint.fabric.shm.transport import ShmFabric

PAUSE_S = 0.02
"""A wait that lasts longer is attended to, so often."""
IDLE_WAIT_S = 1.0


class ReceiveThread:
    """While it is entered, by any thread and as often as one likes, ``take_in`` is called again and again.

    A rank that waits in shared memory takes in messages by itself. One that waits in a socket cannot, and whoever sends
    it more than a pipe holds would wait for it: in a circle, where that rank is what it waits for.

    Args:
        take_in: takes in what has come, and waits for nothing.
    """

    def __init__(self, drain: Callable[[], None]) -> None:
        self._drain = drain
        self._lock = threading.Lock()
        self._num_waits = 0
        self._is_needed = threading.Event()
        self._closed = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="attendant", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        """A wait begins."""
        with self._lock:
            self._num_waits += 1
            self._is_needed.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """A wait has ended; what went wrong with a message that came meanwhile is raised where nothing else was."""
        with self._lock:
            self._num_waits -= 1
            if not self._num_waits:
                self._is_needed.clear()
        if error is None and self._error is not None:
            raise self._error

    def close(self) -> None:
        """Its thread is gone."""
        self._closed.set()
        self._is_needed.set()
        self._thread.join(IDLE_WAIT_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            if self._is_needed.wait(IDLE_WAIT_S) and not self._closed.wait(PAUSE_S) and self._is_needed.is_set():
                try:
                    self._drain()
                except Exception as error:  # noqa: BLE001 - whoever waits raises it
                    self._error = error
                    return


@dataclass(frozen=True, slots=True)
class GroupRoutes:
    """How the members of one group over several hosts reach each other."""

    layout: HostLayout
    intra: IntraHost
    inter: InterHost
    queue: StageQueue


class HierarchicalFabric(Fabric):
    """One rank among processes of several hosts; :func:`~counterpoint.fabric.rendezvous.connect` makes it.

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

    def __init__(self, shm: ShmFabric | None, gloo: GlooFabric, hosts: Sequence[int]) -> None:
        self.rank, self.num_ranks, self.timeout_s = gloo.rank, gloo.num_ranks, gloo.timeout_s
        self._hosts = tuple(hosts)
        self._shm = shm
        self._gloo = gloo
        self._routes: dict[Group, GroupRoutes] = {}
        self._receive_thread: ReceiveThread | None = None
        gloo.is_subfabric = True
        if shm is not None:
            shm.linked_fabrics, gloo.linked_fabrics = (gloo,), (shm,)
            self._receive_thread = gloo.while_waiting = ReceiveThread(shm.drain_incoming)
        gloo.progress_callbacks.append(self._advance)

    @property
    def hosts(self) -> Sequence[int]:
        """The first rank of each rank's host; a rank that cannot share memory has one of its own."""
        return self._hosts

    def shared_zeros(self, label: str, num_elements: int, dtype: torch.dtype, group: Group) -> Tensor | None:
        """Return memory of this host where it has all members."""
        return self._common_fabric(group).shared_zeros(label, num_elements, dtype, group)

    def barrier_async(self, label: str, group: Group) -> Work:
        """Start to announce that this rank is here, in memory where it has all members."""
        return self._common_fabric(group).barrier_async(label, group)

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor in memory that the ranks of this host share, where they do."""
        return (self._shm or self._gloo).empty(num_elements, dtype)

    def try_empty(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return a flat tensor in memory that the ranks of this host share, where they do and there is enough."""
        return (self._shm or self._gloo).try_empty(num_elements, dtype)

    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors into the pipe to the peer, or into a frame that goes by a socket."""
        self._fabric_to(peer).send(peer, label, tensors)

    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Wait for the peer's next message and verify it."""
        return self._fabric_to(peer).recv(peer, label)

    def recv_any(self, peers: Sequence[int]) -> tuple[int, str, tuple[Tensor, ...]]:
        """Wait for a message of any of the peers, here or elsewhere."""
        for peer in peers:
            check_peer(peer, self.rank, self.num_ranks, "any message")
        near, far = self._shm, self._gloo
        here = [peer for peer in peers if self._is_local(peer)]
        elsewhere = [peer for peer in peers if not self._is_local(peer)]
        if near is None or not here:
            return far.recv_any(peers)
        if not elsewhere:
            return near.recv_any(peers)
        pause_s = MIN_PAUSE_S
        with far.translate_errors("any message", peers):
            end = time.monotonic() + self.timeout_s
            while time.monotonic() < end:
                found = far.try_recv_any(elsewhere, 0)
                if found is not None:
                    return found
                sender = near.wait_any(here, pause_s)
                if sender is not None:
                    return near.recv_any([sender])
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            raise TimeoutError

    def all_reduce(self, label: str, tensor: Tensor, group: Group, op: Reduction = "sum") -> Work:
        """Start to add up: shared inside each host, completed between hosts, gathered inside."""
        way = self._single_level_fabric(group)
        if way is not None:
            return way.all_reduce(label, tensor, group, op)
        target, operation = tensor.detach(), tensor_signature(f"all_reduce {op}", label, tensor, group)
        whole = upcast(target)

        def stages(ways: GroupRoutes) -> list[StartStage]:
            return collectives.all_reduce(operation, whole.view(-1), op, ways.intra, ways.inter)

        return self._start(operation, stages, None if whole is target else lambda: target.copy_(whole))

    def reduce_scatter(
        self, label: str, whole: Tensor, bounds: Sequence[int], group: Group, op: Reduction = "sum"
    ) -> Work:
        """Start to add up ranges, inside the hosts first where they have equally many members."""
        way = self._single_level_fabric(group, must_be_uniform=True)
        if way is not None:
            return way.reduce_scatter(label, whole, bounds, group, op)
        operation, flat = ranges_signature(f"reduce_scatter {op}", label, whole, bounds, group), whole.detach()
        wide = upcast(flat)

        def stages(ways: GroupRoutes) -> list[StartStage]:
            return collectives.reduce_scatter(operation, wide, op, ways.intra, ways.inter)

        def narrow() -> None:
            place = group.index(self.rank)
            start, stop = bounds[place], bounds[place + 1]
            flat[start:stop] = wide[start:stop]

        return self._start(operation, stages, None if wide is flat else narrow)

    def all_to_all(
        self, label: str, whole: Tensor, counts: Sequence[Sequence[int]], group: Group
    ) -> tuple[Tensor, Work]:
        """Start to exchange ranges, by sockets where the group is on several hosts."""
        return self._common_fabric(group).all_to_all(label, whole, counts, group)

    def all_gather(self, label: str, whole: Tensor, bounds: Sequence[int], group: Group) -> Work:
        """Start to collect the members' ranges, between hosts first where they have equally many members."""
        way = self._single_level_fabric(group, must_be_uniform=True)
        if way is not None:
            return way.all_gather(label, whole, bounds, group)
        operation, flat = ranges_signature("all_gather", label, whole, bounds, group), whole.detach()
        return self._start(operation, lambda ways: collectives.all_gather(operation, flat, ways.intra, ways.inter))

    def broadcast(self, label: str, tensor: Tensor, group: Group, root: int) -> Work:
        """Start to copy the root's tensor, once to each host."""
        way = self._single_level_fabric(group)
        if way is not None:
            return way.broadcast(label, tensor, group, root)
        target, operation = tensor.detach(), tensor_signature("broadcast", label, tensor, group, root=root)
        whole = target.contiguous()

        def stages(ways: GroupRoutes) -> list[StartStage]:
            return collectives.broadcast(operation, whole.view(-1), ways.intra, ways.inter)

        return self._start(operation, stages, None if whole is target else lambda: target.copy_(whole))

    def gather_values(self, label: str, value: Json, group: Group) -> list[Json]:
        """Exchange values in memory, or by sockets where the group is on several hosts."""
        return self._common_fabric(group).gather_values(label, value, group)

    def connect_groups(self, groups: Sequence[Group]) -> None:
        """Open what the groups need that this rank is in, in sorted order."""
        for group in sorted(set(groups)):
            if self.rank in group and len(group) > 1:
                self._common_fabric(group).connect_groups([group])
                if self._single_level_fabric(group) is None:
                    self._open_routes(group)

    def abort(self, reason: str) -> None:
        """The ranks here and elsewhere can read the reason."""
        self._gloo.abort(reason)

    def close(self) -> None:
        """Wait for what was sent, then let go of everything."""
        try:
            self._gloo.close()
        finally:
            self._routes.clear()
            if self._receive_thread is not None:
                self._receive_thread.close()
            if self._shm is not None:
                self._shm.close()

    def _is_local(self, peer: int) -> bool:
        return self._shm is not None and peer in self._shm.local_ranks

    def _fabric_to(self, peer: int) -> Fabric:
        return self._shm if self._shm is not None and self._is_local(peer) else self._gloo

    def _common_fabric(self, group: Group) -> Fabric:
        """Return the way on which all members of the group are alike."""
        return self._shm if self._shm is not None and all(map(self._is_local, group)) else self._gloo

    def _single_level_fabric(self, group: Group, *, must_be_uniform: bool = False) -> Fabric | None:
        """Return the way that a collective of the group takes where one is enough; None where both are better.

        Args:
            group: the members.
            must_be_even: both are worth it only where all hosts have equally many of them.
        """
        flat = self._common_fabric(group)
        sizes = [0] * self.num_ranks
        for member in group:
            sizes[self._hosts[member] if 0 <= member < self.num_ranks else 0] += 1
        found = {size for size in sizes if size}
        if flat is self._shm or max(found, default=1) == 1 or (must_be_uniform and len(found) > 1):
            return flat
        return None if self.rank in group else flat  # which says what is wrong with the group

    def _start(
        self,
        operation: CollectiveSignature,
        stages: Callable[[GroupRoutes], list[StartStage]],
        after: Callable[[], object] | None = None,
    ) -> Work:
        """Announce it to all members; its stages begin when all have announced the same."""
        self._gloo.check(operation)
        ways = self._open_routes(operation.group)
        return self._gloo.start(operation, lambda _: ([ways.queue.add(stages(ways))], after))

    def _open_routes(self, group: Group) -> GroupRoutes:
        """Return how the members reach each other; all have come where it is new."""
        if group not in self._routes:
            self._gloo.connect_groups([group])
            layout = host_layout(group, self._hosts, self.rank)
            inside = IntraHost(self._shm, layout)
            inside.open()
            holders = layout.part_owners
            gloo = (
                self._gloo.connection(f"part {layout.local_index} of {'.'.join(map(str, group))}", holders)
                if holders
                else None
            )
            self._routes[group] = GroupRoutes(
                layout, inside, InterHost(layout, gloo, self._gloo.scratch_pool), StageQueue()
            )
        return self._routes[group]

    def _advance(self) -> bool:
        """Whatever can go on without waiting has gone on; return whether any stage is left."""
        left = [ways.queue.advance() for ways in list(self._routes.values())]
        return any(left)
