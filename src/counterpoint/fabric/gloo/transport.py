"""A thread that lets collectives go on while their rank computes or waits for something else.

One process per rank, joined by gloo; torch's default process group is neither used nor touched.
"""

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

from counterpoint.errors import PeerError
from counterpoint.fabric.c10d import GlooProcessGroup
from counterpoint.fabric.fabric import CompletedWork, Group, Json, Reduction, Work
from counterpoint.fabric.fingerprint import (
    CollectiveSignature,
    check_group,
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
    as_bytes,
    gloo_all_gather,
    gloo_all_reduce,
    gloo_all_to_all,
    gloo_broadcast,
)
from counterpoint.fabric.gloo.p2p import GlooP2P
from counterpoint.fabric.local_collective import reduce_in_order
from counterpoint.fabric.peer_liveness import PeerProcesses, describe_exit, local_ranks, open_peer_processes
from counterpoint.fabric.process_fabric import ProcessFabric

MIN_PAUSE_S, MAX_PAUSE_S = 0.001, 0.004  # between two looks; longer where the last ones found nothing to do
MAX_IDLE_POLLS = 50  # then it sleeps until it is woken; before, waking it costs nothing
IDLE_WAIT_S = 1.0


class ProgressThread:
    """Calls ``advance`` again and again, for as long as that returns that something is left to do."""

    def __init__(self, advance: Callable[[], bool]) -> None:
        self._advance = advance
        self._woken = threading.Event()
        self._sleeps = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="deputy", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """It looks again soon."""
        if self._sleeps:
            self._woken.set()

    def close(self) -> None:
        """Its thread is gone."""
        self._closed = True
        self._woken.set()
        self._thread.join(IDLE_WAIT_S)

    def _run(self) -> None:
        num_idle_looks = 0
        while not self._closed:
            time.sleep(min(MIN_PAUSE_S * (1 + num_idle_looks), MAX_PAUSE_S))
            num_idle_looks = 0 if self._advance() else num_idle_looks + 1
            if num_idle_looks > MAX_IDLE_POLLS:
                self._sleeps = True
                if not self._advance():  # again, for what came before `wake` could see that it sleeps
                    self._woken.wait(IDLE_WAIT_S)
                self._sleeps = False
                self._woken.clear()
                num_idle_looks = 0


COMPLETED: Final = CompletedWork()


