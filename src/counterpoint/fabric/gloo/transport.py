"""The fabric of transport ``gloo``, and the thread that lets its collectives progress during computation."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from counterpoint.errors import PeerError, first_line
from counterpoint.fabric.c10d import GlooProcessGroup
from counterpoint.fabric.fabric import CompletedWork, Group, Json, Reduction, Work
from counterpoint.fabric.fingerprint import (
    CollectiveSignature,
    check_host_group,
    check_peer,
    describe_unexpected_message,
    exchange_signature,
    ranges_signature,
    tensor_signature,
)  # fmt: skip
from counterpoint.fabric.gloo.collective_queue import (
    VALUE_BYTES,
    GlooCollectiveQueue,
    GroupMember,
    PendingCollective,
    StartCollective,
    bytes_tensor,
)
from counterpoint.fabric.gloo.connections import Connections, Rendezvous
from counterpoint.fabric.gloo.ops import (
    ScratchLease,
    ScratchPool,
    StartedOps,
    gloo_all_gather,
    gloo_all_reduce,
    gloo_all_to_all,
    gloo_broadcast,
)
from counterpoint.fabric.gloo.p2p import GlooP2P
from counterpoint.fabric.peer_liveness import describe_exit, local_ranks, open_peer_processes
from counterpoint.fabric.process_fabric import ProcessFabric
from counterpoint.fabric.reductions import reduce_in_order_into
from counterpoint.tensor_bytes import as_bytes, view_bytes

MIN_PAUSE_S, MAX_PAUSE_S = 0.001, 0.004  # between two polls; longer after polls that found nothing to do
MAX_IDLE_POLLS = 50  # then it sleeps until `wake`, which is free until then
IDLE_WAIT_S = 1.0


class ProgressThread:
    """Calls ``advance`` repeatedly while that returns True, which means that work is left."""

    def __init__(self, advance: Callable[[], bool]) -> None:
        self._advance = advance
        self._woken = threading.Event()
        self._sleeps = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="counterpoint progress", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Make it poll again soon."""
        if self._sleeps:
            self._woken.set()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._woken.set()
        self._thread.join(IDLE_WAIT_S)

    def _run(self) -> None:
        num_idle_polls = 0
        while not self._closed:
            time.sleep(min(MIN_PAUSE_S * (1 + num_idle_polls), MAX_PAUSE_S))
            num_idle_polls = 0 if self._advance() else num_idle_polls + 1
            if num_idle_polls > MAX_IDLE_POLLS:
                self._sleeps = True
                if not self._advance():  # once more: `wake` did nothing before `_sleeps` was set
                    self._woken.wait(IDLE_WAIT_S)
                self._sleeps = False
                self._woken.clear()
                num_idle_polls = 0


COMPLETED: Final = CompletedWork()


