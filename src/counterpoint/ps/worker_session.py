"""Worker session: splits requests over shards, tracks pending replies, and talks to the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Generic, Protocol, Self, TypeAlias, TypeVar, assert_never

import torch
from torch import Tensor

from counterpoint.errors import CounterpointError, DataError, LaunchError, PeerError, PlanError, ProtocolError
from counterpoint.ps.actions import DeliverReply, PsAction, Shutdown
from counterpoint.ps.client import CoordinatorCall, PsClient
from counterpoint.ps.consistency import NO_SLICE
from counterpoint.ps.key_partitioning import (
    DTYPE_NAMES,
    DenseKey,
    PartitionedKey,
    TableKey,
    check_has_servers,
    validate_rule,
    validate_value,
)
from counterpoint.ps.membership import Membership
from counterpoint.ps.message_codec import PsMessage
from counterpoint.ps.messages import (
    Ack,
    CheckpointReply,
    CheckpointRequest,
    DataTask,
    InitRequest,
    JoinClock,
    KeySpec,
    LeaveClock,
    LeaveRequest,
    MembershipView,
    PullReply,
    PullRequest,
    PushReply,
    PushRequest,
    Rejected,
    RequestHeader,
    TaskOutcome,
    TaskReply,
    TaskReport,
    TaskRequest,
    WriteRequest,
)
from counterpoint.ps.placement import place_key
from counterpoint.ps.row_pooling import RowPooling
from counterpoint.ps.session import NO_TASK_YET, InitialRows, NoTaskYet, PullResult, PushResult, Versions
from counterpoint.ps.update_rules import Assign, Initializer, UpdateRule
from counterpoint.rpc.job_key import JobKey

PartReply: TypeAlias = PushReply | PullReply | Ack

Result = TypeVar("Result")

CoordinatorResponse: TypeAlias = TaskReply | CheckpointReply | Ack | Rejected

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.005, 0.1
"""Interval between requests for data: the first and the longest one; it doubles each time."""

FinishedT = TypeVar("FinishedT")


class WorkerSession:
    """Implementation of :class:`counterpoint.ps.session.Session` over a message transport.

    Args:
        client: protocol state machine of the worker.
        transport: of its messages.
        job_key: which workers prove to each other; None among processes of one host and user.
    """

    def __init__(self, client: PsClient, transport: MessageTransport, job_key: JobKey | None = None) -> None:
        self.job, self.name, self.job_key = client.job, client.name, job_key
        self._client, self._transport = client, transport
        self._keys: dict[str, PartitionedKey] = {}
        self._read_versions: dict[str, Versions] = {}
        self._newest_version = 0
        self._writes: dict[tuple[int, int], tuple[PendingRequest[object], int]] = {}
        self._pulls: dict[int, tuple[PendingRequest[object], int]] = {}
        self._coordinator = CoordinatorClient(client, transport)
        self._error: CounterpointError | None = None
        self._has_left = False

    @property
    def membership(self) -> Membership:
        """Membership of this incarnation."""
        return self._client.membership

    @property
    def view(self) -> MembershipView:
        """Newest membership view that this session has received."""
        return self._client.membership.view

    def wait_view(self, newer_than: int, timeout_s: float) -> MembershipView:
        """Return the view once it is of a newer generation, or when the time is up."""
        self._transport.wait(lambda: self.view.generation > newer_than or self._error is not None, timeout_s)
        self._check_open()
        return self.view

    def on_event(self, message: PsMessage | None, now: float) -> list[PsAction]:
        """Process a message or a clock tick; deliver replies to pending requests, and return messages to send."""
        if self._has_left or self._error is not None:
            return []
        sends: list[PsAction] = []
        for action in self._client.on_event(message, now):
            if isinstance(action, DeliverReply):
                sends += self._on_reply(action.reply)
            elif isinstance(action, Shutdown):
                self.fail(PeerError(f"{self.name}: {action.reason}"))
            else:
                sends.append(action)
        return sends

    def fail(self, error: CounterpointError) -> None:
        """End the session, and fail all pending requests."""
        self._error = self._error or error
        self._coordinator.fail(self._error)
        for request, _ in (*self._writes.values(), *self._pulls.values()):
            request.fail(error)
        self._writes.clear()
        self._pulls.clear()

    def _on_reply(self, reply: PushReply | PullReply | Ack | Rejected | TaskReply | CheckpointReply) -> list[PsAction]:
        if isinstance(reply, TaskReply | CheckpointReply) or reply.shard < 0:
            actions = self._coordinator.on_response(reply)  # type: ignore[arg-type]
            if self._coordinator.error is not None:
                self.fail(self._coordinator.error)
            return actions
        if isinstance(reply, PullReply):
            request, part = self._pulls.pop(reply.ticket)
        elif isinstance(reply, Rejected) and reply.is_pull:
            request, part = self._pulls.pop(reply.sequence)
        else:
            request, part = self._writes.pop((reply.shard, reply.sequence))
        request.on_reply(part, reply)
        return []

    # Requests to shards

    def init(self, key: str, value: Tensor, rule: UpdateRule) -> None:
        """Create a dense key, unless it exists."""
        validate_rule(self.job, key, rule)
        validate_value(key, value)
        dense = DenseKey(key, tuple(value.shape), value.dtype, place_key(key, value.numel(), self.job.num_shards))
        self._make_key(dense, list(dense.specs(rule)), [part.values.clone() for part in dense.split_push(value, None)])

    def init_rows(
        self,
        key: str,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        rule: UpdateRule,
        initializer: Initializer | InitialRows,
    ) -> None:
        """Create a table of rows, which are initialized when they are first read."""
        if dtype not in DTYPE_NAMES or num_rows < 1 or width < 1:
            raise PlanError(
                f"{key} of {num_rows} x {width} {dtype}; a table has 1 or more rows of one of "
                f"{', '.join(DTYPE_NAMES.values())}"
            )
        if isinstance(rule, Assign):
            raise PlanError(f"rows of {key} without an optimizer on the server; give them an update rule")
        validate_rule(self.job, key, rule)
        table = TableKey(key, num_rows, width, dtype, self.job.num_shards)
        if isinstance(initializer, InitialRows):
            parts = table.split_push(initializer.values, initializer.rows)
            values, row_ids = [part.values for part in parts], [part.rows for part in parts]
            self._make_key(table, list(table.specs(rule, initializer.default)), values, row_ids)
        else:
            self._make_key(table, list(table.specs(rule, initializer)), [None] * self.job.num_shards)

    def _make_key(
        self,
        key: PartitionedKey,
        specs: Sequence[KeySpec],
        values: Sequence[Tensor | None],
        rows: Sequence[Tensor | None] = (),
    ) -> None:
        initial_values = zip(key.shards, specs, values, rows or [None] * len(specs), strict=True)
        writes: list[tuple[int, Callable[[RequestHeader], WriteRequest]]] = [
            (shard, lambda header, shard=shard, begin=begin: InitRequest(header, shard, *begin))  # type: ignore[misc]
            for shard, *begin in initial_values
        ]
        self._send_writes(f"the servers to create {key.name}", writes, lambda _: None).wait()
        self._keys[key.name] = key
        self._read_versions.setdefault(key.name, (0,) * len(key.shards))

    def push(  # noqa: PLR0913 - fields of a push, most by keyword
        self,
        key: str,
        values: Tensor,
        *,
        slice_index: int = NO_SLICE,
        read_versions: Versions | None = None,
        rows: Tensor | None = None,
        codec: str = "",
        pooling: RowPooling | None = None,
    ) -> PendingRequest[PushResult]:
        """Push a gradient; its tensors must not change until the result has arrived."""
        partitioned = self._find_key(key)
        versions = self._read_versions[key] if read_versions is None else read_versions
        if len(versions) != len(partitioned.shards):
            raise PlanError(
                f"{len(versions)} versions of {key}, which has {len(partitioned.shards)} parts; give so many"
            )
        writes: list[tuple[int, Callable[[RequestHeader], WriteRequest]]] = [
            (
                part.shard,
                lambda header, part=part, version=version: PushRequest(  # type: ignore[misc]
                    header, part.shard, key, slice_index, version, part.values, part.rows, codec, part.pooling
                ),
            )
            for part, version in zip(partitioned.split_push(values, rows, codec, pooling), versions, strict=True)
        ]
        return self._send_writes(f"the servers to count a push to {key}", writes, self._finish_push, values)

    def _finish_push(self, replies: list[PartReply]) -> PushResult:
        push_replies = [reply for reply in replies if isinstance(reply, PushReply)]
        versions = tuple(reply.version for reply in push_replies)
        self._newest_version = max(self._newest_version, *versions)
        return PushResult(versions, tuple(reply.is_new for reply in push_replies))

    def _send_writes(
        self,
        what: str,
        writes: Sequence[tuple[int, Callable[[RequestHeader], WriteRequest]]],
        finish: Callable[[list[PartReply]], FinishedT],
        values: Tensor | None = None,
    ) -> PendingRequest[FinishedT]:
        request = self._start_request(what, len(writes), finish, values)
        with self._transport.lock:
            for part, (shard, make) in enumerate(writes):
                sequence, actions = self._client.write(shard, make)
                self._writes[shard, sequence] = (request, part)  # type: ignore[assignment]
                self._transport.execute(actions)
        return request

    def _start_request(
        self,
        what: str,
        num_parts: int,
        finish: Callable[[list[PartReply]], FinishedT],
        values: Tensor | None = None,
    ) -> PendingRequest[FinishedT]:
        self._check_open()
        limit_s = self.job.timeouts.lease_s
        if not self._transport.wait(self._transport.can_send, limit_s):
            raise PeerError(f"waited {limit_s:g} s for servers to receive earlier messages; check what they do")
        return PendingRequest(self._transport, what, num_parts, finish, limit_s, values)

    def pull(
        self,
        key: str,
        *,
        rows: Tensor | None = None,
        min_versions: Versions | int = 0,
        out: Tensor | None = None,
        exact_version: bool = False,
        pooling: RowPooling | None = None,
    ) -> PendingRequest[PullResult]:
        """Pull the value of a key, some of its rows, or sums of rows."""
        partitioned = self._find_key(key)
        reads = partitioned.split_pull(rows, pooling)
        if out is not None:
            partitioned.validate_out(out, rows, pooling)
        versions = (min_versions,) * len(reads) if isinstance(min_versions, int) else min_versions
        if len(versions) != len(reads):
            raise PlanError(f"{len(versions)} versions of {key}, which has {len(reads)} parts; give so many, or one")

        def finish(replies: list[PartReply]) -> PullResult:
            pull_replies = [reply for reply in replies if isinstance(reply, PullReply)]
            self._read_versions[key] = tuple(reply.version for reply in pull_replies)
            return PullResult(
                partitioned.assemble([reply.values for reply in pull_replies], reads, out), self._read_versions[key]
            )

        request = self._start_request(f"{key} at version {min_versions} or newer", len(reads), finish)
        with self._transport.lock:
            for part, (read, bound) in enumerate(zip(reads, versions, strict=True)):
                ticket, actions = self._client.pull(
                    read.shard,
                    lambda header, ticket, read=read, bound=bound: PullRequest(  # type: ignore[misc]
                        header, read.shard, key, ticket, bound, read.rows, exact_version, read.pooling
                    ),
                )
                self._pulls[ticket] = (request, part)  # type: ignore[assignment]
                self._transport.execute(actions)
        return request

    def batch(self) -> AbstractContextManager[None]:
        """Return a context whose pushes and pulls are sent together at its end."""
        return self._transport.batch()

    def join_clock(self) -> None:
        """Join the ssp clock, before the pull for the first push."""
        writes = [(shard, lambda header, shard=shard: JoinClock(header, shard)) for shard in range(self.job.num_shards)]
        self._send_writes("the servers to add this worker to the clock", writes, lambda _: None).wait()

    def leave_clock(self) -> None:
        """Leave the ssp clock until the next :meth:`join_clock`."""
        writes = [
            (shard, lambda header, shard=shard: LeaveClock(header, shard)) for shard in range(self.job.num_shards)
        ]
        self._send_writes("the servers to remove this worker from the clock", writes, lambda _: None).wait()

    def _find_key(self, key: str) -> PartitionedKey:
        self._check_open()
        partitioned = self._keys.get(key)
        if partitioned is None:
            names = ", ".join(sorted(self._keys)) or "none"
            raise PlanError(f"unknown key {key!r} (there are: {names}); call init or init_rows before push and pull")
        return partitioned

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._has_left:
            raise PlanError(f"{self.name} has left {self.job.name}; join again to use it")

    # Requests to the coordinator

    def wait_ready(self, timeout_s: float) -> Self:
        """Wait until the session belongs to the job and all shards have servers.

        Raises:
            LaunchError: another worker has the name, this worker has another job, or no reply in time.
        """
        has_outcome = self._transport.wait(self._has_join_outcome, timeout_s)
        last_error = self._transport.last_error
        if not self._client.is_ready and self._error is None:
            server_count = f"{len(self.view.servers)} of {self.job.num_servers} servers are running"
            missing = server_count if self._client.membership.is_member else "the coordinator has not answered"
            waited = "could not join" if has_outcome else f"waited {timeout_s:g} s for"
            raise LaunchError(f"{self.name} {waited} job {self.job.name}: {last_error or missing}") from last_error
        self._check_open()
        return self

    def _has_join_outcome(self) -> bool:
        """Tell whether the session belongs to the job, or never will."""
        is_hopeless = isinstance(self._transport.last_error, ProtocolError)
        return self._client.is_ready or self._error is not None or is_hopeless

    def lease(self, timeout_s: float = 0.0) -> DataTask | NoTaskYet | None:
        """Return a task; None if all data of all epochs has been processed."""
        self._check_open()
        return self._coordinator.lease(timeout_s)

    def report(self, task: DataTask, outcome: TaskOutcome, text: str = "") -> None:
        """Report the outcome of a task; done requires that all of its pushes were acknowledged."""
        newest = self._newest_version
        self._check_open()
        self._coordinator.call(lambda header: TaskReport(header, task, outcome, newest, text))

    def checkpoint(self) -> int:
        """Request a snapshot and return its number; it is saved once no task is partially applied."""
        self._check_open()
        check_has_servers(self.job, "a snapshot")
        response = self._coordinator.call(CheckpointRequest)
        if not isinstance(response, CheckpointReply):
            raise PeerError(f"the coordinator answered {response} to a checkpoint request; check its version")
        return response.snapshot

    def leave(self) -> None:
        """Leave the job; leased tasks are assigned to others, and the session cannot be used any more."""
        self._check_open()
        self._coordinator.call(LeaveRequest)
        self._has_left = True

    def close(self) -> None:
        """Leave the job if it can be reached, and release all resources."""
        try:
            if self._error is None and not self._has_left and self._client.membership.is_member:
                self._coordinator.start_call(LeaveRequest)
                self._coordinator.wait_response(self.job.timeouts.failure_timeout_s)
        finally:
            self._has_left = True
            self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


class CoordinatorClient:
    """Calls to the coordinator, one at a time, and tasks that arrived while no call waited for them.

    Args:
        client: protocol state machine of the worker.
        transport: of its messages.
    """

    def __init__(self, client: PsClient, transport: MessageTransport) -> None:
        self._client, self._transport = client, transport
        self._make_request: Callable[[RequestHeader], CoordinatorCall] | None = None
        self._is_task_request = False
        self._response: CoordinatorResponse | None = None
        self._spare_tasks: list[TaskReply] = []
        self.error: CounterpointError | None = None

    def on_response(self, response: CoordinatorResponse) -> list[PsAction]:
        """Process a response of the coordinator; return the actions to execute.

        A task that arrives when none is awaited, because an earlier call was still open, is kept for later.
        """
        if isinstance(response, TaskReply) and not self._is_task_request:
            self._spare_tasks.append(response)
            return [] if self._make_request is None else self._client.call_coordinator(self._make_request)
        if isinstance(response, Rejected) and not self._client.membership.is_member:
            self.error = error_from_rejection(response)
        elif self._is_task_request or not _is_no_task_yet(response):
            self._response = response
        return []

    def lease(self, timeout_s: float) -> DataTask | NoTaskYet | None:
        """Return a task; None if all data has been processed."""
        if not self._spare_tasks:
            response = self._call(TaskRequest, timeout_s)
            if not isinstance(response, TaskReply):
                return NO_TASK_YET
            return response.task
        return self._spare_tasks.pop(0).task

    def call(self, make_request: Callable[[RequestHeader], CoordinatorCall]) -> CoordinatorResponse:
        """Return the response of the coordinator.

        Raises:
            PeerError: the job has stopped, or there is no response in time.
        """
        return self._call(make_request, 0.0)

    def fail(self, error: CounterpointError) -> None:
        """Fail the call that waits, and all later ones."""
        self.error = error

    def start_call(self, make_request: Callable[[RequestHeader], CoordinatorCall]) -> None:
        """Send a call."""
        with self._transport.lock:
            self._make_request, self._is_task_request, self._response = make_request, make_request is TaskRequest, None
            self._transport.execute(self._client.call_coordinator(make_request))

    def wait_response(self, timeout_s: float) -> bool:
        """Tell whether a response arrives in time."""
        return self._transport.wait(lambda: self._response is not None or self.error is not None, timeout_s)

    def _call(self, make_request: Callable[[RequestHeader], CoordinatorCall], timeout_s: float) -> CoordinatorResponse:
        lease_s = self._client.job.timeouts.lease_s
        self.start_call(make_request)
        try:
            self.wait_response(lease_s)
            self._poll(make_request, timeout_s)
        finally:
            with self._transport.lock:
                response, self._make_request, self._is_task_request = self._response, None, False
        if (
            response is None and self.error is not None
        ):  # a worker that has left is rejected, which is not an error if it got its response
            raise self.error
        if response is None:
            raise PeerError(
                f"waited {lease_s:g} s for the coordinator of {self._client.job.name} to answer {self._client.name}; "
                "check that it runs"
            )
        if isinstance(response, Rejected) and response.reason != "later":
            raise error_from_rejection(response)
        return response

    def _poll(self, make_request: Callable[[RequestHeader], CoordinatorCall], timeout_s: float) -> None:
        """Repeat a task request while no task may start, since the coordinator does not notify waiting workers."""
        left_s, pause_s = timeout_s, MIN_BACKOFF_S
        while left_s > 0 and self._is_waiting():
            if self._transport.wait(lambda: not self._is_waiting(), min(pause_s, left_s)):
                return
            left_s, pause_s = left_s - pause_s, min(2 * pause_s, MAX_BACKOFF_S)
            with self._transport.lock:
                if self._is_waiting():
                    self._transport.execute(self._client.call_coordinator(make_request))

    def _is_waiting(self) -> bool:
        return _is_no_task_yet(self._response) and self.error is None


def _is_no_task_yet(response: CoordinatorResponse | None) -> bool:
    return isinstance(response, Rejected) and response.reason == "later"


class PendingRequest(Generic[Result]):
    """A request to one or more shards, and the replies so far.

    Args:
        transport: of the session.
        what: description of the request, for errors.
        num_parts: number of expected replies.
        finish: combines the replies when the result is awaited.
        timeout_s: default timeout.
        values: pushed values, if it is a push.
    """

    def __init__(
        self,
        transport: MessageTransport,
        what: str,
        num_parts: int,
        finish: Callable[[list[PartReply]], Result],
        timeout_s: float,
        values: Tensor | None = None,
    ) -> None:
        self._transport = transport
        self._what = what
        self._finish = finish
        self._deadline_s = timeout_s
        self._values = values
        self._replies: list[PartReply | None] = [None] * num_parts
        self._num_missing = num_parts
        self._error: CounterpointError | None = None
        self._result: Result | None = None

    def on_reply(self, part: int, reply: PartReply | Rejected) -> None:
        """Record the reply of one shard."""
        if isinstance(reply, Rejected):
            self.fail(error_from_rejection(reply, self._values))
            return
        self._num_missing -= self._replies[part] is None
        self._replies[part] = reply

    def fail(self, error: CounterpointError) -> None:
        """Fail the request."""
        self._error = self._error or error

    def done(self) -> bool:
        """Tell whether all shards have replied, or one has rejected the request."""
        return self._error is not None or not self._num_missing

    def wait(self, timeout_s: float | None = None) -> Result:
        """Return the result; see :class:`counterpoint.ps.session.PendingResult`."""
        limit_s = self._deadline_s if timeout_s is None else timeout_s
        if not self._transport.wait(self.done, limit_s):
            missing = f"{self._num_missing} of {len(self._replies)} replies missing"
            raise PeerError(
                f"waited {limit_s:g} s for {self._what}, {missing}; check that the servers run, and which workers they "
                "wait for"
            )
        if self._error is not None:
            raise self._error
        if self._result is None:
            self._result = self._finish([reply for reply in self._replies if reply is not None])
            self._replies = list(self._replies[:0])
        return self._result


class MessageTransport(Protocol):
    """Transport of a session's messages, in this process or over sockets."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Lock that gives exclusive access to the session."""

    def execute(self, actions: Sequence[PsAction]) -> None:
        """Send messages; called with the lock held."""

    def batch(self) -> AbstractContextManager[None]:
        """Return a context whose messages are sent together at its end."""

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Tell whether the condition becomes true within the time; called without the lock."""

    def can_send(self) -> bool:
        """Tell whether the backlog of unsent messages is small enough to send more."""

    @property
    def last_error(self) -> CounterpointError | None:
        """Last connection error; a ProtocolError if a retry would not help."""

    def close(self) -> None:
        """Release all resources."""


def error_from_rejection(rejected: Rejected, values: Tensor | None = None) -> CounterpointError:
    """Return the error for a rejection that a retry would not change.

    Args:
        rejected: the reply.
        values: pushed values, if it was a push.

    Example:
        >>> error_from_rejection(Rejected(0, 3, False, "full", "out of memory", 1))
        PlanError('out of memory')
    """
    if values is not None and not bool(values.isfinite().all()):
        return DataError(rejected.text)
    match rejected.reason:
        case "request" | "full":
            return PlanError(rejected.text)
        case "identity":
            return LaunchError(rejected.text)
        case "generation" | "later" | "lost" | "over":
            return PeerError(rejected.text)
        case _:
            assert_never(rejected.reason)
