"""Ranks of a host with fewer cores than ranks: one that wakes up does not take the core of one that computes.

By default the kernel gives a process that has waited the core of one that has not, at once. Ranks wait for each other
many times in a step, and each change of a core costs what caches have to fetch again; whoever is left to compute until
it waits itself has its part done earlier, which is what the others wait for.

What the ranks of one host tell each other when they cannot go on, in the memory that they share.

One rank in the memory of its host: its place there, its messages, and how its waits end.

Ranks of one host: gradients are added up in place, in memory that all of them see, by the native library.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import CDLL
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from counterpoint.errors import PeerError
from counterpoint.fabric.fabric import CompletedWork, Group, Json, Reduction, Work
from counterpoint.fabric.fingerprint import (
    CollectiveSignature,
    check_group,
    check_peer,
    describe_mismatch,
    describe_unexpected_message,
    dtype_name,
    exchange_signature,
    ranges_signature,
    tensor_signature,
)  # fmt: skip
from counterpoint.fabric.frames import MessageSequencer
from counterpoint.fabric.peer_liveness import describe_exit
from counterpoint.fabric.process_fabric import ProcessFabric
from counterpoint.fabric.shm.collectives import PreparedCollective, RequestCache, ShmGroups, ShmWork, cache_key
from counterpoint.fabric.shm.memory import RankContext, SharedTensors, int_array, map_tensor
from counterpoint.fabric.shm.native import REASON_BYTES, SIGNATURE_BYTES, SLICE_NS, CollectiveKind, NativeStatus, native
from counterpoint.fabric.shm.p2p import ShmP2P


class BatchScheduling:
    """The calling thread's way of being scheduled, and that of the threads it starts, until :meth:`end`.

    Where a sandbox forbids to change it, it stays as it is.

    Args:
        num_ranks: of this host.
        num_cores: that they may use.

    Example:
        >>> Yielding(num_ranks=2, num_cores=2).is_on
        False
    """

    def __init__(self, num_ranks: int, num_cores: int) -> None:
        self.is_enabled = False
        if num_ranks > num_cores and hasattr(os, "SCHED_BATCH"):
            with suppress(OSError):
                if os.sched_getscheduler(0) == os.SCHED_OTHER:
                    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
                    self.is_enabled = True

    def restore(self) -> None:
        """The thread is scheduled as it was before; the thread that has begun calls it."""
        if self.is_enabled and os.sched_getscheduler(0) == os.SCHED_BATCH:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        self.is_enabled = False


@dataclass(frozen=True, slots=True)
class AbortStatus:
    """What one rank can read there, and write.

    Args:
        library: the native part.
        world: its handle.
        rank: the own rank.
        here: the ranks of this host; the library counts them from 0.
    """

    library: CDLL
    world: int
    rank: int
    local_ranks: Group

    def abort_reason(self) -> str | None:
        """Return "rank 2: why it stopped" of the first rank that said so, if it was another; None otherwise."""
        room = ctypes.create_string_buffer(REASON_BYTES)
        stopper = self.library.cp_stopped(self.world, room, REASON_BYTES)
        if stopper < 0 or self.local_ranks[stopper] == self.rank:
            return None
        return f"rank {self.local_ranks[stopper]}: {room.value.decode(errors='replace')}"

    def lost_peer(self) -> str | None:
        """Say which rank has ended, or takes part in nothing more; None where no wait has found one."""
        place = self.library.cp_lost(self.world)
        if place < 0:
            return None
        rank = self.local_ranks[place]
        if self.library.cp_has_left(self.world, place):
            return f"rank {rank} has closed its fabric; look at the output of rank {rank}"
        return describe_exit(rank)

    def post(self, reason: str) -> None:
        """Write the reason where all see it, unless another rank was first, and wake them."""
        raw = reason.encode()
        self.library.cp_stop(self.world, raw, len(raw))

    def describe_mismatch(self, prepared: PreparedCollective) -> str:
        """Say which members are about to do different things in the group of the recipe, and what."""
        turn = self.library.cp_num_done(prepared.group)
        seen = {}
        for place, member in enumerate(prepared.operation.group):
            print_, words = ctypes.create_string_buffer(16), ctypes.create_string_buffer(SIGNATURE_BYTES)
            length = self.library.cp_notice(prepared.group, place, turn, print_, words)
            seen[member] = (print_.raw, words.raw[:length].decode(errors="replace"))
        return describe_mismatch(seen, turn) or "the members of a group disagree"


SPINS_PER_CORE, SPINS_OVERSUBSCRIBED = 16000, 200  # where every rank has a core, and where ranks take turns
ABORT_CHECK_S: Final = 0.1  # so often a wait looks whether a rank of another host has stopped


class ShmRank(ProcessFabric):
    """What a rank has in shared memory but for tensors and collectives, which :class:`~.transport.ShmFabric` adds.

    Args:
        site: where the ranks of this host meet.
        job: the job's number.
        generation: of its ranks.
    """

    def __init__(self, context: RankContext, job: int, generation: int) -> None:
        super().__init__(context.rank, context.num_ranks, context.timeout_s)
        library = native().library
        assert library is not None, "whoever chose this transport has looked"
        self._library = library
        self.local_ranks = context.local_ranks
        self._processes = context.open_processes()
        self._memory = context.map_host_memory(library, self._processes)
        fds = int_array(tuple(self._processes.fds[rank] for rank in self.local_ranks))
        place, count = self.local_ranks.index(self.rank), len(self.local_ranks)
        cores = len(os.sched_getaffinity(0))
        spins = SPINS_PER_CORE if cores >= count else SPINS_OVERSUBSCRIBED
        self._batch_scheduling = BatchScheduling(count, cores)
        self._world: int = library.cp_open_world(self._memory.address, place, count, os.getpid(), fds, spins, SLICE_NS)
        self._abort_status = AbortStatus(library, self._world, self.rank, self.local_ranks)
        self._p2p = ShmP2P(library, self._world, self.local_ranks, MessageSequencer(self.rank, job, generation))

    @property
    def hosts(self) -> Sequence[int]:
        """Those here are on this host, whose number is its first rank; others are elsewhere."""
        return [self.local_ranks[0] if rank in self.local_ranks else rank for rank in range(self.num_ranks)]

    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors into the pipe to the peer."""
        check_peer(peer, self.rank, self.num_ranks, label)
        with self.translate_errors(f"room to send {label}", (peer,)):
            self._p2p.send(peer, label, tensors, self._poll_until)

    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Wait for the peer's next message and verify it."""
        check_peer(peer, self.rank, self.num_ranks, label)
        with self.translate_errors(label, (peer,)):
            frame = self._p2p.recv(peer, self._poll_until)
            if frame.label != label:
                raise PeerError(describe_unexpected_message(self.rank, label, peer, frame.label))
        return frame.tensors

    def recv_any(self, peers: Sequence[int]) -> tuple[int, str, tuple[Tensor, ...]]:
        """Wait for a message of any of the peers."""
        for peer in peers:
            check_peer(peer, self.rank, self.num_ranks, "any message")
        with self.translate_errors("any message", peers):
            sender, frame = self._p2p.recv_any(peers, self._poll_until)
        return sender, frame.label, frame.tensors

    def wait_any(self, peers: Sequence[int], seconds: float) -> int | None:
        """Return which peer's message can be received without waiting for it; None where none can within so long."""
        with self.translate_errors("any message", peers):
            found = self._p2p.wait_any(peers, int(seconds * 1e9))
            if found < 0 and found != NativeStatus.NOT_YET:
                raise RuntimeError(NativeStatus(found).name)
        return found if found >= 0 else None

    def drain_incoming(self) -> None:
        """What others have sent to this rank is out of the pipes, so that they need not wait for it."""
        if self._world:
            self._p2p.drain_incoming()

    def abort(self, reason: str) -> None:
        """Write the reason where all see it, and wake them."""
        if self._world:
            self.fail(reason)

    def _leave_host(self) -> None:
        """The others see that this rank takes part in nothing more; its memory here is gone."""
        self._batch_scheduling.restore()
        self._library.cp_close_world(self._world)
        self._memory.close()
        self._world = 0
        self._processes.close()

    def _poll_until(self, call: Callable[[], int], prepared: PreparedCollective | None = None) -> int:
        """Return what a call of the library returns when it is done; it is called again and again until then.

        Between two calls, what others have sent is taken in.

        Raises:
            PeerError: the members of the recipe's group disagree.
            RuntimeError: somebody has stopped, or is lost.
            TimeoutError: the deadline has passed.
        """
        end, look = time.monotonic() + self.timeout_s, time.monotonic() + ABORT_CHECK_S
        while True:
            status = call()
            if status >= 0:
                return status
            if status == NativeStatus.DISAGREE and prepared is not None:
                raise PeerError(self._abort_status.describe_mismatch(prepared))
            if status != NativeStatus.NOT_YET:
                raise RuntimeError(NativeStatus(status).name)
            self._p2p.drain_incoming()  # who sends to this rank need not wait for what it waits for
            now = time.monotonic()
            if now > end:
                raise TimeoutError
            if now > look and self.linked_fabrics:
                if any(way.abort_reason() for way in self.linked_fabrics):
                    raise RuntimeError("a rank of another host has stopped")
                look = now + ABORT_CHECK_S

    def abort_reason(self) -> str | None:
        """Read what a rank has written."""
        return self._abort_status.abort_reason() if self._world else None

    def exited_peer(self) -> str | None:
        """Say which rank has ended, or will take part in nothing more, where a wait has found one."""
        return self._abort_status.lost_peer() if self._world else None

    def describe_error(self, error: Exception) -> str:
        """Memory cannot be opened."""
        return f"shared memory cannot be used ({error}); look at the output of the rank that ended first"

    def broadcast_abort(self, reason: str) -> None:
        """Write the reason where all see it."""
        if self._world:
            self._abort_status.post(reason)