class GlooFabric(ProcessFabric):
    """One rank among processes connected by gloo; created by :func:`~counterpoint.fabric.rendezvous.connect`.

    Cost:
        a message is copied once by the sender and not by the receiver; a collective is preceded by an exchange of 512
        bytes among its members, which runs in the background until the wait.

    Attributes:
        scratch_pool: buffers of its collectives.
        progress_callbacks: also called by the progress thread; each returns whether work is left.
    """

    def __init__(self, rank: int, num_ranks: int, timeout_s: float, rendezvous: Rendezvous | None) -> None:
        super().__init__(rank, num_ranks, timeout_s)
        self._rendezvous = rendezvous
        self._queues: dict[Group, GlooCollectiveQueue] = {}
        self._connections: Connections | None = None
        self._p2p: GlooP2P | None = None
        self._progress_thread: ProgressThread | None = None
        self.scratch_pool = ScratchPool()
        self.progress_callbacks: list[Callable[[], bool]] = []
        if rendezvous is not None:
            self._processes = open_peer_processes(
                rendezvous.store, local_ranks(rendezvous.store, rank, num_ranks), rank, num_ranks
            )
            self._connections = Connections(rank, rendezvous, timeout_s)
            everybody = tuple(range(num_ranks))
            with self.translate_errors("the first connection", everybody):
                gloo = self._connections.open("mail", everybody)
                self._p2p = GlooP2P(rank, rendezvous.job, rendezvous.generation, gloo)
                self._queue_for(everybody)

    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors into a frame and start to send it."""
        check_peer(peer, self.rank, self.num_ranks, label)
        with self.translate_errors(f"buffer space to send {label}", (peer,)):
            self._require_p2p().send(peer, label, tensors, self.timeout_s)

    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Wait for the peer's next frame and verify it."""
        check_peer(peer, self.rank, self.num_ranks, label)
        with self.translate_errors(label, (peer,)):
            frame = self._require_p2p().recv(peer, self.timeout_s)
            if frame.label != label:
                raise PeerError(describe_unexpected_message(self.rank, label, peer, frame.label))
        return frame.tensors

    def recv_any(self, peers: Sequence[int]) -> tuple[int, str, tuple[Tensor, ...]]:
        """Wait for a frame from any of the peers; gloo reports a lost peer only by the timeout here."""
        for peer in peers:
            check_peer(peer, self.rank, self.num_ranks, "any message")
        with self.translate_errors("any message", peers):
            sender, frame = self._require_p2p().recv_any(peers, self.timeout_s)
        return sender, frame.label, frame.tensors

    def try_recv_any(self, peers: Sequence[int], seconds: float) -> tuple[int, str, tuple[Tensor, ...]] | None:
        """Return what :meth:`recv_any` does; None if no frame starts to arrive within ``seconds``."""
        with self.translate_errors("any message", peers):
            received = self._require_p2p().try_recv_any(peers, seconds, self.timeout_s)
        return None if received is None else (received[0], received[1].label, received[1].tensors)

    def all_reduce(self, label: str, tensor: Tensor, group: Group, op: Reduction = "sum") -> Work:
        """Start gloo's own all-reduce; its order of addition is deterministic, but depends on the number of ranks."""

        def start_data(gloo: GlooProcessGroup) -> StartedOps:
            return gloo_all_reduce(gloo, tensor.detach(), op, len(group))

        return self.start(tensor_signature(f"all_reduce {op}", label, tensor, group), start_data)

    def reduce_scatter(
        self, label: str, whole: Tensor, bounds: Sequence[int], group: Group, op: Reduction = "sum"
    ) -> Work:
        """Start to exchange ranges; each rank then reduces its range in group order, as the local transport does."""
        operation = ranges_signature(f"reduce_scatter {op}", label, whole, bounds, group)

        def start_data(gloo: GlooProcessGroup) -> StartedOps:
            index = group.index(self.rank)
            own_range = whole.detach()[bounds[index] : bounds[index + 1]]
            scratch = ScratchLease(self.scratch_pool)
            received = scratch.empty((len(group) - 1) * len(own_range), own_range.dtype).view(len(group) - 1, -1)
            parts = [*received[:index], own_range, *received[index:]]
            sizes = [(stop - start) * whole.element_size() for start, stop in pairwise(bounds)]
            inputs = torch.split(view_bytes(whole[bounds[0] : bounds[-1]]), sizes)
            works, finish = gloo_all_to_all(
                gloo, [view_bytes(part) for part in parts], inputs, max(sizes), ScratchLease(self.scratch_pool)
            )

            def add() -> None:
                if finish is not None:
                    finish()
                reduce_in_order_into(own_range, parts, op)
                scratch.clear()

            return works, add

        return self.start(operation, start_data)

    def all_to_all(
        self, label: str, whole: Tensor, counts: Sequence[Sequence[int]], group: Group
    ) -> tuple[Tensor, Work]:
        """Start an exchange of bytes."""
        operation = exchange_signature(label, whole, counts, group, self.rank)
        if len(group) == 1:
            return whole.clone(), COMPLETED
        member, size = group.index(self.rank), whole.element_size()
        receive_counts = [row[member] for row in counts]
        received = whole.new_empty(sum(receive_counts))

        def start_data(gloo: GlooProcessGroup) -> StartedOps:
            incoming, outgoing = [count * size for count in receive_counts], [count * size for count in counts[member]]
            outputs, inputs = torch.split(view_bytes(received), incoming), torch.split(view_bytes(whole), outgoing)
            return gloo_all_to_all(gloo, outputs, inputs, max(map(max, counts)) * size, ScratchLease(self.scratch_pool))

        return received, self.start(operation, start_data)

    def all_gather(self, label: str, whole: Tensor, bounds: Sequence[int], group: Group) -> Work:
        """Start to send the own range to all others; short ranges are sent inside the announcements."""
        operation = ranges_signature("all_gather", label, whole, bounds, group)
        ranges = list(pairwise(bounds))
        sizes = [(stop - start) * whole.element_size() for start, stop in ranges]
        if self.rank in group and min(sizes, default=0) > 0 and max(sizes) <= VALUE_BYTES:
            start, stop = ranges[group.index(self.rank)]

            def copy_values(values: Sequence[bytes]) -> None:
                view_bytes(whole[bounds[0] : bounds[-1]]).copy_(bytes_tensor(b"".join(values)))

            return self.start(operation, None, as_bytes(whole[start:stop].clone()).numpy().tobytes(), copy_values)

        def start_data(gloo: GlooProcessGroup) -> StartedOps:
            target = view_bytes(whole[bounds[0] : bounds[-1]])
            return gloo_all_gather(gloo, target, sizes, ScratchLease(self.scratch_pool)) if len(target) else ([], None)

        return self.start(operation, start_data)

    def broadcast(self, label: str, tensor: Tensor, group: Group, root: int) -> Work:
        """Start gloo's own broadcast."""

        def start_data(gloo: GlooProcessGroup) -> StartedOps:
            target = tensor.detach()
            whole = target.resolve_conj().resolve_neg().contiguous()
            works = [gloo_broadcast(gloo, view_bytes(whole), group.index(root))] if whole.numel() else []
            return works, None if whole is target else lambda: target.copy_(whole)

        return self.start(tensor_signature("broadcast", label, tensor, group, root=root), start_data)

    def gather_values(self, label: str, value: Json, group: Group) -> list[Json]:
        """Exchange JSON inside the announcements, or by a second exchange if it is long."""
        encoded = json.dumps(value).encode()
        work = self.start(CollectiveSignature("gather_values", label, group), None, encoded)
        work.wait()
        values = work.pending.values if isinstance(work, GlooCollectiveWork) else [encoded]
        return [json.loads(text) for text in values]

    def barrier_async(self, label: str, group: Group) -> Work:
        """Start to exchange announcements only."""
        return self.start(CollectiveSignature("barrier", label, group), None)

    def connect_groups(self, groups: Sequence[Group]) -> None:
        """Open the connections of the groups that this rank is in, in sorted order."""
        for group in sorted(set(groups)):
            if self.rank in group and len(group) > 1:
                operation = CollectiveSignature("form", "group", group)
                check_host_group(operation, self.rank, self.num_ranks)
                with self.translate_errors("form of group", group):
                    self._queue_for(group)

    def abort(self, reason: str) -> None:
        """Post the reason in the store and abort all connections."""
        if self._connections is not None:
            self.fail(reason)

    def close(self) -> None:
        """Wait for pending sends, then release everything; abort the connections if anything is still pending."""
        connections, p2p = self._connections, self._p2p
        if connections is None:
            return
        try:
            if self.failure is None and p2p is not None:
                with self.translate_errors("the arrival of what was sent", self.peers_of(range(self.num_ranks))):
                    p2p.flush(self.timeout_s)
        finally:
            is_idle = all(queue.is_idle for queue in self._queues.values()) and (p2p is None or p2p.is_idle)
            if self.failure is not None or not is_idle:
                connections.abort()
            self.failure = self.failure or "the fabric has been closed"
            if self._progress_thread is not None:
                self._progress_thread.close()
            for queue in self._queues.values():
                queue.close()
            self._queues.clear()
            connections.close()
            self._processes.close()
            self._connections = self._p2p = self._rendezvous = None

    def finish(self, pending: PendingCollective, queue: GlooCollectiveQueue) -> None:
        """Wait until the collective is complete on this rank; raise a PeerError if it cannot be."""
        operation = pending.operation
        with self.translate_errors(f"{operation.kind} of {operation.label}", self.peers_of(operation.group)):
            queue.finish(pending, self.timeout_s)

    def start(
        self,
        operation: CollectiveSignature,
        start_data: StartCollective | None,
        value: bytes = b"",
        on_values: Callable[[Sequence[bytes]], object] | None = None,
    ) -> Work:
        """Announce a collective; some thread calls ``start_data`` when all members have announced the same."""
        self.check(operation)
        if len(operation.group) == 1:
            return COMPLETED
        with self.translate_errors(
            f"the start of {operation.kind} of {operation.label}", self.peers_of(operation.group)
        ):
            queue = self._queue_for(operation.group)
            pending = queue.start(operation, start_data, value, on_values)
            self._progress_thread = self._progress_thread or ProgressThread(self._advance)
            self._progress_thread.wake()
            self._advance()
        return GlooCollectiveWork(self, pending, queue)

    def check(self, operation: CollectiveSignature) -> None:
        """Raise a ProgramError unless this rank may start the operation."""
        check_host_group(operation, self.rank, self.num_ranks)

    def connection(self, name: str, group: Group) -> GlooProcessGroup:
        """Return a separate connection among the ranks of the group; all of them call it."""
        with self.translate_errors(f"the connection for {name}", self.peers_of(group)):
            if self._connections is None:
                raise RuntimeError("the fabric has been closed")
            return self._connections.open(name, group)

    def _advance(self) -> bool:
        """Advance every queue; return whether work is left."""
        left = [queue.advance() for queue in list(self._queues.values())]  # a list: advance all, without short-circuit
        return any([*left, *(callback() for callback in self.progress_callbacks)])

    def _queue_for(self, group: Group) -> GlooCollectiveQueue:
        """Return the group's queue; opening a new one waits for all members."""
        if group not in self._queues:
            if self._connections is None or self._rendezvous is None:
                raise RuntimeError("the fabric has been closed")
            announcements = self._connections.open("announcements", group)
            data = self._connections.open("data", group)
            member = GroupMember(self._rendezvous.job, self._rendezvous.generation, self.rank, group)
            self._queues[group] = GlooCollectiveQueue(member, announcements, data)
        return self._queues[group]

    def _require_p2p(self) -> GlooP2P:
        if self._p2p is None:
            raise RuntimeError("the fabric has been closed")
        return self._p2p

    def abort_reason(self) -> str | None:
        """Read the abort reason in the store."""
        return self._connections.abort_reason() if self._connections is not None else None

    def exited_peer(self) -> str | None:
        """Check the processes of this host's ranks."""
        rank = self._processes.exited_rank()
        return None if rank is None else describe_exit(rank)

    def describe_error(self, error: Exception) -> str:
        """Return the text for a lost connection."""
        return (
            f"the connection was lost ({error_summary(error)}); a rank that ends closes its connections: look at the "
            "output of the rank that ended first"
        )

    def broadcast_abort(self, reason: str) -> None:
        """Post the reason, and abort this rank's connections."""
        if self._connections is not None:
            self._connections.post_abort_reason(reason)
            self._connections.abort()


