"""The fabric whose tensors move over c10d process groups: NCCL between devices, or gloo between hosts' memories."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor

from counterpoint.device.accelerator import Accelerator
from counterpoint.device.event_clock import DeviceSpan
from counterpoint.device.select import accelerator_for
from counterpoint.errors import PeerError
from counterpoint.fabric.c10d import DataProcessGroup, DeviceWork, GlooProcessGroup, GlooWork, Store
from counterpoint.fabric.fabric import CompletedWork, Fabric, Group, Json, Reduction, Work
from counterpoint.fabric.fingerprint import (
    CollectiveSignature,
    check_group,
    check_peer,
    exchange_signature,
    format_ranks,
    ranges_signature,
    tensor_signature,
)  # fmt: skip
from counterpoint.fabric.gloo.connections import Connections, Rendezvous, wait_for_keys
from counterpoint.fabric.gloo.ops import ScratchPool, StartedOps
from counterpoint.fabric.gloo.transport import GlooFabric
from counterpoint.fabric.hosts.transport import HierarchicalFabric
from counterpoint.fabric.peer_liveness import describe_exit
from counterpoint.fabric.process_fabric import ProcessFabric
from counterpoint.fabric.process_group.backends import ProcessGroupBackend
from counterpoint.fabric.process_group.collectives import (
    Scratch,
    start_broadcast,
    start_exchange,
    start_gather_ranges,
    start_reduce_all,
    start_reduce_ranges,
)
from counterpoint.fabric.process_group.group_queue import GroupQueue, QueuedCollective, StartOnProcessGroup
from counterpoint.fabric.process_group.order import LogExcerpt, decode_excerpt, describe_divergence, describe_missing
from counterpoint.fabric.process_group.p2p import (
    PairChannel,
    TensorPlace,
    decode_places,
    encode_places,
    pack,
    unpack,
)
from counterpoint.fabric.process_group.staged import StagedWork, to_host
from counterpoint.fabric.process_group.watchdog import Watchdog
from counterpoint.rpc.tensor_codec import dtype_code

ABORT_CHECK_S = 0.2  # something that has been pending for so long may be pending for ever
COMPARE_S = 1.0
LOGS_WAIT_S = 1.0  # after a failure, wait this long for what the other members have started
READERS_WAIT_S = 2 * COMPARE_S  # after different logs were found, until the other members have found it, too
POLL_S = 0.02

Route: TypeAlias = Literal["process group", "host", "staged"]


class ProcessGroupFabric(ProcessFabric):
    """One rank among processes whose tensors move over c10d process groups.

    Rendezvous, JSON values, barriers, frames of messages, and announcements of collectives are on the host. A
    collective is announced if it is new after its predecessor; the others start without a comparison, and
    :meth:`check_same_order` compares all of them afterwards. Tensors of a device that the process groups do not take
    travel through host memory.

    A wait for a collective on a device makes the current stream wait, and does not block the host.

    Cost:
        a process group's collective on equal or nearly equal ranges; on others an all-to-all of exactly the ranges.
        16-bit floats are added up in 32 bits: an all-reduce sends them so, a reduce-scatter does not. A message is
        preceded by a frame between the hosts.

    Args:
        host: moves tensors in host memory where the process groups are of devices, and all values and frames.
        control: compares announcements; ``host``, a part of it, or another fabric.
        rendezvous: of the process groups.
        backend: their kind.

    Attributes:
        backend: as above.
    """

    takes_device_tensors = True

    def __init__(self, host: Fabric, control: GlooFabric, rendezvous: Rendezvous, backend: ProcessGroupBackend) -> None:
        super().__init__(control.rank, control.num_ranks, control.timeout_s)
        self.backend = backend
        self.needs_own_device = not backend.waits_on_host
        self._host = host
        self._control = control
        self._store: Store | None = rendezvous.store
        self._connections = Connections(control.rank, rendezvous, control.timeout_s)
        self._queues: dict[Group, GroupQueue] = {}
        self._announced_groups: set[Group] = set()
        self._channels: dict[int, PairChannel] = {}
        self._scratch_pool = ScratchPool()
        self._open_lock = Lock()
        self._watchdog: Watchdog | None = None
        self._closed = False
        self._pending_messages: list[PendingMessage] = []
        self._next_comparison_s: dict[Group, float] = {}
        self._accelerators: dict[torch.device, Accelerator] = {}
        self._spans: list[DeviceSpan] | None = None  # of collectives that start, if someone wants them
        parts = dict.fromkeys((*parts_of(host), control))
        for part in (self, *parts):
            part.link_to(*(other for other in (self, *parts) if other is not part))
        if backend.device_type == "cpu":
            everybody = tuple(range(self.num_ranks))
            with self.translate_errors("the first process group", everybody):
                self._open_groups(everybody)

    @property
    def hosts(self) -> Sequence[int]:
        """The host index of every rank."""
        return self._host.hosts

    def use_accelerator(self, accelerator: Accelerator) -> None:
        """Take note of the device that this rank's tensors will be on."""
        self._accelerators.setdefault(accelerator.device, accelerator)

    @contextmanager
    def record_spans(self) -> Iterator[list[DeviceSpan]]:
        """Record when a device executes the collectives that this rank starts inside.

        A span begins at the latest work that the collective waits for, and so contains its wait for the other ranks.
        """
        former, self._spans = self._spans, list[DeviceSpan]()
        try:
            yield self._spans
        finally:
            self._spans = former

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor in host memory."""
        return self._host.empty(num_elements, dtype)

    def try_empty(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return a flat tensor in host memory, if that saves a copy."""
        return self._host.try_empty(num_elements, dtype)

    def shared_zeros(self, label: str, num_elements: int, dtype: torch.dtype, group: Group) -> Tensor | None:
        """Return host memory shared by the members, if the host's fabric can."""
        return self._host.shared_zeros(label, num_elements, dtype, group)

    def barrier_async(self, label: str, group: Group) -> Work:
        """Start a barrier between the hosts."""
        return self._host.barrier_async(label, group)

    def gather_values(self, label: str, value: Json, group: Group) -> list[Json]:
        """Exchange values between the hosts."""
        return self._host.gather_values(label, value, group)

    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """Send a frame, and copies of the tensors after it."""
        check_peer(peer, self.rank, self.num_ranks, label)
        places = [
            TensorPlace(self._moves_raw(tensor), tensor.device.type, tensor.dtype, tuple(tensor.shape))
            for tensor in tensors
        ]
        for tensor in tensors:
            dtype_code(tensor)  # raises for what a frame would not take either
        values = [to_host(tensor) if self._route(tensor) == "staged" else tensor.detach() for tensor in tensors]
        in_frame = [value for value, place in zip(values, places, strict=True) if not place.is_raw]
        self._raise_failure()
        self._host.send(peer, label, [encode_places(places), *in_frame])
        if any(place.num_bytes for place in places):
            packed = pack(values, places, self._own_device())
            with self.translate_errors(f"buffer space to send {label}", (peer,)):
                self._channel_to(peer).send(packed, self._current_stream(packed.device), self.timeout_s)

    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Wait for the peer's next frame, and receive its tensors; only the stream waits for those of a device."""
        self._raise_failure()
        return self._complete(peer, label, self._host.recv(peer, label))

    def recv_any(self, peers: Sequence[int]) -> tuple[int, str, tuple[Tensor, ...]]:
        """Wait for a frame from any of the peers, and receive its tensors."""
        self._raise_failure()
        sender, label, frame = self._host.recv_any(peers)
        return sender, label, self._complete(sender, label, frame)

    def all_reduce(self, label: str, tensor: Tensor, group: Group, op: Reduction = "sum") -> Work:
        """Start the process group's all-reduce, on values that it reduces correctly."""
        match self._route(tensor):
            case "host":
                return self._host.all_reduce(label, tensor, group, op)
            case "staged":
                copy = to_host(tensor)
                return StagedWork(self.all_reduce(label, copy, group, op), (tensor.detach(), copy))
            case "process group":
                target, scratch = tensor.detach(), Scratch(self._scratch_pool, self._accelerator_of(tensor.device))
                return self._start(
                    tensor_signature(f"all_reduce {op}", label, tensor, group),
                    lambda process_group: start_reduce_all(process_group, target, op, scratch),
                    tensor.device,
                )

    def all_reduces_in_16_bits(self, tensor: Tensor, group: Group) -> bool:
        """Return what the fabric of host memory does with tensors that it takes."""
        return self._route(tensor) == "host" and self._host.all_reduces_in_16_bits(tensor, group)

    def reduce_scatter(
        self, label: str, whole: Tensor, bounds: Sequence[int], group: Group, op: Reduction = "sum"
    ) -> Work:
        """Start the process group's reduce-scatter, or an exchange of ranges that are then added up in group order."""
        match self._route(whole):
            case "host":
                return self._host.reduce_scatter(label, whole, bounds, group, op)
            case "staged":
                copy = to_host(whole)
                return StagedWork(self.reduce_scatter(label, copy, bounds, group, op), (whole.detach(), copy))
            case "process group":
                operation, flat = ranges_signature(f"reduce_scatter {op}", label, whole, bounds, group), whole.detach()
                scratch = Scratch(self._scratch_pool, self._accelerator_of(whole.device))
                return self._start(
                    operation,
                    lambda process_group: start_reduce_ranges(process_group, flat, bounds, op, scratch),
                    whole.device,
                )

    def all_gather(self, label: str, whole: Tensor, bounds: Sequence[int], group: Group) -> Work:
        """Start the process group's all-gather, or an exchange of the ranges."""
        match self._route(whole):
            case "host":
                return self._host.all_gather(label, whole, bounds, group)
            case "staged":
                copy = to_host(whole)
                return StagedWork(self.all_gather(label, copy, bounds, group), (whole.detach(), copy))
            case "process group":
                operation, flat = ranges_signature("all_gather", label, whole, bounds, group), whole.detach()
                scratch = Scratch(self._scratch_pool, self._accelerator_of(whole.device))
                return self._start(
                    operation,
                    lambda process_group: start_gather_ranges(process_group, flat, bounds, scratch),
                    whole.device,
                )

    def all_to_all(
        self, label: str, whole: Tensor, counts: Sequence[Sequence[int]], group: Group
    ) -> tuple[Tensor, Work]:
        """Start the process group's all-to-all."""
        match self._route(whole):
            case "host":
                return self._host.all_to_all(label, whole, counts, group)
            case "staged":
                on_host, work = self.all_to_all(label, to_host(whole), counts, group)
                target = torch.empty_like(on_host, device=whole.device)
                return target, StagedWork(work, (target, on_host))
            case "process group":
                operation = exchange_signature(label, whole, counts, group, self.rank)
                if len(group) == 1:
                    return whole.clone(), CompletedWork()
                member, flat = group.index(self.rank), whole.detach()
                received = flat.new_empty(sum(row[member] for row in counts))
                return received, self._start(
                    operation,
                    lambda process_group: start_exchange(process_group, received, flat, counts),
                    whole.device,
                )

    def broadcast(self, label: str, tensor: Tensor, group: Group, root: int) -> Work:
        """Start the process group's broadcast."""
        match self._route(tensor):
            case "host":
                return self._host.broadcast(label, tensor, group, root)
            case "staged":
                copy = to_host(tensor)
                return StagedWork(self.broadcast(label, copy, group, root), (tensor.detach(), copy))
            case "process group":
                target, scratch = tensor.detach(), Scratch(self._scratch_pool, self._accelerator_of(tensor.device))
                return self._start(
                    tensor_signature("broadcast", label, tensor, group, root=root),
                    lambda process_group: start_broadcast(process_group, target, group.index(root), scratch),
                    tensor.device,
                )

    def check_same_order(self, group: Group) -> None:
        """Compare digests of all collectives on process groups of members.

        Raises:
            PeerError: the members of a group have started different collectives.
        """
        members = set(group)
        compared: list[tuple[GroupQueue, Work]] = []
        for queue_group, queue in sorted(self._queues.items()):
            if queue.log.count and members.issuperset(queue_group):
                compared.append((queue, self._control.start(queue.log.signature(queue_group), None)))
        for queue, work in compared:
            try:
                work.wait()
            except PeerError as error:
                raise self.fail(self._describe_divergence(queue) or str(error)) from error

    def connect_groups(self, groups: Sequence[Group]) -> None:
        """Open the connections of the groups that this rank is in, in sorted order.

        Process groups of devices are opened by the first tensor on a device, all of them in sorted order: opening one
        takes memory of the device, and ranks that compute on the CPU need none.
        """
        self._host.connect_groups(groups)
        own_groups = [group for group in sorted(set(groups)) if self.rank in group and len(group) > 1]
        if self._control is not self._host:
            self._control.connect_groups(own_groups)
        self._announced_groups.update(own_groups)
        if self.backend.device_type == "cpu" and own_groups:
            with self.translate_errors("form of group", own_groups[0]):
                self._open_groups(own_groups[0])

    def broadcast_abort(self, reason: str) -> None:
        """Post the reason, and abort this rank's process groups."""
        self._connections.post_abort_reason(reason)
        self._connections.abort()

    def abort_reason(self) -> str | None:
        """Return None: the fabric of the hosts reads it."""
        return None

    def describe_error(self, error: Exception) -> str:
        """Return the text for a lost connection."""
        return self._control.describe_error(error)

    def abort(self, reason: str) -> None:
        """Tell the other ranks the reason, and abort all process groups."""
        if not self._closed:
            self.fail(reason)

    def close(self) -> None:
        """Wait until everything sent has left this rank, then release everything."""
        if self._closed:
            return
        self._closed = True
        try:
            if self.failure is None:
                for peer, channel in sorted(self._channels.items()):
                    with self.translate_errors("the arrival of what was sent", (peer,)):
                        channel.flush(self.timeout_s)
        finally:
            self._close_now()

    def _close_now(self) -> None:
        is_idle = all(queue.oldest_pending() is None for queue in self._queues.values())
        if self.failure is not None or not is_idle or not all(one.is_idle for one in self._channels.values()):
            self._connections.abort()
        self.failure = self.failure or "the fabric has been closed"
        if self._watchdog is not None:
            self._watchdog.close()
        for queue in self._queues.values():
            queue.close()
        for channel in self._channels.values():
            channel.close()
        self._connections.close()
        self._queues.clear()
        self._channels.clear()
        try:
            self._host.close()
        finally:
            if self._control is not self._host:
                self._control.close()
            for part in (self, self._control, *parts_of(self._host)):
                part.link_to()  # no cycle keeps the threads of gloo alive
            self._watchdog = self._store = None

    def finish(self, collective: QueuedCollective, queue: GroupQueue) -> None:
        """Wait for a collective; raise a PeerError that says why it cannot complete."""
        signature, group = collective.signature, queue.group
        began = time.monotonic()
        with self.translate_errors(f"{signature.kind} of {signature.label}", self.peers_of(group)):
            try:
                queue.finish(collective, self.timeout_s)
            except PeerError as error:  # the announcements differ, or their comparison failed
                raise PeerError(self._describe_divergence(queue) or str(error)) from error
            except (TimeoutError, RuntimeError) as error:
                text = None if self.failure is not None else self._describe_divergence(queue)
                if text is None and isinstance(error, TimeoutError):
                    text = self._describe_timeout(collective, queue, time.monotonic() - began)
                if text is not None:
                    raise PeerError(text) from error
                raise

    def _start(self, signature: CollectiveSignature, start_data: StartOnProcessGroup, device: torch.device) -> Work:
        check_group(signature, self.rank, self.num_ranks)
        group = signature.group
        if len(group) == 1:
            return CompletedWork()
        self._raise_failure()
        if group not in self._queues:
            with self.translate_errors(f"form of group of {signature.label}", self.peers_of(group)):
                self._open_groups(group)
        queue = self._queues[group]
        if self._spans is not None and not self.backend.waits_on_host:
            start_data = record_span(start_data, self._accelerator_of(device), self._spans)
        collective = queue.start(signature, start_data, self._current_stream(device))
        self._wake_watchdog()
        return QueuedWork(self, collective, queue)

    def _wake_watchdog(self) -> None:
        if self._watchdog is None:
            self._watchdog = Watchdog(self._check_pending)
        self._watchdog.wake()

    def _open_groups(self, group: Group) -> None:
        """Open the process groups of this group and of all announced ones, in sorted order."""
        with self._open_lock:
            for wanted in sorted({group, *self._announced_groups} - self._queues.keys()):
                self._control.connect_groups([wanted])
                process_group: DataProcessGroup = self._connect("collectives", wanted)  # type: ignore[assignment]
                self._queues[wanted] = GroupQueue(
                    wanted, self._control, process_group, waits_on_host=self.backend.waits_on_host
                )

    def _connect(self, name: str, group: Group) -> GlooProcessGroup:
        """Open a process group of the current device, which is this rank's in here, whichever thread calls it."""
        with self._current_stream(self._own_device()):
            return self._connections.open(name, group)

    def _accelerator_of(self, device: torch.device) -> Accelerator:
        if device not in self._accelerators:
            self._accelerators[device] = accelerator_for(device)
        return self._accelerators[device]

    def _current_stream(self, device: torch.device) -> AbstractContextManager[object]:
        """Return a context in which any thread launches work after what this thread has launched on the device."""
        return self._accelerator_of(device).as_current()

    def _own_device(self) -> torch.device:
        """Return the device of this rank that process groups move tensors of."""
        given = (device for device in self._accelerators if device.type == self.backend.device_type)
        return next(given, None) or self.backend.own_device()

    def _channel_to(self, peer: int) -> PairChannel:
        if peer not in self._channels:
            self._channels[peer] = PairChannel(self.rank, peer, self._connect, waits_on_host=self.backend.waits_on_host)
        return self._channels[peer]

    def _complete(self, peer: int, label: str, frame: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return a message, given its frame."""
        if not frame:
            raise PeerError(f"rank {peer} sent {label} without a description of its tensors")
        head, *in_frame = frame
        if not head.numel():
            return tuple(in_frame)
        places = decode_places(head, peer)
        packed = torch.empty(sum(place.num_bytes for place in places), dtype=torch.uint8, device=self._own_device())
        if packed.numel():
            with self.translate_errors(label, (peer,)):
                work = self._channel_to(peer).recv(packed, self.timeout_s)
            if not self.backend.waits_on_host:
                self._pending_messages.append(PendingMessage(label, peer, work, time.monotonic()))
                self._wake_watchdog()
        devices = {device.type: device for device in reversed(self._accelerators)}
        return unpack(packed, in_frame, places, devices)

    def _route(self, tensor: Tensor) -> Route:
        """Return how a tensor travels."""
        device_type = tensor.device.type
        if device_type == self.backend.device_type:
            return "process group"
        return "host" if device_type == "cpu" else "staged"

    def _moves_raw(self, tensor: Tensor) -> bool:
        """Return whether a tensor of a message moves over a process group; staged ones are in host memory then."""
        return tensor.numel() > 0 and self.backend.device_type in {tensor.device.type, "cpu"}

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise PeerError(self.failure)

    def _check_pending(self) -> bool:
        """Look after what is pending; return whether anything is. Called by the watchdog's thread."""
        if self.failure is not None or self._closed:
            return False
        pending = [(queue, *found) for queue in list(self._queues.values()) if (found := queue.oldest_pending())]
        for message in [message for message in self._pending_messages if message.work.is_completed()]:
            self._pending_messages.remove(message)  # the other thread may append at the same time
        text = next(filter(None, (self._find_failure(*one) for one in pending if one[2] >= ABORT_CHECK_S)), None)
        for message in self._pending_messages:
            waited_s = time.monotonic() - message.began_s
            text = text or self._find_end_of_wait(message.label, (message.peer,), waited_s)
        if text is not None:
            self.fail(text)
        return text is None and bool(pending or self._pending_messages)

    def _find_failure(self, queue: GroupQueue, collective: QueuedCollective, waited_s: float) -> str | None:
        """Return why a pending collective will not complete; None if it may."""
        signature, now_s = collective.signature, time.monotonic()
        what, peers = f"{signature.kind} of {signature.label}", self.peers_of(queue.group)
        describe_timeout = partial(self._describe_timeout, collective, queue, waited_s)
        text = self._find_end_of_wait(what, peers, waited_s, describe_timeout)
        if text is None and collective.error is not None:
            text = self._describe_divergence(queue) or (
                f"rank {self.rank} waited {waited_s:.1f} s for {what} with {format_ranks(peers)}: "
                f"{self.describe_error(collective.error)}"
            )
        if text is None and waited_s >= COMPARE_S and now_s >= self._next_comparison_s.get(queue.group, 0.0):
            self._next_comparison_s[queue.group] = now_s + COMPARE_S
            text = self._describe_divergence(queue, wait_s=0.0)
        return text

    def _find_end_of_wait(
        self,
        what: str,
        peers: Sequence[int],
        waited_s: float,
        describe_timeout: Callable[[], str | None] = lambda: None,
    ) -> str | None:
        """Return why a wait will not end: a rank has aborted; on a device, a peer has ended, or it is too late."""
        waits = f"rank {self.rank} waited {waited_s:.1f} s for {what} with {format_ranks(peers)}"
        reason = self._control.abort_reason()
        if reason is not None:
            return f"{waits}: stopped because of {reason}"
        if self.backend.waits_on_host:
            return None
        exited = self._control.exited_rank()
        if exited is not None and exited in peers:
            return f"{waits}: {describe_exit(exited)}"
        if waited_s <= self.timeout_s:
            return None
        return describe_timeout() or f"{waits}: the timeout of {self.timeout_s:.1f} s has passed"

    def _describe_divergence(self, queue: GroupQueue, wait_s: float = LOGS_WAIT_S) -> str | None:
        """Return an error text if the members have started different collectives."""
        text = describe_divergence(self._exchange_logs(queue, queue.log.count, wait_s), queue.num_moved)
        if text is not None:
            self._wait_for_readers(queue)
        return text

    def _wait_for_readers(self, queue: GroupQueue) -> None:
        """Wait until all members have compared the logs, for which they need the store: this rank may be its owner."""
        place, store = log_place(queue.group), self._store
        if store is None:
            return
        try:
            store.set(f"{place}/{self.rank}/read", "yes")
            wait_for_keys(
                store,
                [f"{place}/{rank}/read" for rank in queue.group],
                READERS_WAIT_S,
                lambda: self._control.exited_rank() in queue.group,
            )
        except RuntimeError:  # its owner has ended
            return

    def _describe_timeout(self, collective: QueuedCollective, queue: GroupQueue, waited_s: float) -> str | None:
        """Return an error text for a collective that was not complete in time, if the missing ranks are known."""
        signature = collective.signature
        missing = describe_missing(self._exchange_logs(queue, collective.index + 1, LOGS_WAIT_S), collective.index)
        if missing is None:
            return None
        return (
            f"rank {self.rank} waited {waited_s:.1f} s for {signature.kind} of {signature.label} with "
            f"{format_ranks(self.peers_of(queue.group))}: the timeout of {self.timeout_s:.1f} s has passed; "
            f"{self._control.describe_stopped() or missing}"
        )

    def _exchange_logs(self, queue: GroupQueue, count: int, wait_s: float) -> dict[int, LogExcerpt]:
        """Post what this rank has started in the group; return what each member has posted, at best ``count``.

        Args:
            queue: of the group.
            count: wait until all members have posted at least so many collectives.
            wait_s: the longest wait.
        """
        own, store = queue.log.excerpt(), self._store
        place = log_place(queue.group)
        if store is None:
            return {}
        end = time.monotonic() + wait_s
        excerpts = {rank: LogExcerpt(0, {}) for rank in queue.group}
        try:
            store.set(f"{place}/{self.rank}", own.encode())
            while True:
                for rank in self.peers_of(queue.group):
                    if store.check([f"{place}/{rank}"]):
                        excerpts[rank] = decode_excerpt(store.get(f"{place}/{rank}"))
                excerpts[self.rank] = own
                is_final = time.monotonic() >= end or self._control.exited_rank() in queue.group
                if is_final or all(excerpt.count >= count for excerpt in excerpts.values()):
                    return excerpts
                time.sleep(POLL_S)
        except RuntimeError:  # the store is gone
            return {}


class QueuedWork(Work):
    """A collective on a process group."""

    def __init__(self, fabric: ProcessGroupFabric, collective: QueuedCollective, queue: GroupQueue) -> None:
        self._fabric = fabric
        self._collective = collective
        self._queue: GroupQueue | None = queue

    def wait(self) -> None:
        """Block until complete, within the timeout; on a device, make the current stream wait."""
        if self._queue is not None:
            self._fabric.finish(self._collective, self._queue)
            self._queue = None

    @property
    def is_complete(self) -> bool:
        """Whether the process group's part is complete; :meth:`wait` does the rest."""
        return self._collective.is_complete

    def completes_within(self, seconds: float) -> bool:
        """Wait for at most ``seconds``."""
        if self._queue is not None and not self._queue.completes_within(self._collective, seconds):
            return False
        self.wait()
        return True


@dataclass(frozen=True, slots=True)
class PendingMessage:
    """A message that a device receives.

    Attributes:
        label: its label.
        peer: the sender.
        work: the receive.
        began_s: when it was started.
    """

    label: str
    peer: int
    work: GlooWork
    began_s: float


def record_span(
    start_data: StartOnProcessGroup, accelerator: Accelerator, spans: list[DeviceSpan]
) -> StartOnProcessGroup:
    """Return a function that starts a collective, and records when the device executes it.

    Its end is recorded on a stream that waits for nothing else, so that the computing stream does not wait for it::

        computing stream   | backward, began --.  . . . . . . . . wait
        process group      |                   '--> all_reduce --.
        another stream     |                                     '--> ended

    Args:
        start_data: starts it.
        accelerator: of the device.
        spans: to which the span is added.
    """
    span = DeviceSpan()
    spans.append(span)

    def start(process_group: DataProcessGroup) -> StartedOps:
        span.began = accelerator.new_event(enable_timing=True)
        span.began.record(accelerator.current_stream())
        works, after = start_data(process_group)
        with accelerator.stream(accelerator.new_stream()):
            for work in works:
                cast("DeviceWork", work).block_current_stream()
            span.ended = accelerator.new_event(enable_timing=True)
            span.ended.record(accelerator.current_stream())
        return works, after

    return start


def log_place(group: Group) -> str:
    """Return the key of a group's logs in the store."""
    return f"order/{'.'.join(map(str, group))}"


def parts_of(fabric: Fabric | None) -> tuple[ProcessFabric, ...]:
    """Return the fabrics that a fabric among processes consists of; none of no fabric."""
    if isinstance(fabric, HierarchicalFabric):
        return fabric.parts
    return (fabric,) if isinstance(fabric, ProcessFabric) else ()
