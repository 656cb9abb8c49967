"""The fabric for ranks of several hosts: shared memory within a host, gloo between hosts."""

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
from counterpoint.fabric.process_fabric import ProcessFabric
from counterpoint.fabric.shm.transport import ShmFabric

PAUSE_S = 0.02  # between two calls of `drain` during a wait
IDLE_WAIT_S = 1.0


class ReceiveThread:
    """Context manager: while any thread is inside, calls ``drain`` repeatedly.

    A rank that waits in shared memory drains its own pipes. One that waits on a socket cannot, and would block a local
    rank that sends it more than a pipe holds: a deadlock, if it waits for that rank.

    Args:
        drain: receives pending messages without waiting.
    """

    def __init__(self, drain: Callable[[], None]) -> None:
        self._drain = drain
        self._lock = threading.Lock()
        self._num_waits = 0
        self._is_needed = threading.Event()
        self._closed = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="counterpoint shm receive", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        with self._lock:
            self._num_waits += 1
            self._is_needed.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End a wait; raise the error of ``drain``, if there is no other."""
        with self._lock:
            self._num_waits -= 1
            if not self._num_waits:
                self._is_needed.clear()
        if error is None and self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._is_needed.set()
        self._thread.join(IDLE_WAIT_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            if self._is_needed.wait(IDLE_WAIT_S) and not self._closed.wait(PAUSE_S) and self._is_needed.is_set():
                try:
                    self._drain()
                except Exception as error:  # noqa: BLE001 - raised by the wait
                    self._error = error
                    return


@dataclass(frozen=True, slots=True)
class GroupRoutes:
    """Connections of one group over several hosts."""

    layout: HostLayout
    intra: IntraHost
    inter: InterHost
    queue: StageQueue


class HierarchicalFabric(Fabric):
    """One rank among processes of several hosts; created by :func:`~counterpoint.fabric.rendezvous.connect`.

    A group on one host uses shared memory only. Members of a group over several hosts first compare a collective over
    gloo; then it runs in stages, within hosts and between them. Floating point sums are reduced host by host: bitwise
    identical on all members, but not for another placement of the ranks.

    Cost:
        each host sends as much as one rank of a flat collective: an all-reduce of ``n`` bytes over ``H`` hosts sends
        ``2 n (H-1) / H`` per host, however many ranks it has. An all-reduce sends 16-bit values as 32-bit ones and
        rounds their sum once; a reduce-scatter sends them as they are, and rounds each host's sum, too. A mean that is
        scattered over hosts with different numbers of members is flat. Waiting for messages from local and remote ranks
        at once polls the local ones at least every 4 ms.

    Args:
        shm: the ranks of this host; None for a rank that shares memory with none.
        gloo: all ranks.
        hosts: the host index of each rank.
    """

    def __init__(self, shm: ShmFabric | None, gloo: GlooFabric, hosts: Sequence[int]) -> None:
        self.rank, self.num_ranks, self.timeout_s = gloo.rank, gloo.num_ranks, gloo.timeout_s
        self._hosts = tuple(hosts)
        self._shm = shm
        self._gloo = gloo
        self._routes: dict[Group, GroupRoutes] = {}
        self._receive_thread = None if shm is None else ReceiveThread(shm.drain_incoming)
        gloo.become_subfabric(self._receive_thread)
        if shm is not None:
            shm.link_to(gloo)
            gloo.link_to(shm)
        gloo.progress_callbacks.append(self._advance)

    @property
    def parts(self) -> tuple[GlooFabric, *tuple[ProcessFabric, ...]]:
        """The fabrics that it consists of; that of all ranks is the first."""
        return (self._gloo,) if self._shm is None else (self._gloo, self._shm)

    @property
    def hosts(self) -> Sequence[int]:
        """For each rank, the first rank of its host; a rank that cannot share memory has its own host."""
        return self._hosts

    def shared_zeros(self, label: str, num_elements: int, dtype: torch.dtype, group: Group) -> Tensor | None:
        """Return shared memory if all members are on this host."""
        return self._shared_fabric(group).shared_zeros(label, num_elements, dtype, group)

    def barrier_async(self, label: str, group: Group) -> Work:
        """Start a barrier, in shared memory if all members are on this host."""
        return self._shared_fabric(group).barrier_async(label, group)

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor in the host's shared memory, if there is any."""
        return (self._shm or self._gloo).empty(num_elements, dtype)

    def try_empty(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return a flat tensor in the host's shared memory, if there is enough."""
        return (self._shm or self._gloo).try_empty(num_elements, dtype)

    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors into the pipe to a local peer, or into a gloo message."""
        self._fabric_to(peer).send(peer, label, tensors)

    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Wait for the peer's next message and verify it."""
        return self._fabric_to(peer).recv(peer, label)

    def recv_any(self, peers: Sequence[int]) -> tuple[int, str, tuple[Tensor, ...]]:
        """Wait for a message from any of the peers, local or remote."""
        for peer in peers:
            check_peer(peer, self.rank, self.num_ranks, "any message")
        shm, gloo = self._shm, self._gloo
        local_peers = [peer for peer in peers if self._is_local(peer)]
        remote_peers = [peer for peer in peers if not self._is_local(peer)]
        if shm is None or not local_peers:
            return gloo.recv_any(peers)
        if not remote_peers:
            return shm.recv_any(peers)
        pause_s = MIN_PAUSE_S
        with gloo.translate_errors("any message", peers):
            end = time.monotonic() + self.timeout_s
            while time.monotonic() < end:
                received = gloo.try_recv_any(remote_peers, 0)
                if received is not None:
                    return received
                sender = shm.wait_any(local_peers, pause_s)
                if sender is not None:
                    return shm.recv_any([sender])
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            raise TimeoutError

    def all_reduce(self, label: str, tensor: Tensor, group: Group, op: Reduction = "sum") -> Work:
        """Start an all-reduce in three stages."""
        fabric = self._single_level_fabric(group)
        if fabric is not None:
            return fabric.all_reduce(label, tensor, group, op)
        target, operation = tensor.detach(), tensor_signature(f"all_reduce {op}", label, tensor, group)
        whole = upcast(target)

        def stages(routes: GroupRoutes) -> list[StartStage]:
            return collectives.all_reduce(operation, whole.view(-1), op, routes.intra, routes.inter)

        return self._start(operation, stages, None if whole is target else lambda: target.copy_(whole))

    def all_reduces_in_16_bits(self, tensor: Tensor, group: Group) -> bool:
        """Return whether all members are on this host."""
        return self._shared_fabric(group).all_reduces_in_16_bits(tensor, group)

    def reduce_scatter(
        self, label: str, whole: Tensor, bounds: Sequence[int], group: Group, op: Reduction = "sum"
    ) -> Work:
        """Start a reduce-scatter in two stages; a mean over hosts with different numbers of members is flat."""
        fabric = self._single_level_fabric(group, must_be_uniform=op == "mean")
        if fabric is not None:
            return fabric.reduce_scatter(label, whole, bounds, group, op)
        operation, flat = ranges_signature(f"reduce_scatter {op}", label, whole, bounds, group), whole.detach()
        return self._start(
            operation, lambda routes: collectives.reduce_scatter(operation, flat, op, routes.intra, routes.inter)
        )

    def all_to_all(
        self, label: str, whole: Tensor, counts: Sequence[Sequence[int]], group: Group
    ) -> tuple[Tensor, Work]:
        """Start an all-to-all, over gloo if the group is on several hosts."""
        return self._shared_fabric(group).all_to_all(label, whole, counts, group)

    def all_gather(self, label: str, whole: Tensor, bounds: Sequence[int], group: Group) -> Work:
        """Start an all-gather in two stages."""
        fabric = self._single_level_fabric(group)
        if fabric is not None:
            return fabric.all_gather(label, whole, bounds, group)
        operation, flat = ranges_signature("all_gather", label, whole, bounds, group), whole.detach()
        return self._start(
            operation, lambda routes: collectives.all_gather(operation, flat, routes.intra, routes.inter)
        )

    def broadcast(self, label: str, tensor: Tensor, group: Group, root: int) -> Work:
        """Start a broadcast that sends the tensor to each host once."""
        fabric = self._single_level_fabric(group)
        if fabric is not None:
            return fabric.broadcast(label, tensor, group, root)
        target, operation = tensor.detach(), tensor_signature("broadcast", label, tensor, group, root=root)
        whole = target.resolve_conj().resolve_neg().contiguous()

        def stages(routes: GroupRoutes) -> list[StartStage]:
            return collectives.broadcast(operation, whole.view(-1), routes.intra, routes.inter)

        return self._start(operation, stages, None if whole is target else lambda: target.copy_(whole))

    def gather_values(self, label: str, value: Json, group: Group) -> list[Json]:
        """Exchange values, over gloo if the group is on several hosts."""
        return self._shared_fabric(group).gather_values(label, value, group)

    def connect_groups(self, groups: Sequence[Group]) -> None:
        """Open the connections of the groups that this rank is in, in sorted order."""
        for group in sorted(set(groups)):
            if self.rank in group and len(group) > 1:
                self._shared_fabric(group).connect_groups([group])
                if self._single_level_fabric(group) is None:
                    self._open_routes(group)

    def abort(self, reason: str) -> None:
        """Tell local and remote ranks the reason."""
        self._gloo.abort(reason)

    def close(self) -> None:
        """Wait for pending sends, then release everything."""
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

    def _shared_fabric(self, group: Group) -> Fabric:
        """Return the fabric that connects all members: shared memory if they are on this host, else gloo."""
        return self._shm if self._shm is not None and all(map(self._is_local, group)) else self._gloo

    def _single_level_fabric(self, group: Group, *, must_be_uniform: bool = False) -> Fabric | None:
        """Return the fabric for a flat collective of the group; None if a hierarchical one is better.

        Args:
            group: the members.
            must_be_uniform: whether a hierarchical one needs equally many members on all hosts.
        """
        fabric = self._shared_fabric(group)
        sizes = [0] * self.num_ranks
        for member in group:
            sizes[self._hosts[member] if 0 <= member < self.num_ranks else 0] += 1
        host_sizes = {size for size in sizes if size}
        if fabric is self._shm or max(host_sizes, default=1) == 1 or (must_be_uniform and len(host_sizes) > 1):
            return fabric
        return None if self.rank in group else fabric  # whose check raises the error about the group

    def _start(
        self,
        operation: CollectiveSignature,
        stages: Callable[[GroupRoutes], list[StartStage]],
        after: Callable[[], object] | None = None,
    ) -> Work:
        """Announce a collective to all members; its stages start when all have announced the same."""
        self._gloo.check(operation)
        routes = self._open_routes(operation.group)
        return self._gloo.start(operation, lambda _: ([routes.queue.add(stages(routes))], after))

    def _open_routes(self, group: Group) -> GroupRoutes:
        """Return the connections of the group; opening new ones waits for all members."""
        if group not in self._routes:
            self._gloo.connect_groups([group])
            layout = host_layout(group, self._hosts, self.rank)
            intra = IntraHost(self._shm, layout)
            intra.open()
            part_owners, neighbors = layout.part_owners, layout.neighbors
            name = f"{layout.part} of {'.'.join(map(str, group))}"
            gloo = self._gloo.connection(f"part {name}", part_owners) if part_owners else None
            ranges = gloo if part_owners == neighbors else self._gloo.connection(f"ranges {name}", neighbors)
            assert ranges is not None, "a member without a part has neighbors"
            inter = InterHost(layout, gloo, ranges, self._gloo.scratch_pool)
            self._routes[group] = GroupRoutes(layout, intra, inter, StageQueue())
        return self._routes[group]

    def _advance(self) -> bool:
        """Advance all groups without waiting; return whether any stage is left."""
        left = [routes.queue.advance() for routes in list(self._routes.values())]
        return any(left)
