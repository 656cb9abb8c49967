"""Transport ``local``: all ranks are threads of this process, scheduled deterministically.

Collectives on tensors of a device run on a communication stream, while the device continues to compute. A message is a
copy in the order of the computing stream: the sender may overwrite its tensors at once, and nothing is transferred.
"""

from __future__ import annotations

import json
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Final, TypeVar

import torch
from torch import Tensor

from counterpoint.device.accelerator import Accelerator
from counterpoint.device.communication_stream import CommunicationStream
from counterpoint.device.event_clock import DeviceSpan
from counterpoint.errors import PeerError
from counterpoint.fabric.fabric import CompletedWork, Fabric, Group, Json, Reduction, Work
from counterpoint.fabric.fingerprint import (
    CollectiveSignature,
    check_group,
    check_peer,
    describe_unexpected_message,
    dtype_name,
    exchange_signature,
    format_ranks,
    ranges_signature,
    tensor_signature,
)  # fmt: skip
from counterpoint.fabric.local_collective import CollectiveInput, LocalCollective
from counterpoint.fabric.rank_scheduler import RankScheduler
from counterpoint.rpc.tensor_codec import dtype_code

T = TypeVar("T")

COMPLETED: Final = CompletedWork()


class LocalFabric(Fabric):
    """One rank of a :class:`LocalWorld`.

    Waits ignore ``timeout_s``: when no rank is runnable, the deadlock is detected at once and the error lists
    which rank waits for which.
    """

    def __init__(
        self, rank: int, num_ranks: int, timeout_s: float, state: LocalState, scheduler: RankScheduler | None
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self._state = state
        self._scheduler = scheduler
        self._spans: list[DeviceSpan] | None = None  # of collectives that start, if someone wants them

    @contextmanager
    def record_spans(self) -> Iterator[list[DeviceSpan]]:
        """Record when a device executes the collectives that this rank starts inside."""
        former, self._spans = self._spans, list[DeviceSpan]()
        try:
            yield self._spans
        finally:
            self._spans = former

    def wait_until(self, is_done: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Run other ranks until ``is_done()``."""
        if self._scheduler is not None:
            self._scheduler.wait(self.rank, is_done, describe)

    def use_accelerator(self, accelerator: Accelerator) -> None:
        """Use streams of the device that tensors will be on."""
        self._state.use_accelerator(accelerator)

    def order_after(self, collective: LocalCollective) -> None:
        """Let this thread's current stream wait for a collective whose members have all joined."""
        self._state.order_after(collective)

    def wait_collective(self, collective: LocalCollective, describe: Callable[[], str]) -> None:
        """Run other ranks until the collective is complete.

        Raises:
            PeerError: the members disagree, or disagreed in an earlier collective of the group.
        """
        group, errors = collective.group, self._state.errors
        self.wait_until(lambda: collective.is_done or group in errors, describe)
        if collective.error is not None or not collective.is_done:
            raise PeerError(collective.error or errors[group])

    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """Put copies of the tensors into the peer's mailbox."""
        check_peer(peer, self.rank, self.num_ranks, label)
        self._check()
        for tensor in tensors:
            dtype_code(tensor)
        copies = tuple(tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors)
        self._state.messages[self.rank, peer].append((label, copies))

    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Run other ranks until the peer's next message is in the mailbox."""
        check_peer(peer, self.rank, self.num_ranks, label)
        mailbox = self._state.messages[peer, self.rank]
        self.wait_until(lambda: bool(mailbox), lambda: f"{label} from rank {peer}")
        received_label, tensors = mailbox.popleft()
        if received_label != label:
            story = describe_unexpected_message(self.rank, label, peer, received_label)
            self.abort(story)
            raise PeerError(story)
        return tensors

    def recv_any(self, peers: Sequence[int]) -> tuple[int, str, tuple[Tensor, ...]]:
        """Return the next message of the first peer, in the order given, that has sent one."""
        for peer in peers:
            check_peer(peer, self.rank, self.num_ranks, "any message")
        boxes = {peer: self._state.messages[peer, self.rank] for peer in peers}
        self.wait_until(lambda: any(boxes.values()), lambda: f"any message from {format_ranks(peers)}")
        peer = next(peer for peer in peers if boxes[peer])
        return (peer, *boxes[peer].popleft())

    def all_reduce(self, label: str, tensor: Tensor, group: Group, op: Reduction = "sum") -> Work:
        """Join; the last member reduces, in group order."""
        return self._start(tensor_signature(f"all_reduce {op}", label, tensor, group), tensor)

    def all_reduces_in_16_bits(self, tensor: Tensor, group: Group) -> bool:
        """Return True: ranks read each other's values in this process, and widen them as they add them up."""
        del tensor, group
        return True

    def reduce_scatter(
        self, label: str, whole: Tensor, bounds: Sequence[int], group: Group, op: Reduction = "sum"
    ) -> Work:
        """Join; the last member reduces each range for its owner, in group order."""
        return self._start(ranges_signature(f"reduce_scatter {op}", label, whole, bounds, group), whole)

    def all_to_all(
        self, label: str, whole: Tensor, counts: Sequence[Sequence[int]], group: Group
    ) -> tuple[Tensor, Work]:
        """Join; the last member copies every range to its destination."""
        operation = exchange_signature(label, whole, counts, group, self.rank)
        if len(group) == 1:
            return whole.clone(), self._start(operation, None)
        place = group.index(self.rank)
        received = whole.new_empty(sum(row[place] for row in counts))
        return received, self._start(operation, (whole, received))

    def all_gather(self, label: str, whole: Tensor, bounds: Sequence[int], group: Group) -> Work:
        """Join; the last member copies every range to all."""
        return self._start(ranges_signature("all_gather", label, whole, bounds, group), whole)

    def broadcast(self, label: str, tensor: Tensor, group: Group, root: int) -> Work:
        """Join; the last member copies the root's tensor to all."""
        return self._start(tensor_signature("broadcast", label, tensor, group, root=root), tensor)

    def gather_values(self, label: str, value: Json, group: Group) -> list[Json]:
        """Join with a value, and wait for those of all members."""
        operation = CollectiveSignature("gather_values", label, group)
        check_group(operation, self.rank, self.num_ranks)
        encoded = json.dumps(value).encode()
        if len(group) == 1:
            return [json.loads(encoded)]
        collective = self._join(operation, encoded)
        LocalWork(self, operation, collective).wait()
        return [json.loads(collective.inputs[member]) for member in group]  # type: ignore[arg-type]  # all are bytes

    @property
    def hosts(self) -> Sequence[int]:
        """One host."""
        return [0] * self.num_ranks

    def shared_zeros(self, label: str, num_elements: int, dtype: torch.dtype, group: Group) -> Tensor | None:
        """Join; all members get the tensor that the first one allocates."""
        operation = CollectiveSignature("shared", label, group, dtype_name(dtype), (num_elements,))
        check_group(operation, self.rank, self.num_ranks)
        own = torch.zeros(num_elements, dtype=dtype) if self.rank == group[0] else None
        if len(group) == 1:
            return own
        collective = self._join(operation, own)
        LocalWork(self, operation, collective).wait()
        shared = collective.inputs[group[0]]
        assert isinstance(shared, Tensor), "the first member joins with a tensor"
        return shared

    def barrier_async(self, label: str, group: Group) -> Work:
        """Join."""
        return self._start(CollectiveSignature("barrier", label, group), None)

    def connect_groups(self, groups: Sequence[Group]) -> None:
        """Only validate the groups: all ranks are in one process."""
        for group in groups:
            if self.rank in group:
                check_group(CollectiveSignature("form", "group", group), self.rank, self.num_ranks)

    def abort(self, reason: str) -> None:
        """Make the other ranks raise at their next wait."""
        if self._scheduler is not None:
            self._scheduler.fail(self.rank, reason)

    def close(self) -> None:
        """Do nothing: the world owns the threads."""
        return

    def _check(self) -> None:
        if self._scheduler is not None:
            self._scheduler.raise_if_failed()

    def _start(self, operation: CollectiveSignature, tensors: CollectiveInput) -> Work:
        check_group(operation, self.rank, self.num_ranks)
        if len(operation.group) == 1:
            return COMPLETED
        return LocalWork(self, operation, self._join(operation, tensors))

    def _join(self, operation: CollectiveSignature, tensors: CollectiveInput) -> LocalCollective:
        self._check()
        collective = self._state.join_collective(self.rank, operation, tensors, is_timed=self._spans is not None)
        if self._spans is not None and collective.span is not None:
            self._spans.append(collective.span)
        return collective


class LocalWork(Work):
    """A collective among ranks of this process."""

    def __init__(self, fabric: LocalFabric, operation: CollectiveSignature, collective: LocalCollective) -> None:
        self._fabric = fabric
        self._operation = operation
        self._collective = collective

    @property
    def is_complete(self) -> bool:
        """Whether the last member has joined; a device may still be at work."""
        return self._collective.is_done

    def wait(self) -> None:
        """Run the other ranks until the last member has joined; on a device, make the current stream wait."""
        collective = self._collective
        description = f"{self._operation.kind} of {self._operation.label} among {format_ranks(collective.group)}"
        self._fabric.wait_collective(collective, lambda: f"{description} with {format_ranks(collective.missing)}")
        self._fabric.order_after(collective)


class LocalState:
    """State shared by the ranks of one world: messages in flight, and collectives that some members have not joined."""

    def __init__(self) -> None:
        self.messages: defaultdict[tuple[int, int], deque[tuple[str, tuple[Tensor, ...]]]] = defaultdict(deque)
        self.collectives: dict[tuple[Group, int], LocalCollective] = {}
        self.next_index: defaultdict[tuple[int, Group], int] = defaultdict(int)
        self.errors: dict[Group, str] = {}
        self.communication: CommunicationStream | None = None  # of the device, unless tensors are in host memory
        self.unordered: set[LocalCollective] = set()  # launched there, and the computing stream does not wait yet

    def use_accelerator(self, accelerator: Accelerator) -> None:
        """Communicate on a stream of the device that tensors will be on, unless it is the host."""
        communication = self.communication
        if accelerator.is_host or (communication and communication.accelerator.device == accelerator.device):
            return
        self.communication = CommunicationStream(accelerator)

    def share_current_stream(self) -> Callable[[], AbstractContextManager[object]]:
        """Return a function whose result lets any thread's work be done on the stream that is now this thread's."""
        if self.communication is None:
            return nullcontext
        accelerator = self.communication.accelerator
        return partial(accelerator.stream, accelerator.current_stream())

    def join_collective(
        self, rank: int, operation: CollectiveSignature, tensors: CollectiveInput, *, is_timed: bool = False
    ) -> LocalCollective:
        """Add this rank to the next collective of the signature's group; return the collective."""
        group = operation.group
        index = self.next_index[rank, group]
        self.next_index[rank, group] += 1
        collective = self.collectives.setdefault((group, index), LocalCollective(group, index))
        if is_timed and collective.span is None:
            collective.span = DeviceSpan()
        stream = self.communication
        if stream is None or not stream.holds_any(tensors if isinstance(tensors, tuple) else (tensors,)):
            collective.join(rank, operation, tensors)
        else:
            span = collective.span
            with stream.after_current():
                began = None if span is None else stream.record_end(enable_timing=True)
                collective.join(rank, operation, tensors)
            if collective.all_joined:
                collective.end = stream.record_end(enable_timing=span is not None)
                self.unordered.add(collective)
                if span is not None:
                    span.began, span.ended = began, collective.end
        if collective.error is not None:
            self.errors.setdefault(group, collective.error)
        if collective.all_joined:
            del self.collectives[group, index]
        return collective

    def order_after(self, collective: LocalCollective) -> None:
        """Let this thread's current stream wait for a collective whose members have all joined."""
        if self.communication is not None and collective.end is not None:
            self.communication.wait_for(collective.end)
            self.unordered.discard(collective)

    def clear(self) -> None:
        """Drop everything in flight; what was launched ends before its memory is used again."""
        if self.communication is not None:
            self.communication.wait_for_all()
        self.messages.clear()
        self.collectives.clear()
        self.next_index.clear()
        self.errors.clear()
        self.unordered.clear()


class LocalWorld:
    """Ranks of one process, which run one function at a time.

    Messages and collectives in flight at the end of a run continue in the next one; a run that fails drops them all.

    Example:
        >>> with LocalWorld(3) as world:
        ...     world.run(lambda fabric: fabric.gather_values("mine", fabric.rank * 10, (0, 1, 2))[2])
        [20, 20, 20]
    """

    def __init__(self, num_ranks: int, timeout_s: float = 30.0) -> None:
        self._state = LocalState()
        self._scheduler = RankScheduler(num_ranks, timeout_s) if num_ranks > 1 else None
        if self._scheduler is not None:
            weakref.finalize(self, self._scheduler.close)  # ends the threads when the world is garbage-collected
        self.fabrics: tuple[Fabric, ...] = tuple(
            LocalFabric(rank, num_ranks, timeout_s, self._state, self._scheduler) for rank in range(num_ranks)
        )

    def run(self, work: Callable[[Fabric], T]) -> list[T]:
        """Return ``work(fabric)`` of each rank, or re-raise the first error with a note that names its rank."""
        if self._scheduler is None:
            return [work(self.fabrics[0])]
        results: dict[int, T] = {}
        use_stream = self._state.share_current_stream()  # which is thread-local

        def record(rank: int) -> None:
            with use_stream():
                results[rank] = work(self.fabrics[rank])

        try:
            self._scheduler.run(record)
        except BaseException:
            self._state.clear()
            raise
        return [results[rank] for rank in range(len(self.fabrics))]

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._scheduler is not None:
            self._scheduler.close()

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
