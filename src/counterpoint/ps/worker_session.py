"""What a refused request is for the program that made it: an error by the name of whose fault it is.

Requests under way: their parts at several shards, and whoever waits until all of them have been answered.

A worker's talk with the coordinator: one question at a time, and tasks that came when nobody waited for them.

A session over whatever carries its messages: it divides requests over shards, and puts their answers together.
"""

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
    NO_SLICE,
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


def error_from_rejection(rejected: Rejected, values: Tensor | None = None) -> CounterpointError:
    """Return the error for a refusal that asking again would not change.

    Args:
        refused: what was answered.
        values: what was pushed, if it was a push.

    Example:
        >>> error_of(Refused(0, 3, False, "full", "there is no room", 1))
        PlanError('there is no room')
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


PartReply: TypeAlias = PushReply | PullReply | Ack
Result = TypeVar("Result")


class MessageTransport(Protocol):
    """What carries a session's messages, in this process or to others."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Whoever holds it is alone with the session."""

    def execute(self, actions: Sequence[PsAction]) -> None:
        """Messages are on their way; called with the lock."""

    def batch(self) -> AbstractContextManager[None]:
        """Return a block whose messages leave in one go at its end."""

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Tell whether the condition holds, or comes to hold within the time; called without the lock."""

    def can_send(self) -> bool:
        """Tell whether more may be sent: what was sent before has been taken, but for a bounded rest."""

    @property
    def last_error(self) -> CounterpointError | None:
        """What stood in the way of messages last; a ProtocolError where trying again would not help."""

    def close(self) -> None:
        """Nothing of it is left."""


class PendingRequest(Generic[Result]):
    """A request to some shards.

    Args:
        carrier: of the session.
        what: was asked, for errors.
        num_parts: answers that it takes.
        finish: makes the result of them, when somebody waits for it.
        deadline_s: the longest that one waits who does not say.
        values: what was pushed, if it is a push.
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
        """One shard has answered."""
        if isinstance(reply, Rejected):
            self.fail(error_from_rejection(reply, self._values))
            return
        self._num_missing -= self._replies[part] is None
        self._replies[part] = reply

    def fail(self, error: CounterpointError) -> None:
        """There will be no result."""
        self._error = self._error or error

    def done(self) -> bool:
        """Tell whether all have answered, or one has refused."""
        return self._error is not None or not self._num_missing

    def wait(self, timeout_s: float | None = None) -> Result:
        """Return the result; see :class:`counterpoint.ps.session.Pending`."""
        limit_s = self._deadline_s if timeout_s is None else timeout_s
        if not self._transport.wait(self.done, limit_s):
            missing = f"{self._num_missing} of {len(self._replies)} parts of which are missing"
            raise PeerError(
                f"waited {limit_s:g} s for {self._what}, {missing}; look at whether the servers run, and whom they "
                "wait for"
            )
        if self._error is not None:
            raise self._error
        if self._result is None:
            self._result = self._finish([one for one in self._replies if one is not None])
            self._replies = list(self._replies[:0])
        return self._result


CoordinatorResponse: TypeAlias = TaskReply | CheckpointReply | Ack | Rejected

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.005, 0.1
"""After so long one asks again whether there is data by now: at first, and at most; twice as long each time."""