COMPLETED: Final = CompletedWork()
EMPTY: Final = torch.empty(0)


class ShmFabric(ShmRank):
    """One rank among processes of one host; :func:`~counterpoint.fabric.rendezvous.connect` makes it.

    Cost:
        tensors from :meth:`empty` are added up where they lie: every rank reads and writes its share of everybody's.
        Any other is copied to shared memory once, a piece at a time, while the piece before is added up.
        Up to 32 KB, a start looks for the others for a microsecond or two, and what is complete by then needs no wait.

    Args:
        site: where the ranks of this host meet; all numbers that a caller gives or gets are those of the world.
        job: the job's number.
        generation: of its ranks.
    """

    def __init__(self, context: RankContext, job: int, generation: int) -> None:
        super().__init__(context, job, generation)
        self._cp_start, self._cp_wait = self._library.cp_start, self._library.cp_wait
        self._all_reduces: dict[
            str, tuple[PreparedCollective, torch.dtype, Group, Reduction, torch.Size]
        ] = {}  # found faster than by a key
        self._retained: list[tuple[PreparedCollective, Tensor]] = []
        self._requests = RequestCache(self.rank, self.num_ranks, self._open_group)
        self._tensors = SharedTensors(self._library, self._world, self._requests.invalidate_addresses)
        self._groups = ShmGroups(self._library, self._world, self.rank, self.local_ranks)
        self.connect_groups([self.local_ranks])

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor in shared memory; a PeerError where there is not enough."""
        if not self._world:
            return super().empty(num_elements, dtype)
        try:
            return self._tensors.empty(num_elements, dtype)
        except PeerError as error:
            raise self.fail(f"rank {self.rank} has {error}") from error

    def try_empty(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return a flat tensor in shared memory, where there is enough."""
        try:
            return self._tensors.empty(num_elements, dtype) if self._world else None
        except PeerError:
            return None

    def all_reduce(self, label: str, tensor: Tensor, group: Group, op: Reduction = "sum") -> Work:
        """Start to add up; sums are made in the order of the group, and are the same bits on all members."""
        last = self._all_reduces.get(label)
        if last is not None:
            recipe, dtype, members, kind, shape = last
            if dtype is tensor.dtype and members == group and kind == op and shape == tensor.shape:
                return self._start(recipe, tensor)
        key = cache_key(op, label, tensor, group)
        known = self._requests.get(key)
        if known is None:
            operation = tensor_signature(f"all_reduce {op}", label, tensor, group)
            known = self._requests.make(key, CollectiveKind.ALL_REDUCE, operation, tensor)
        self._all_reduces[label] = (known, tensor.dtype, group, op, tensor.shape)
        return self._start(known, tensor)

    def reduce_scatter(
        self, label: str, whole: Tensor, bounds: Sequence[int], group: Group, op: Reduction = "sum"
    ) -> Work:
        """Start to add up ranges; sums are made in the order of the group."""
        key = cache_key(f"reduce_scatter {op}", label, whole, group, *bounds)
        recipe = self._requests.get(key)
        if recipe is None:
            operation = ranges_signature(f"reduce_scatter {op}", label, whole, bounds, group)
            recipe = self._requests.make(key, CollectiveKind.REDUCE_SCATTER, operation, whole, bounds)
        return self._start(recipe, whole)

    def all_gather(self, label: str, whole: Tensor, bounds: Sequence[int], group: Group) -> Work:
        """Start to collect the members' ranges."""
        key = cache_key("all_gather", label, whole, group, *bounds)
        recipe = self._requests.get(key)
        if recipe is None:
            operation = ranges_signature("all_gather", label, whole, bounds, group)
            recipe = self._requests.make(key, CollectiveKind.ALL_GATHER, operation, whole, bounds)
        return self._start(recipe, whole)

    def open_channel(self, group: Group, channel: str) -> None:
        """The group can start collectives on this channel; all members have come."""
        self._open_group(CollectiveSignature("form", "group", group, channel=channel))

    def start_on_channel(
        self, kind: CollectiveKind, operation: CollectiveSignature, tensor: Tensor, bounds: Sequence[int] = ()
    ) -> ShmWork | None:
        """Start one of the library's collectives on a channel of its own; None where there is nothing to do.

        Args:
            kind: the collective.
            operation: what it is for errors; its group and its channel say among whom, its dtype and shape what.
            tensor: flat and contiguous.
            bounds: of the members' ranges, in numbers, where the collective has any.
        """
        key = (kind, operation, *bounds)
        recipe = self._requests.get(key) or self._requests.make(key, kind, operation, tensor, bounds)
        work = self._start(recipe, tensor)
        return work if isinstance(work, ShmWork) else None

    def all_to_all(
        self, label: str, whole: Tensor, counts: Sequence[Sequence[int]], group: Group
    ) -> tuple[Tensor, Work]:
        """Start to exchange ranges, through shared memory."""
        operation = exchange_signature(label, whole, counts, group, self.rank)
        if len(group) == 1:
            return whole.clone(), COMPLETED
        place = group.index(self.rank)
        theirs = [row[place] for row in counts]
        received = whole.new_empty(sum(theirs))
        recipe = self._requests.make((), CollectiveKind.ALL_TO_ALL, operation, whole, [0, *accumulate(counts[place])])
        recipe.set_exchange([0, *accumulate(theirs)], received, max(map(max, counts)))
        return received, self._start(recipe, whole)

    def broadcast(self, label: str, tensor: Tensor, group: Group, root: int) -> Work:
        """Start to copy the root's tensor."""
        key = cache_key("broadcast", label, tensor, group, root)
        recipe = self._requests.get(key)
        if recipe is None:
            operation = tensor_signature("broadcast", label, tensor, group, root=root)
            recipe = self._requests.make(key, CollectiveKind.BROADCAST, operation, tensor)
        return self._start(recipe, tensor)

    def gather_values(self, label: str, value: Json, group: Group) -> list[Json]:
        """Exchange the lengths of what JSON makes of the values, then these."""
        operation = CollectiveSignature("gather_values", label, group)
        check_group(operation, self.rank, self.num_ranks)
        written = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        place, count = group.index(self.rank), len(group)
        lengths = torch.zeros(count, dtype=torch.int64)
        lengths[place] = len(written)
        key = cache_key("lengths", label, lengths, group)
        recipe = self._requests.get(key)
        if recipe is None:
            recipe = self._requests.make(key, CollectiveKind.ALL_GATHER, operation, lengths, range(count + 1))
        self._start(recipe, lengths).wait()
        bounds = [0, *torch.cumsum(lengths, 0).tolist()]
        values = torch.empty(bounds[-1], dtype=torch.uint8)
        values[bounds[place] : bounds[place + 1]] = written
        self._start(self._requests.make((), CollectiveKind.ALL_GATHER, operation, values, bounds), values).wait()
        raw = values.numpy().tobytes()
        return [json.loads(raw[start:stop]) for start, stop in pairwise(bounds)]

    def shared_zeros(self, label: str, num_elements: int, dtype: torch.dtype, group: Group) -> Tensor | None:
        """Open what the first member shares."""
        operation = CollectiveSignature("shared", label, group, dtype_name(dtype), (num_elements,))
        check_group(operation, self.rank, self.num_ranks)
        own = self._tensors.zeros(num_elements, dtype) if self.rank == group[0] else None
        if len(group) == 1:
            return own
        address = None if own is None else list(self._tensors.export_handle(own))
        found = self.gather_values(f"memory for {operation}", address, group)[0]
        if own is None:
            with self.translate_errors(f"memory for {label}", group[:1]):
                own = map_tensor(found, num_elements, dtype)
        self.barrier(group)
        return own

    def barrier_async(self, label: str, group: Group) -> Work:
        """Start to announce that this rank is here."""
        key = cache_key("barrier", label, EMPTY, group)
        recipe = self._requests.get(key)
        if recipe is None:
            recipe = self._requests.make(
                key, CollectiveKind.BARRIER, CollectiveSignature("barrier", label, group), EMPTY
            )
        return self._start(recipe, EMPTY)

    def connect_groups(self, groups: Sequence[Group]) -> None:
        """Open the memory of the groups that this rank is in, in sorted order."""
        for group in sorted(set(groups)):
            if self.rank in group and len(group) > 1:
                operation = CollectiveSignature("form", "group", group)
                check_group(operation, self.rank, self.num_ranks)
                self._open_group(operation)

    def close(self) -> None:
        """Let go of everything; what was sent stays in the pipes until the others have let go, too."""
        if self._world:
            self.failure = self.failure or "the fabric has been closed"
            self._groups.close()
            self._requests.clear()
            self._all_reduces.clear()
            self._leave_host()
            self._tensors.close()
            self._retained.clear()

    def finish(self, prepared: PreparedCollective, index: int) -> None:
        """The collective is complete on this rank.

        Raises:
            PeerError: the members disagree, one is gone, or the deadline has passed.
        """
        if self.failure is None and self._cp_wait(prepared.group, index) == 0:
            return
        operation = prepared.operation
        with self.translate_errors(f"{operation.kind} of {operation.label}", self.peers_of(operation.group)):
            self._poll_until(lambda: int(self._cp_wait(prepared.group, index)), prepared)

    def retain(self, prepared: PreparedCollective, whole: Tensor) -> None:
        """What a collective needs that nobody will wait for lives as long as the fabric is open."""
        if self._world:
            self._retained.append((prepared, whole))

    def wait_for(self, prepared: PreparedCollective, index: int, seconds: float) -> bool:
        """Take part until the collective is over in whatever way, or for so long; return whether it may still be."""
        if self.failure is not None:
            return False
        return self._library.cp_pause(prepared.group, index, int(seconds * 1e9)) in {
            NativeStatus.DONE,
            NativeStatus.NOT_YET,
        }

    def poll(self, prepared: PreparedCollective, index: int) -> bool:
        """Whether the collective is complete on this rank; whatever can go on without waiting has gone on.

        Raises:
            PeerError: as :meth:`finish`.
        """
        if self.failure is not None:
            raise PeerError(self.failure)
        library = self._library
        library.cp_advance(self._world)
        if library.cp_num_done(prepared.group) > index:
            return True
        if library.cp_status(prepared.group) != 0:
            self.finish(prepared, index)
        return False

    def _start(self, prepared: PreparedCollective, tensor: Tensor) -> Work:
        if not prepared.group:
            return COMPLETED
        if self.failure is not None:
            raise PeerError(self.failure)
        whole = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        address = whole.data_ptr()
        if address != prepared.address:
            prepared.set_tensor(address, *self._tensors.locate(address, prepared.num_bytes))
        turn = self._cp_start(prepared.reference)
        if turn >= 0 or whole is not tensor:
            return ShmWork(self, prepared, turn, whole, None if whole is tensor else tensor)
        return COMPLETED

    def _open_group(self, operation: CollectiveSignature) -> int:
        with self.translate_errors(
            f"the start of {operation.kind} of {operation.label}", self.peers_of(operation.group)
        ):
            return self._groups.open(operation, self._poll_until)