class GlooFabric(ProcessFabric):
    """One rank among processes; :func:`~counterpoint.fabric.rendezvous.connect` makes it.

    Cost:
        a message is copied once where it is sent and not where it is received; a collective is preceded by an exchange
        of 512 bytes among its members, which runs in the background until it is waited for.
    """

    def __init__(self, rank: int, num_ranks: int, timeout_s: float, rendezvous: Rendezvous | None) -> None:
        super().__init__(rank, num_ranks, timeout_s)
        self._rendezvous = rendezvous
        self._queues: dict[Group, GlooCollectiveQueue] = {}
        self._connections: Connections | None = None
        self._p2p: GlooP2P | None = None
        self._progress_thread: ProgressThread | None = None
        self.scratch_pool = ScratchPool()
        self._processes = PeerProcesses([])
        self.progress_callbacks: list[
            Callable[[], bool]
        ] = []  # what else its deputy does; each says whether something is left
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
        """Copy the tensors into a frame and hand it to gloo."""
        check_peer(peer, self.rank, self.num_ranks, label)
        with self.translate_errors(f"room to send {label}", (peer,)):
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
        """Wait for a frame of any of the peers; gloo sees a lost peer here only by the deadline."""
        for peer in peers:
            check_peer(peer, self.rank, self.num_ranks, "any message")
        with self.translate_errors("any message", peers):
            sender, frame = self._require_p2p().recv_any(peers, self.timeout_s)
        return sender, frame.label, frame.tensors

    def try_recv_any(self, peers: Sequence[int], seconds: float) -> tuple[int, str, tuple[Tensor, ...]] | None:
        """Return what :meth:`recv_any` does, or None where no frame has begun to come within so long."""
        with self.translate_errors("any message", peers):
            found = self._require_p2p().try_recv_any(peers, seconds, self.timeout_s)
        return None if found is None else (found[0], found[1].label, found[1].tensors)

    def all_reduce(self, label: str, tensor: Tensor, group: Group, op: Reduction = "sum") -> Work:
        """Start gloo's own all-reduce; its order of addition is fixed, but depends on the number of ranks."""

        def launch(gloo: GlooProcessGroup) -> StartedOps:
            return gloo_all_reduce(gloo, tensor.detach(), op, len(group))

        return self.start(tensor_signature(f"all_reduce {op}", label, tensor, group), launch)

    def reduce_scatter(
        self, label: str, whole: Tensor, bounds: Sequence[int], group: Group, op: Reduction = "sum"
    ) -> Work:
        """Start to exchange ranges; the sum is made here, in the order of the group, as on the local transport."""
        operation = ranges_signature(f"reduce_scatter {op}", label, whole, bounds, group)

        def launch(gloo: GlooProcessGroup) -> StartedOps:
            """Every member's part of this rank's range is on its way; they are added once all are here."""
            index = group.index(self.rank)
            own = whole.detach()[bounds[index] : bounds[index + 1]]
            desk = ScratchLease(self.scratch_pool)
            parts = desk.empty(len(group) * len(own), own.dtype).view(len(group), -1)
            sizes = [(end - start) * whole.element_size() for start, end in pairwise(bounds)]
            gives = torch.split(as_bytes(whole[bounds[0] : bounds[-1]]), sizes)
            works, place = gloo_all_to_all(
                gloo, [as_bytes(part) for part in parts], gives, max(sizes), ScratchLease(self.scratch_pool)
            )

            def add() -> None:
                """Sums are made here, in the order of the group: the same bits as on the local transport."""
                if place is not None:
                    place()
                own.copy_(reduce_in_order(list(parts), op))
                desk.clear()

            return works, add

        return self.start(operation, launch)

    def all_to_all(
        self, label: str, whole: Tensor, counts: Sequence[Sequence[int]], group: Group
    ) -> tuple[Tensor, Work]:
        """Start gloo's own exchange, on bytes."""
        operation = exchange_signature(label, whole, counts, group, self.rank)
        if len(group) == 1:
            return whole.clone(), COMPLETED
        place, size = group.index(self.rank), whole.element_size()
        theirs = [row[place] for row in counts]
        received = whole.new_empty(sum(theirs))

        def launch(gloo: GlooProcessGroup) -> StartedOps:
            incoming, outgoing = [count * size for count in theirs], [count * size for count in counts[place]]
            takes, gives = torch.split(as_bytes(received), incoming), torch.split(as_bytes(whole), outgoing)
            return gloo_all_to_all(gloo, takes, gives, max(map(max, counts)) * size, ScratchLease(self.scratch_pool))

        return received, self.start(operation, launch)

    def all_gather(self, label: str, whole: Tensor, bounds: Sequence[int], group: Group) -> Work:
        """Start to send the own range to all others at once; short ranges travel inside of the announcements."""
        operation = ranges_signature("all_gather", label, whole, bounds, group)
        ranges = list(pairwise(bounds))
        sizes = [(stop - start) * whole.element_size() for start, stop in ranges]
        if self.rank in group and min(sizes, default=0) > 0 and max(sizes) <= VALUE_BYTES:
            start, stop = ranges[group.index(self.rank)]

            def take(values: Sequence[bytes]) -> None:
                as_bytes(whole[bounds[0] : bounds[-1]]).copy_(bytes_tensor(b"".join(values)))

            return self.start(operation, None, as_bytes(whole[start:stop].clone()).numpy().tobytes(), take)

        def launch(gloo: GlooProcessGroup) -> StartedOps:
            target = as_bytes(whole[bounds[0] : bounds[-1]])
            return gloo_all_gather(gloo, target, sizes, ScratchLease(self.scratch_pool)) if len(target) else ([], None)

        return self.start(operation, launch)

    def broadcast(self, label: str, tensor: Tensor, group: Group, root: int) -> Work:
        """Start gloo's own broadcast."""

        def launch(gloo: GlooProcessGroup) -> StartedOps:
            target = tensor.detach()
            whole = target.contiguous()
            works = [gloo_broadcast(gloo, as_bytes(whole), group.index(root))] if whole.numel() else []
            return works, None if whole is target else lambda: target.copy_(whole)

        return self.start(tensor_signature("broadcast", label, tensor, group, root=root), launch)

    def gather_values(self, label: str, value: Json, group: Group) -> list[Json]:
        """Exchange JSON inside the announcements, or by a second exchange where it is long."""
        written = json.dumps(value).encode()
        work = self.start(CollectiveSignature("gather_values", label, group), None, written)
        work.wait()
        values = work.pending.values if isinstance(work, GlooCollectiveWork) else [written]
        return [json.loads(text) for text in values]

    def barrier_async(self, label: str, group: Group) -> Work:
        """Start to exchange announcements, and nothing else."""
        return self.start(CollectiveSignature("barrier", label, group), None)

    def connect_groups(self, groups: Sequence[Group]) -> None:
        """Open the connections of the groups that this rank is in, in sorted order."""
        for group in sorted(set(groups)):
            if self.rank in group and len(group) > 1:
                operation = CollectiveSignature("form", "group", group)
                check_group(operation, self.rank, self.num_ranks)
                with self.translate_errors("form of group", group):
                    self._queue_for(group)

    def abort(self, reason: str) -> None:
        """Post the reason in the store and cut all connections."""
        if self._connections is not None:
            self.fail(reason)

    def close(self) -> None:
        """Wait for what was sent, then let go of everything; cut it where something is still under way."""
        connections, mail = self._connections, self._p2p
        if connections is None:
            return
        try:
            if self.failure is None and mail is not None:
                with self.translate_errors("the arrival of what was sent", self.peers_of(range(self.num_ranks))):
                    mail.flush(self.timeout_s)
        finally:
            is_quiet = all(lane.is_idle for lane in self._queues.values()) and (mail is None or mail.is_idle)
            if self.failure is not None or not is_quiet:
                connections.abort()
            self.failure = self.failure or "the fabric has been closed"
            if self._progress_thread is not None:
                self._progress_thread.close()
            for lane in self._queues.values():
                lane.close()
            self._queues.clear()
            connections.close()
            self._processes.close()
            self._connections = self._p2p = self._rendezvous = None

    def finish(self, pending: PendingCollective, queue: GlooCollectiveQueue) -> None:
        """The collective is complete on this rank; a PeerError where it cannot be."""
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
        """Announce a collective; when all members have announced the same, ``launch`` starts it, on some thread."""
        self.check(operation)
        if len(operation.group) == 1:
            return COMPLETED
        with self.translate_errors(
            f"the start of {operation.kind} of {operation.label}", self.peers_of(operation.group)
        ):
            lane = self._queue_for(operation.group)
            start = lane.start(operation, start_data, value, on_values)
            self._progress_thread = self._progress_thread or ProgressThread(self._advance)
            self._progress_thread.wake()
            self._advance()
        return GlooCollectiveWork(self, start, lane)

    def check(self, operation: CollectiveSignature) -> None:
        """The operation is one that this rank may start; a ProgramError where it is not."""
        check_group(operation, self.rank, self.num_ranks)

    def connection(self, name: str, group: Group) -> GlooProcessGroup:
        """Return a connection of its own among the ranks of the group, all of which have come to open it."""
        with self.translate_errors(f"the connection for {name}", self.peers_of(group)):
            if self._connections is None:
                raise RuntimeError("the fabric has been closed")
            return self._connections.open(name, group)

    def _advance(self) -> bool:
        """Whatever has been announced on any lane is launched; return whether something is left to do."""
        left = [lane.advance() for lane in list(self._queues.values())]  # all of them, whatever the first has left
        return any([*left, *(follow() for follow in self.progress_callbacks)])

    def _queue_for(self, group: Group) -> GlooCollectiveQueue:
        """Return the group's lane; all members have come where it is new."""
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
        """Look into the store."""
        return self._connections.abort_reason() if self._connections is not None else None

    def exited_peer(self) -> str | None:
        """Look for a rank of this host whose process has ended."""
        rank = self._processes.exited_rank()
        return None if rank is None else describe_exit(rank)

    def describe_error(self, error: Exception) -> str:
        """Gloo has lost a connection."""
        return (
            f"the connection was lost ({error_summary(error)}); a rank that ends takes its connections with it: look at "
            "the output of the rank that ended first"
        )

    def broadcast_abort(self, reason: str) -> None:
        """Post the reason, and cut this rank's connections."""
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
        """Wait within the deadline; signals are served."""
        if self._queue is not None:
            self._fabric.finish(self.pending, self._queue)
            self._queue = None

    @property
    def is_complete(self) -> bool:
        """Whether gloo has ended it; what its end leaves to be done is done where it is waited for."""
        return self._queue is None or (
            self.pending.is_started and all(work.is_completed() for work in self.pending.works)
        )

    def completes_within(self, seconds: float) -> bool:
        """Wait for that long; what goes wrong otherwise is told by :meth:`wait`."""
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
    """Return what an error of gloo says first, without its source file and its good wishes."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[[^\]]*\]\s*", "", line.split("GLHF")[0]).strip(" .;,")
