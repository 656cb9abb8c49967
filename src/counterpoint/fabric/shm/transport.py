"""The fabric of transport ``shm``: collectives of the ranks of one host, in shared memory, by the native library.

::

    Python thread of each rank        shared memory                       native library
    all_reduce(tensor) -> request --> announcement, chunk buffers    <--> every member reduces its part
    work.wait()        ---- polls --> progress counters, wake counter     of all members' tensors

No thread does the work in the background: a collective progresses while its members wait, poll, or start another one.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from counterpoint.errors import PeerError
from counterpoint.fabric.fabric import CompletedWork, Group, Json, Reduction, Work
from counterpoint.fabric.fingerprint import (
    CollectiveSignature,
    check_host_group,
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
from counterpoint.fabric.shm.collectives import PreparedCollective, RequestCache, ShmGroups, cache_key
from counterpoint.fabric.shm.memory import RankContext, SharedTensors, int_array, map_tensor
from counterpoint.fabric.shm.native import REASON_BYTES, SIGNATURE_BYTES, SLICE_NS, CollectiveKind, NativeStatus, native
from counterpoint.fabric.shm.p2p import ShmP2P
from counterpoint.tensor_bytes import is_resolved

SPINS_PER_CORE, SPINS_OVERSUBSCRIBED = 16000, 200  # polls before sleeping: one core per rank; fewer cores than ranks

ABORT_CHECK_S: Final = 0.1  # between two checks during a wait whether a rank of another host has aborted

COMPLETED: Final = CompletedWork()

EMPTY: Final = torch.empty(0)


class ShmFabric(ProcessFabric):
    """One rank among processes of one host; created by :func:`~counterpoint.fabric.rendezvous.connect`.

    Cost:
        tensors from :meth:`empty` are reduced in place: every rank reads and writes its part of all members' tensors.
        Others are copied through shared memory in chunks, while the chunk before is reduced. Up to 32 KB, starting an
        all-reduce polls for a microsecond or two, so that it is often complete when it returns.

    Args:
        context: this rank; all ranks in arguments and results are ranks of the world.
        job: the job's number.
        generation: of its ranks.
    """

    def __init__(self, context: RankContext, job: int, generation: int) -> None:
        super().__init__(context.rank, context.num_ranks, context.timeout_s)
        library = native().library
        assert library is not None, "this transport is only chosen if the library is available"
        self._library = library
        self.local_ranks = context.local_ranks
        self._processes = context.open_processes()
        self._memory = context.map_host_memory(library, self._processes)
        fds = int_array(tuple(self._processes.fds[rank] for rank in self.local_ranks))
        place, count = self.local_ranks.index(self.rank), len(self.local_ranks)
        cores = len(os.sched_getaffinity(0))
        spins = SPINS_PER_CORE if cores >= count else SPINS_OVERSUBSCRIBED
        self._batch_scheduling = BatchScheduling(count, cores)
        self._host: int = library.cp_open_host(self._memory.address, place, count, os.getpid(), fds, spins, SLICE_NS)
        self._p2p = ShmP2P(library, self._host, self.local_ranks, MessageSequencer(self.rank, job, generation))
        self._cp_start, self._cp_wait = self._library.cp_start, self._library.cp_wait
        self._all_reduces: dict[
            str, tuple[PreparedCollective, torch.dtype, Group, Reduction, torch.Size]
        ] = {}  # last one per label, found faster than by its key
        self._retained: list[tuple[PreparedCollective, Tensor]] = []
        self._requests = RequestCache(self.rank, self.num_ranks, self._open_group)
        self._tensors = SharedTensors(self._library, self._host, self._requests.invalidate_addresses)
        self._groups = ShmGroups(self._library, self._host, self.rank, self.local_ranks)
        self.connect_groups([self.local_ranks])

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat uninitialized tensor in shared memory; raise a PeerError if there is not enough."""
        if not self._host:
            return super().empty(num_elements, dtype)
        try:
            return self._tensors.empty(num_elements, dtype)
        except PeerError as error:
            raise self.fail(f"rank {self.rank} has {error}") from error

    def try_empty(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return a flat uninitialized tensor in shared memory; None if there is not enough."""
        try:
            return self._tensors.empty(num_elements, dtype) if self._host else None
        except PeerError:
            return None

    def all_reduce(self, label: str, tensor: Tensor, group: Group, op: Reduction = "sum") -> Work:
        """Start an all-reduce; addition follows group order, and the result is bitwise identical on all members."""
        last = self._all_reduces.get(label)
        if last is not None:
            prepared, dtype, members, kind, shape = last
            if dtype is tensor.dtype and members == group and kind == op and shape == tensor.shape:
                return self._start(prepared, tensor)
        key = cache_key(op, label, tensor, group)
        prepared_new = self._requests.get(key)
        if prepared_new is None:
            operation = tensor_signature(f"all_reduce {op}", label, tensor, group)
            prepared_new = self._requests.make(key, CollectiveKind.ALL_REDUCE, operation, tensor)
        self._all_reduces[label] = (prepared_new, tensor.dtype, group, op, tensor.shape)
        return self._start(prepared_new, tensor)

    def all_reduces_in_16_bits(self, tensor: Tensor, group: Group) -> bool:
        """Return True: ranks read each other's values in shared memory, and widen them as they add them up."""
        del tensor, group
        return True

    def reduce_scatter(
        self, label: str, whole: Tensor, bounds: Sequence[int], group: Group, op: Reduction = "sum"
    ) -> Work:
        """Start a reduce-scatter; addition follows group order."""
        key = cache_key(f"reduce_scatter {op}", label, whole, group, *bounds)
        prepared = self._requests.get(key)
        if prepared is None:
            operation = ranges_signature(f"reduce_scatter {op}", label, whole, bounds, group)
            prepared = self._requests.make(key, CollectiveKind.REDUCE_SCATTER, operation, whole, bounds)
        return self._start(prepared, whole)

    def all_gather(self, label: str, whole: Tensor, bounds: Sequence[int], group: Group) -> Work:
        """Start an all-gather."""
        key = cache_key("all_gather", label, whole, group, *bounds)
        prepared = self._requests.get(key)
        if prepared is None:
            operation = ranges_signature("all_gather", label, whole, bounds, group)
            prepared = self._requests.make(key, CollectiveKind.ALL_GATHER, operation, whole, bounds)
        return self._start(prepared, whole)

    def open_channel(self, group: Group, channel: str) -> None:
        """Open a channel of the group; all members call it."""
        self._open_group(CollectiveSignature("form", "group", group, channel=channel))

    def start_on_channel(
        self, kind: CollectiveKind, operation: CollectiveSignature, tensor: Tensor, bounds: Sequence[int] = ()
    ) -> ShmWork | None:
        """Start a collective on the channel that its signature names; return None if there is nothing to do.

        Args:
            kind: the collective.
            operation: its signature: the group, the channel, and for errors its name, dtype and shape.
            tensor: flat and contiguous.
            bounds: of the members' ranges, in elements, if the collective has any.
        """
        key = (kind, operation, *bounds)
        prepared = self._requests.get(key) or self._requests.make(key, kind, operation, tensor, bounds)
        work = self._start(prepared, tensor)
        return work if isinstance(work, ShmWork) else None

    def all_to_all(
        self, label: str, whole: Tensor, counts: Sequence[Sequence[int]], group: Group
    ) -> tuple[Tensor, Work]:
        """Start an all-to-all."""
        operation = exchange_signature(label, whole, counts, group, self.rank)
        if len(group) == 1:
            return whole.clone(), COMPLETED
        member = group.index(self.rank)
        receive_counts = [row[member] for row in counts]
        received = whole.new_empty(sum(receive_counts))
        prepared = self._requests.make(
            (), CollectiveKind.ALL_TO_ALL, operation, whole, [0, *accumulate(counts[member])]
        )
        prepared.set_exchange([0, *accumulate(receive_counts)], received, max(map(max, counts)))
        return received, self._start(prepared, whole)

    def broadcast(self, label: str, tensor: Tensor, group: Group, root: int) -> Work:
        """Start a broadcast."""
        key = cache_key("broadcast", label, tensor, group, root)
        prepared = self._requests.get(key)
        if prepared is None:
            operation = tensor_signature("broadcast", label, tensor, group, root=root)
            prepared = self._requests.make(key, CollectiveKind.BROADCAST, operation, tensor)
        return self._start(prepared, tensor)

    def gather_values(self, label: str, value: Json, group: Group) -> list[Json]:
        """Exchange the lengths of the JSON texts, then the texts."""
        operation = CollectiveSignature("gather_values", label, group)
        check_host_group(operation, self.rank, self.num_ranks)
        encoded = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        member, count = group.index(self.rank), len(group)
        lengths = torch.zeros(count, dtype=torch.int64)
        lengths[member] = len(encoded)
        key = cache_key("lengths", label, lengths, group)
        prepared = self._requests.get(key)
        if prepared is None:
            prepared = self._requests.make(key, CollectiveKind.ALL_GATHER, operation, lengths, range(count + 1))
        self._start(prepared, lengths).wait()
        bounds = [0, *torch.cumsum(lengths, 0).tolist()]
        values = torch.empty(bounds[-1], dtype=torch.uint8)
        values[bounds[member] : bounds[member + 1]] = encoded
        self._start(self._requests.make((), CollectiveKind.ALL_GATHER, operation, values, bounds), values).wait()
        raw = values.numpy().tobytes()
        return [json.loads(raw[start:stop]) for start, stop in pairwise(bounds)]

    def shared_zeros(self, label: str, num_elements: int, dtype: torch.dtype, group: Group) -> Tensor | None:
        """Map the tensor that the first member allocates."""
        operation = CollectiveSignature("shared", label, group, dtype_name(dtype), (num_elements,))
        check_host_group(operation, self.rank, self.num_ranks)
        tensor = self._tensors.zeros(num_elements, dtype) if self.rank == group[0] else None
        if len(group) == 1:
            return tensor
        address = None if tensor is None else list(self._tensors.export_handle(tensor))
        handle = self.gather_values(f"memory for {operation}", address, group)[0]
        if tensor is None:
            with self.translate_errors(f"memory for {label}", group[:1]):
                tensor = map_tensor(handle, num_elements, dtype)
        self.barrier(group)
        return tensor

    def barrier_async(self, label: str, group: Group) -> Work:
        """Start a barrier."""
        key = cache_key("barrier", label, EMPTY, group)
        prepared = self._requests.get(key)
        if prepared is None:
            prepared = self._requests.make(
                key, CollectiveKind.BARRIER, CollectiveSignature("barrier", label, group), EMPTY
            )
        return self._start(prepared, EMPTY)

    def connect_groups(self, groups: Sequence[Group]) -> None:
        """Open the groups that this rank is in, in sorted order."""
        for group in sorted(set(groups)):
            if self.rank in group and len(group) > 1:
                operation = CollectiveSignature("form", "group", group)
                check_host_group(operation, self.rank, self.num_ranks)
                self._open_group(operation)

    @property
    def hosts(self) -> Sequence[int]:
        """The local ranks are on this host, whose index is its first rank; every other rank counts as its own host."""
        return [self.local_ranks[0] if rank in self.local_ranks else rank for rank in range(self.num_ranks)]

    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors into the pipe to the peer."""
        check_peer(peer, self.rank, self.num_ranks, label)
        with self.translate_errors(f"buffer space to send {label}", (peer,)):
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
        """Wait for a message from any of the peers."""
        for peer in peers:
            check_peer(peer, self.rank, self.num_ranks, "any message")
        with self.translate_errors("any message", peers):
            sender, frame = self._p2p.recv_any(peers, self._poll_until)
        return sender, frame.label, frame.tensors

    def wait_any(self, peers: Sequence[int], seconds: float) -> int | None:
        """Wait at most ``seconds``; return a peer whose message has arrived or begins to, None if there is none."""
        with self.translate_errors("any message", peers):
            peer = self._p2p.wait_any(peers, int(seconds * 1e9))
            if peer < 0 and peer != NativeStatus.NOT_YET:
                raise RuntimeError(NativeStatus(peer).name)
        return peer if peer >= 0 else None

    def drain_incoming(self) -> None:
        """Receive what is in the pipes to this rank, so that the senders need not wait for it."""
        if self._host:
            self._p2p.drain_incoming()

    def abort(self, reason: str) -> None:
        """Write the reason into shared memory, and wake all ranks."""
        if self._host:
            self.fail(reason)

    def _leave_host(self) -> None:
        self._batch_scheduling.restore()
        self._library.cp_close_host(self._host)
        self._memory.close()
        self._host = 0
        self._processes.close()

    def _poll_until(self, call: Callable[[], int], prepared: PreparedCollective | None = None) -> int:
        """Call a function of the library until it returns a result; receive incoming messages between the calls.

        Raises:
            PeerError: the members of the group of ``prepared`` disagree.
            RuntimeError: a rank has aborted, or ended.
            TimeoutError: the timeout has passed.
        """
        deadline, next_check = time.monotonic() + self.timeout_s, time.monotonic() + ABORT_CHECK_S
        while True:
            status = call()
            if status >= 0:
                return status
            if status == NativeStatus.DISAGREE and prepared is not None:
                raise PeerError(self._describe_mismatch(prepared))
            if status != NativeStatus.NOT_YET:
                raise RuntimeError(NativeStatus(status).name)
            self._p2p.drain_incoming()  # or a peer blocks on a full pipe to this rank
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError
            if now > next_check and self.linked_fabrics:
                if any(fabric.abort_reason() for fabric in self.linked_fabrics):
                    raise RuntimeError("a rank of another host has aborted")
                next_check = now + ABORT_CHECK_S

    def abort_reason(self) -> str | None:
        """Read the reason in shared memory."""
        if not self._host:
            return None
        buffer = ctypes.create_string_buffer(REASON_BYTES)
        index = self._library.cp_stopped(self._host, buffer, REASON_BYTES)
        if index < 0 or self.local_ranks[index] == self.rank:
            return None
        return f"rank {self.local_ranks[index]}: {buffer.value.decode(errors='replace')}"

    def exited_peer(self) -> str | None:
        """Return a text about a rank that has ended or closed its fabric, if a wait has found one."""
        index = self._library.cp_lost(self._host) if self._host else -1
        if index < 0:
            return None
        rank = self.local_ranks[index]
        if self._library.cp_has_left(self._host, index):
            return f"rank {rank} has closed its fabric; look at the output of rank {rank}"
        return describe_exit(rank)

    def describe_error(self, error: Exception) -> str:
        """Return the text for shared memory that cannot be used."""
        return f"shared memory cannot be used ({error}); look at the output of the rank that ended first"

    def broadcast_abort(self, reason: str) -> None:
        """Write the reason into shared memory, unless another rank was first, and wake all ranks."""
        if self._host:
            encoded = reason.encode()
            self._library.cp_stop(self._host, encoded, len(encoded))

    def _describe_mismatch(self, prepared: PreparedCollective) -> str:
        index = self._library.cp_num_done(prepared.group)
        announced = {}
        for place, member in enumerate(prepared.operation.group):
            hash_, text = ctypes.create_string_buffer(16), ctypes.create_string_buffer(SIGNATURE_BYTES)
            length = self._library.cp_announcement(prepared.group, place, index, hash_, text)
            announced[member] = (hash_.raw, text.raw[:length].decode(errors="replace"))
        return describe_mismatch(announced, index) or "the members of a group disagree"

    def close(self) -> None:
        """Release everything; messages sent stay in the pipes until the receivers have closed, too."""
        if self._host:
            self.failure = self.failure or "the fabric has been closed"
            self._groups.close()
            self._requests.clear()
            self._all_reduces.clear()
            self._leave_host()
            self._tensors.close()
            self._retained.clear()

    def finish(self, prepared: PreparedCollective, index: int) -> None:
        """Wait until the collective is complete on this rank.

        Raises:
            PeerError: the members disagree, one is gone, or the timeout has passed.
        """
        if self.failure is None and self._cp_wait(prepared.group, index) == 0:
            return
        operation = prepared.operation
        with self.translate_errors(f"{operation.kind} of {operation.label}", self.peers_of(operation.group)):
            self._poll_until(lambda: int(self._cp_wait(prepared.group, index)), prepared)

    def retain(self, prepared: PreparedCollective, whole: Tensor) -> None:
        """Keep the buffers of a collective without a wait until the fabric is closed."""
        if self._host:
            self._retained.append((prepared, whole))

    def wait_for(self, prepared: PreparedCollective, index: int, seconds: float) -> bool:
        """Make progress until the collective ends, for at most ``seconds``; return False if it has failed."""
        if self.failure is not None:
            return False
        return self._library.cp_wait_for(prepared.group, index, int(seconds * 1e9)) in {
            NativeStatus.DONE,
            NativeStatus.NOT_YET,
        }

    def poll(self, prepared: PreparedCollective, index: int) -> bool:
        """Make progress without waiting; return whether the collective is complete on this rank.

        Raises:
            PeerError: as :meth:`finish`.
        """
        if self.failure is not None:
            raise PeerError(self.failure)
        library = self._library
        library.cp_advance(self._host)
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
        whole = tensor if is_resolved(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous()
        address = whole.data_ptr()
        if address != prepared.address:
            prepared.set_tensor(address, *self._tensors.locate(address, prepared.num_bytes))
        index = self._cp_start(prepared.reference)
        if index >= 0 or whole is not tensor:
            return ShmWork(self, prepared, index, whole, None if whole is tensor else tensor)
        return COMPLETED

    def _open_group(self, operation: CollectiveSignature) -> int:
        with self.translate_errors(
            f"the start of {operation.kind} of {operation.label}", self.peers_of(operation.group)
        ):
            return self._groups.open(operation, self._poll_until)


class ShmWork(Work):
    """A collective in shared memory."""

    __slots__ = ("_fabric", "_index", "_prepared", "_target", "_whole")

    def __init__(
        self, fabric: ShmFabric, prepared: PreparedCollective, index: int, whole: Tensor, target: Tensor | None
    ) -> None:
        self._fabric: ShmFabric | None = fabric
        self._prepared = prepared
        self._index = index
        self._whole = whole
        self._target = target

    def is_done(self) -> bool:
        """Poll; return whether it is complete; raise a PeerError if it cannot be."""
        if self._fabric is not None and self._fabric.poll(self._prepared, self._index):
            self._complete()
        return self._fabric is None

    def wait_for(self, seconds: float) -> None:
        """Make progress until it ends, for at most ``seconds``."""
        if self._fabric is not None:
            self._fabric.wait_for(self._prepared, self._index, seconds)

    def completes_within(self, seconds: float) -> bool:
        """Make progress for at most ``seconds``; return whether it is complete."""
        if self.is_done():
            return True
        if self._fabric is not None and not self._fabric.wait_for(self._prepared, self._index, seconds):
            self.wait()  # raises its error
        return self.is_done()

    def wait(self) -> None:
        """Make progress until it is complete, serving signals."""
        if self._fabric is not None:
            self._fabric.finish(self._prepared, self._index)
            self._complete()

    def __del__(self) -> None:
        """Keep the tensors alive: the library may still access those of a collective without a wait."""
        if self._fabric is not None:
            self._fabric.retain(self._prepared, self._whole)

    def _complete(self) -> None:
        self._fabric = None
        if self._target is not None:
            self._target.detach().copy_(self._whole)


class BatchScheduling:
    """Scheduling policy ``SCHED_BATCH`` for the calling thread and threads that it starts, if ranks outnumber cores.

    By default, Linux lets a thread that wakes up preempt one that computes. Ranks wait for each other many times per
    step, and every switch costs cache misses; without preemption the computing rank reaches its own next wait earlier,
    so the others wait less.

    A sandbox that forbids the change leaves the policy unchanged.

    Args:
        num_ranks: of this host.
        num_cores: that they may use.

    Example:
        >>> BatchScheduling(num_ranks=2, num_cores=2).is_enabled
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
        """Restore the previous policy; called by the same thread."""
        if self.is_enabled and os.sched_getscheduler(0) == os.SCHED_BATCH:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        self.is_enabled = False