class GlooCollectiveWork(Work):
    """A collective among processes."""

    def __init__(self, fabric: GlooFabric, pending: PendingCollective, queue: GlooCollectiveQueue) -> None:
        self.pending = pending
        self._fabric = fabric
        self._queue: GlooCollectiveQueue | None = queue

    def wait(self) -> None:
        """Block until complete, within the timeout, serving signals."""
        if self._queue is not None:
            self._fabric.finish(self.pending, self._queue)
            self._queue = None

    @property
    def is_complete(self) -> bool:
        """Whether gloo's part is complete; :meth:`wait` does the rest."""
        return self._queue is None or (
            self.pending.is_started and all(work.is_completed() for work in self.pending.works)
        )

    def completes_within(self, seconds: float) -> bool:
        """Wait for at most ``seconds``; errors other than a timeout are raised as :meth:`wait` does."""
        if self._queue is not None and self._fabric.failure is None:
            try:
                self._queue.finish(self.pending, seconds)
            except TimeoutError:
                return False
            except (PeerError, RuntimeError):
                self.wait()
        self.wait()
        return True


def error_summary(error: Exception) -> str:
    """Return the first line of a gloo error, without its source location and closing phrase."""
    line = first_line(error) or type(error).__name__
    return re.sub(r"^\[[^\]]*\]\s*", "", line.split("GLHF")[0]).strip(" .;,")
