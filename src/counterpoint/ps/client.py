"""Client side of the protocol: a state machine that resends unanswered requests to the current primary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec.structs import replace

from counterpoint.ps.actions import COORDINATOR, DeliverReply, PsAction, SendMessage, Shutdown
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.membership import Membership
from counterpoint.ps.message_codec import PsMessage
from counterpoint.ps.messages import (
    Ack,
    CheckpointReply,
    CheckpointRequest,
    JoinReply,
    LeaveRequest,
    MembershipView,
    PullReply,
    PullRequest,
    PushReply,
    Rejected,
    RequestHeader,
    TaskReply,
    TaskReport,
    TaskRequest,
    WriteRequest,
)

CoordinatorCall: TypeAlias = TaskRequest | TaskReport | LeaveRequest | CheckpointRequest

NON_RETRYABLE = {"request", "full", "lost"}
"""Reject reasons that a retry would not change; requests rejected for other reasons are sent again."""


@dataclass(slots=True)
class ShardRequests:
    """Outstanding requests to one shard."""

    next_sequence: int = 0
    writes: dict[int, WriteRequest] = field(default_factory=dict)
    pulls: dict[int, PullRequest] = field(default_factory=dict)

    @property
    def acked_before(self) -> int:
        """All sequences before this one have been answered."""
        return min(self.writes, default=self.next_sequence)


class PsClient:
    """One incarnation of a worker.

    Args:
        job: configuration.
        name: of the worker.
        token: random number unique to this incarnation.
        address: where other members reach it.
    """

    def __init__(self, job: JobConfig, name: str, token: int, address: str = "") -> None:
        self.job, self.name = job, name
        self.membership = Membership(job, name, "worker", token, address)
        self.shard_requests = [ShardRequests() for _ in range(job.num_shards)]
        self.call: CoordinatorCall | None = None
        self._num_calls = 0
        self._num_tickets = 0
        self._sent_at = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether it is a member, and all shards have servers."""
        return self.membership.is_member and len(self.membership.view.replicas) == self.job.num_shards

    def write(self, shard: int, make_request: Callable[[RequestHeader], WriteRequest]) -> tuple[int, list[PsAction]]:
        """Send a write to a shard; return the sequence that its reply will have, and the actions.

        Args:
            shard: index of the shard.
            make_request: returns the request, given its header.
        """
        requests = self.shard_requests[shard]
        sequence = requests.next_sequence
        requests.writes[sequence] = make_request(self.membership.header(sequence, requests.acked_before))
        requests.next_sequence += 1
        return sequence, list(self._send_to_primary(shard, requests.writes[sequence]))

    def pull(self, shard: int, make_request: Callable[[RequestHeader, int], PullRequest]) -> tuple[int, list[PsAction]]:
        """Send a pull to a shard; return the ticket that its reply will have, and the actions.

        Args:
            shard: index of the shard.
            make_request: returns the request, given its header and ticket.
        """
        requests, ticket = self.shard_requests[shard], self._num_tickets
        self._num_tickets += 1
        requests.pulls[ticket] = make_request(self.membership.header(requests.next_sequence), ticket)
        return ticket, list(self._send_to_primary(shard, requests.pulls[ticket]))

    def call_coordinator(self, make_request: Callable[[RequestHeader], CoordinatorCall]) -> list[PsAction]:
        """Send a request to the coordinator, after the reply to the previous one; return the actions."""
        self.call = make_request(self.membership.header(self._num_calls))
        return [SendMessage(COORDINATOR, self.call)]

    def on_event(self, message: PsMessage | None, now: float) -> list[PsAction]:
        """Process a message or a clock tick, and return the resulting actions.

        Args:
            message: the message; None for a tick.
            now: current time.
        """
        return list(self._dispatch(message, now))

    def _dispatch(self, message: PsMessage | None, now: float) -> Iterator[PsAction]:
        match message:
            case None:
                yield from self.membership.on_tick(now)
                if now - self._sent_at >= self.job.timeouts.resend_s:
                    yield from self._retransmit(now)
            case JoinReply() | MembershipView():
                if not self.membership.update(message):
                    return
                if self.membership.is_evicted:
                    yield Shutdown(f"the job continues without this incarnation of {self.name}")
                else:
                    yield from self._retransmit(now)
            case PushReply() | Ack() | TaskReply() | CheckpointReply() | PullReply():
                yield from self._on_reply(message)
            case Rejected():
                yield from self._on_rejected(message)
            case _:
                pass

    def _send_to_primary(self, shard: int, message: WriteRequest | PullRequest) -> Iterator[PsAction]:
        if self.is_ready:
            replicas = self.membership.view.replicas[shard]
            yield SendMessage(replicas.primary, message)

    def _retransmit(self, now: float) -> Iterator[PsAction]:
        """Send all unanswered requests, with the newest generation."""
        self._sent_at = now
        if not self.membership.is_member:
            return
        for shard, requests in enumerate(self.shard_requests):
            for number, change in requests.writes.items():
                requests.writes[number] = replace(change, header=self.membership.header(number, requests.acked_before))
                yield from self._send_to_primary(shard, requests.writes[number])
            for ticket, pull in requests.pulls.items():
                requests.pulls[ticket] = replace(pull, header=self.membership.header(pull.header.sequence))
                yield from self._send_to_primary(shard, requests.pulls[ticket])
        if self.call is not None:
            self.call = replace(self.call, header=self.membership.header(self.call.header.sequence))
            yield SendMessage(COORDINATOR, self.call)

    def _on_reply(self, reply: PushReply | Ack | TaskReply | CheckpointReply | PullReply) -> Iterator[PsAction]:
        """Deliver a reply that was expected."""
        if isinstance(reply, PullReply):
            request: object = self.shard_requests[reply.shard].pulls.pop(reply.ticket, None)
        elif isinstance(reply, TaskReply | CheckpointReply) or reply.shard < 0:
            request = self._finish_call(reply.sequence)
        else:
            request = self.shard_requests[reply.shard].writes.pop(reply.sequence, None)
        if request is not None:
            yield DeliverReply(reply)

    def _finish_call(self, sequence: int) -> CoordinatorCall | None:
        if self.call is None or self.call.header.sequence != sequence:
            return None
        call, self.call = self.call, None
        self._num_calls += 1
        return call

    def _on_rejected(self, rejected: Rejected) -> Iterator[PsAction]:
        """Deliver a rejection that a retry would not change, and every one by the coordinator."""
        if rejected.reason == "over" and rejected.shard < 0:
            yield Shutdown(rejected.text)
        elif rejected.reason in {"identity", "lost"} and rejected.shard < 0 and not self.membership.is_member:
            yield DeliverReply(rejected)
        elif rejected.reason == "identity" and rejected.shard < 0:
            if self.membership.is_eviction(rejected):
                yield Shutdown(rejected.text)
        elif rejected.shard < 0:
            is_final = rejected.reason in NON_RETRYABLE
            if self.call is not None and rejected.sequence == self.call.header.sequence:
                yield DeliverReply(rejected)
                if is_final:
                    self._finish_call(rejected.sequence)
        elif rejected.reason in NON_RETRYABLE:
            requests = self.shard_requests[rejected.shard]
            outstanding: dict[int, PullRequest] | dict[int, WriteRequest] = (
                requests.pulls if rejected.is_pull else requests.writes
            )
            if outstanding.pop(rejected.sequence, None) is not None:
                yield DeliverReply(rejected)