class CoordinatorClient:
    """What has been asked of the coordinator, and what it said.

    Args:
        client: the worker's side of the protocol.
        carrier: of its messages.
    """

    def __init__(self, client: PsClient, transport: MessageTransport) -> None:
        self._client, self._transport = client, transport
        self._make_request: Callable[[RequestHeader], CoordinatorCall] | None = None
        self._is_task_request = False
        self._response: CoordinatorResponse | None = None
        self._spare_tasks: list[TaskReply] = []
        self.error: CounterpointError | None = None

    def on_response(self, response: CoordinatorResponse) -> list[PsAction]:
        """Take in what the coordinator says; return what is to be sent.

        A task that comes when none is waited for, because an earlier question was still open, is kept for later.
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
        """Return data to work on; None where all is done."""
        if not self._spare_tasks:
            told = self._call(TaskRequest, timeout_s)
            if not isinstance(told, TaskReply):
                return NO_TASK_YET
            return told.task
        return self._spare_tasks.pop(0).task

    def call(self, make_request: Callable[[RequestHeader], CoordinatorCall]) -> CoordinatorResponse:
        """Return what the coordinator says.

        Raises:
            PeerError: the job has stopped, or nobody has answered in time.
        """
        return self._call(make_request, 0.0)

    def start_call(self, make_request: Callable[[RequestHeader], CoordinatorCall]) -> None:
        """The question is on its way."""
        with self._transport.lock:
            self._make_request, self._is_task_request, self._response = make_request, make_request is TaskRequest, None
            self._transport.execute(self._client.call_coordinator(make_request))

    def wait_response(self, timeout_s: float) -> bool:
        """Tell whether there is an answer in time."""
        return self._transport.wait(lambda: self._response is not None or self.error is not None, timeout_s)

    def _call(self, make_request: Callable[[RequestHeader], CoordinatorCall], timeout_s: float) -> CoordinatorResponse:
        limit_s = self._client.job.timeouts.lease_s
        self.start_call(make_request)
        try:
            self.wait_response(limit_s)
            self._poll(make_request, timeout_s)
        finally:
            with self._transport.lock:
                told, self._make_request, self._is_task_request = self._response, None, False
        if told is None and self.error is not None:  # who has left is told that it does not belong to the job any more
            raise self.error
        if told is None:
            raise PeerError(
                f"waited {limit_s:g} s for the coordinator of {self._client.job.name} to answer {self._client.name}; "
                "look at whether it runs"
            )
        if isinstance(told, Rejected) and told.reason != "later":
            raise error_from_rejection(told)
        return told

    def _poll(self, make_request: Callable[[RequestHeader], CoordinatorCall], timeout_s: float) -> None:
        """Ask for data again and again while none may be begun: nobody is told when others are done with theirs."""
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


FinishedT = TypeVar("FinishedT")


class WorkerSession:
    """A worker's belonging to a job; see :class:`counterpoint.ps.session.Session`.

    Args:
        client: its side of the protocol.
        carrier: of its messages.
    """

    def __init__(self, client: PsClient, transport: MessageTransport) -> None:
        self.job, self.name = client.job, client.name
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
        """Its belonging to the job."""
        return self._client.membership

    @property
    def view(self) -> MembershipView:
        """Who belongs to the job now, as far as this session has heard."""
        return self._client.membership.view

    def wait_view(self, newer_than: int, timeout_s: float) -> MembershipView:
        """Return who belongs to the job, as soon as that is of a newer generation, or the time is up."""
        self._transport.wait(lambda: self.view.generation > newer_than or self._error is not None, timeout_s)
        self._check_open()
        return self.view

    def on_event(self, message: PsMessage | None, now: float) -> list[PsAction]:
        """Take in a message, or the time, and return what is to be sent; answers go to those who wait for them."""
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
        """The session is over; whoever waits is told why."""
        self._error = self._coordinator.error = self._error or error
        for asked, _ in (*self._writes.values(), *self._pulls.values()):
            asked.fail(error)
        self._writes.clear()
        self._pulls.clear()

    def _on_reply(self, answer: PushReply | PullReply | Ack | Rejected | TaskReply | CheckpointReply) -> list[PsAction]:
        if isinstance(answer, TaskReply | CheckpointReply) or answer.shard < 0:
            sends = self._coordinator.on_response(answer)  # type: ignore[arg-type]
            if self._coordinator.error is not None:
                self.fail(self._coordinator.error)
            return sends
        if isinstance(answer, PullReply):
            asked, part = self._pulls.pop(answer.ticket)
        elif isinstance(answer, Rejected) and answer.is_pull:
            asked, part = self._pulls.pop(answer.sequence)
        else:
            asked, part = self._writes.pop((answer.shard, answer.sequence))
        asked.on_reply(part, answer)
        return []

    # Requests to shards

    def init(self, key: str, value: Tensor, rule: UpdateRule) -> None:
        """The key exists: as it is there already, or as this value."""
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
        """The table of rows exists; its rows begin when they are first asked for."""
        if dtype not in DTYPE_NAMES or num_rows < 1 or width < 1:
            raise PlanError(
                f"{key} of {num_rows} x {width} {dtype}; a table has rows of one of {', '.join(DTYPE_NAMES.values())}"
            )
        if isinstance(rule, Assign):
            raise PlanError(f"rows of {key} without an optimizer on the server; give them a rule")
        validate_rule(self.job, key, rule)
        table = TableKey(key, num_rows, width, dtype, self.job.num_shards)
        if isinstance(initializer, InitialRows):
            parts = table.split_push(initializer.values, initializer.rows)
            values, numbers = [part.values for part in parts], [part.rows for part in parts]
            self._make_key(table, list(table.specs(rule, initializer.default)), values, numbers)
        else:
            self._make_key(table, list(table.specs(rule, initializer)), [None] * self.job.num_shards)

    def _make_key(
        self,
        key: PartitionedKey,
        specs: Sequence[KeySpec],
        values: Sequence[Tensor | None],
        rows: Sequence[Tensor | None] = (),
    ) -> None:
        begins = zip(key.shards, specs, values, rows or [None] * len(specs), strict=True)
        makes: list[tuple[int, Callable[[RequestHeader], WriteRequest]]] = [
            (shard, lambda origin, shard=shard, begin=begin: InitRequest(origin, shard, *begin))  # type: ignore[misc]
            for shard, *begin in begins
        ]
        self._send_writes(f"the servers to make {key.name}", makes, lambda _: None).wait()
        self._keys[key.name] = key
        self._read_versions.setdefault(key.name, (0,) * len(key.shards))

    def push(  # noqa: PLR0913 - what a push says, most by keyword
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
        """A gradient is on its way; its tensors must stay as they are until it has been answered."""
        known = self._find_key(key)
        from_versions = self._read_versions[key] if read_versions is None else read_versions
        if len(from_versions) != len(known.shards):
            raise PlanError(
                f"{len(from_versions)} versions of {key}, which has {len(known.shards)} parts; give so many"
            )
        makes: list[tuple[int, Callable[[RequestHeader], WriteRequest]]] = [
            (
                part.shard,
                lambda origin, part=part, version=version: PushRequest(  # type: ignore[misc]
                    origin, part.shard, key, slice_index, version, part.values, part.rows, codec, part.pooling
                ),
            )
            for part, version in zip(known.split_push(values, rows, codec, pooling), from_versions, strict=True)
        ]
        return self._send_writes(f"the servers to count a push to {key}", makes, self._finish_push, values)

    def _finish_push(self, answers: list[PartReply]) -> PushResult:
        found = [answer for answer in answers if isinstance(answer, PushReply)]
        versions = tuple(answer.version for answer in found)
        self._newest_version = max(self._newest_version, *versions)
        return PushResult(versions, tuple(answer.is_new for answer in found))

    def _send_writes(
        self,
        what: str,
        makes: Sequence[tuple[int, Callable[[RequestHeader], WriteRequest]]],
        finish: Callable[[list[PartReply]], FinishedT],
        values: Tensor | None = None,
    ) -> PendingRequest[FinishedT]:
        asked = self._start_request(what, len(makes), finish, values)
        with self._transport.lock:
            for part, (shard, make) in enumerate(makes):
                sequence, actions = self._client.write(shard, make)
                self._writes[shard, sequence] = (asked, part)  # type: ignore[assignment]
                self._transport.execute(actions)
        return asked

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
            raise PeerError(f"waited {limit_s:g} s for servers to take what was sent before; look at what they do")
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
        """What a key is, or some of its rows, or sums of these, is on its way."""
        known = self._find_key(key)
        wanted = known.split_pull(rows, pooling)
        if out is not None:
            known.validate_out(out, rows, pooling)
        bounds = (min_versions,) * len(wanted) if isinstance(min_versions, int) else min_versions
        if len(bounds) != len(wanted):
            raise PlanError(f"{len(bounds)} versions of {key}, which has {len(wanted)} parts; give so many, or one")

        def finish(answers: list[PartReply]) -> PullResult:
            found = [answer for answer in answers if isinstance(answer, PullReply)]
            self._read_versions[key] = tuple(answer.version for answer in found)
            return PullResult(
                known.assemble([answer.values for answer in found], wanted, out), self._read_versions[key]
            )

        asked = self._start_request(f"{key} at version {min_versions} or newer", len(wanted), finish)
        with self._transport.lock:
            for part, (one, bound) in enumerate(zip(wanted, bounds, strict=True)):
                ticket, actions = self._client.pull(
                    one.shard,
                    lambda origin, ticket, one=one, bound=bound: PullRequest(  # type: ignore[misc]
                        origin, one.shard, key, ticket, bound, one.rows, exact_version, one.pooling
                    ),
                )
                self._pulls[ticket] = (asked, part)  # type: ignore[assignment]
                self._transport.execute(actions)
        return asked

    def batch(self) -> AbstractContextManager[None]:
        """Return a block whose pushes and pulls leave in one go at its end."""
        return self._transport.batch()

    def join_clock(self) -> None:
        """Others wait for this worker from now on (ssp); it comes before the pull for the first push."""
        makes = [(shard, lambda origin, shard=shard: JoinClock(origin, shard)) for shard in range(self.job.num_shards)]
        self._send_writes("the servers to let this worker enter", makes, lambda _: None).wait()

    def leave_clock(self) -> None:
        """Nobody waits for this worker any longer (ssp), until it enters again."""
        makes = [(shard, lambda origin, shard=shard: LeaveClock(origin, shard)) for shard in range(self.job.num_shards)]
        self._send_writes("the servers to let this worker rest", makes, lambda _: None).wait()

    def _find_key(self, key: str) -> PartitionedKey:
        self._check_open()
        known = self._keys.get(key)
        if known is None:
            names = ", ".join(sorted(self._keys)) or "none"
            raise PlanError(f"there is no key {key!r}, only {names}; init, or init_rows, comes before push and pull")
        return known

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._has_left:
            raise PlanError(f"{self.name} has left {self.job.name}; join again to ask for more")

    # Requests to the coordinator

    def wait_ready(self, timeout_s: float) -> Self:
        """The session belongs to the job, and servers keep all shards.

        Raises:
            LaunchError: another worker has the name, this worker has another job, or nobody has answered in time.
        """
        is_told = self._transport.wait(self._has_join_outcome, timeout_s)
        trouble = self._transport.last_error
        if not self._client.is_ready and self._error is None:
            here = f"{len(self.view.servers)} of {self.job.num_servers} servers are there"
            missing = here if self._client.membership.is_member else "the coordinator has not answered"
            waited = "could not join" if is_told else f"waited {timeout_s:g} s for"
            raise LaunchError(f"{self.name} {waited} job {self.job.name}: {trouble or missing}") from trouble
        self._check_open()
        return self

    def _has_join_outcome(self) -> bool:
        """Whether it belongs to the job, or never will."""
        is_hopeless = isinstance(self._transport.last_error, ProtocolError)
        return self._client.is_ready or self._error is not None or is_hopeless

    def lease(self, timeout_s: float = 0.0) -> DataTask | NoTaskYet | None:
        """Return data to work on; None when all data of all epochs has been counted."""
        self._check_open()
        return self._coordinator.lease(timeout_s)

    def report(self, task: DataTask, outcome: TaskOutcome, text: str = "") -> None:
        """The coordinator knows how a task ended; done means that all its pushes have been answered."""
        newest = self._newest_version
        self._check_open()
        self._coordinator.call(lambda origin: TaskReport(origin, task, outcome, newest, text))

    def checkpoint(self) -> int:
        """Return the number of a cut that will be saved as soon as no task is begun and not done."""
        self._check_open()
        check_has_servers(self.job, "a cut")
        told = self._coordinator.call(CheckpointRequest)
        if not isinstance(told, CheckpointReply):
            raise PeerError(f"the coordinator answered {told} to a checkpoint; look at what it runs")
        return told.snapshot

    def leave(self) -> None:
        """The job goes on without this worker, and gives others what it had leased; nothing can be asked any more."""
        self._check_open()
        self._coordinator.call(LeaveRequest)
        self._has_left = True

    def close(self) -> None:
        """The session has left, if it was still in and the job can be reached; nothing of it remains."""
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
