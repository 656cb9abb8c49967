"""A worker's side: what it has asked for and not been told yet is asked again, of whoever keeps the shard by now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

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
"""Refusals that asking again would not change; what was refused for another reason is asked again."""


@dataclass(slots=True)
class ShardRequests:
    """What is under way to one shard."""

    next_sequence: int = 0
    writes: dict[int, WriteRequest] = field(default_factory=dict)
    pulls: dict[int, PullRequest] = field(default_factory=dict)

    @property
    def acked_before(self) -> int:
        """Everything before this has been answered."""
        return min(self.writes, default=self.next_sequence)


class PsClient:
    """One life of a worker.

    Args:
        job: what all agree on.
        name: of the worker.
        token: a number that no other life has drawn.
        address: where it is reached.
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
        """Whether requests can be made: it belongs to the job, and servers keep all shards."""
        return self.membership.is_member and len(self.membership.view.replicas) == self.job.num_shards

    def write(self, shard: int, make_request: Callable[[RequestHeader], WriteRequest]) -> tuple[int, list[PsAction]]:
        """Ask a shard to change; returns the sequence that the answer will have, and what is to be done.

        Args:
            shard: which.
            make: returns the request, given what stands at its head.
        """
        line = self.shard_requests[shard]
        sequence = line.next_sequence
        line.writes[sequence] = make_request(self.membership.header(sequence, line.acked_before))
        line.next_sequence += 1
        return sequence, list(self._send_to_primary(shard, line.writes[sequence]))

    def pull(self, shard: int, make_request: Callable[[RequestHeader, int], PullRequest]) -> tuple[int, list[PsAction]]:
        """Ask a shard for numbers; returns the ticket that the answer will have, and what is to be done.

        Args:
            shard: which.
            make: returns the request, given what stands at its head and the ticket.
        """
        line, ticket = self.shard_requests[shard], self._num_tickets
        self._num_tickets += 1
        line.pulls[ticket] = make_request(self.membership.header(line.next_sequence), ticket)
        return ticket, list(self._send_to_primary(shard, line.pulls[ticket]))

    def call_coordinator(self, make_request: Callable[[RequestHeader], CoordinatorCall]) -> list[PsAction]:
        """Ask the coordinator for one thing, after the one before has been answered; returns what is to be done."""
        self.call = make_request(self.membership.header(self._num_calls))
        return [SendMessage(COORDINATOR, self.call)]

    def on_event(self, message: PsMessage | None, now: float) -> list[PsAction]:
        """Take in a message, or the time, and return what is to be done about it.

        Args:
            message: what came; None where only time has passed.
            now: what the clock says.
        """
        return list(self._handle(message, now))

    def _handle(self, message: PsMessage | None, now: float) -> Iterator[PsAction]:
        match message:
            case None:
                yield from self.membership.on_tick(now)
                if now - self._sent_at >= self.job.timeouts.resend_s:
                    yield from self._retransmit(now)
            case JoinReply() | MembershipView():
                if not self.membership.update(message):
                    return
                if self.membership.is_evicted:
                    yield Shutdown(f"the job goes on without this life of {self.name}")
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
            keepers = self.membership.view.replicas[shard]
            yield SendMessage(keepers.primary, message)

    def _retransmit(self, now: float) -> Iterator[PsAction]:
        """Yield everything that has not been answered, as of the newest generation."""
        self._sent_at = now
        if not self.membership.is_member:
            return
        for shard, line in enumerate(self.shard_requests):
            for number, change in line.writes.items():
                line.writes[number] = replace(change, header=self.membership.header(number, line.acked_before))
                yield from self._send_to_primary(shard, line.writes[number])
            for ticket, pull in line.pulls.items():
                line.pulls[ticket] = replace(pull, header=self.membership.header(pull.header.sequence))
                yield from self._send_to_primary(shard, line.pulls[ticket])
        if self.call is not None:
            self.call = replace(self.call, header=self.membership.header(self.call.header.sequence))
            yield SendMessage(COORDINATOR, self.call)

    def _on_reply(self, answer: PushReply | Ack | TaskReply | CheckpointReply | PullReply) -> Iterator[PsAction]:
        """Yield an answer that was waited for."""
        if isinstance(answer, PullReply):
            found: object = self.shard_requests[answer.shard].pulls.pop(answer.ticket, None)
        elif isinstance(answer, TaskReply | CheckpointReply) or answer.shard < 0:
            found = self._finish_call(answer.sequence)
        else:
            found = self.shard_requests[answer.shard].writes.pop(answer.sequence, None)
        if found is not None:
            yield DeliverReply(answer)

    def _finish_call(self, sequence: int) -> CoordinatorCall | None:
        if self.call is None or self.call.header.sequence != sequence:
            return None
        found, self.call = self.call, None
        self._num_calls += 1
        return found

    def _on_rejected(self, answer: Rejected) -> Iterator[PsAction]:
        """Yield a refusal that asking again would not change, and every one by the coordinator."""
        if answer.reason == "over" and answer.shard < 0:
            yield Shutdown(answer.text)
        elif answer.reason in {"identity", "lost"} and answer.shard < 0 and not self.membership.is_member:
            yield DeliverReply(answer)
        elif answer.reason == "identity" and answer.shard < 0:
            if self.membership.is_eviction(answer):
                yield Shutdown(answer.text)
        elif answer.shard < 0:
            is_final = answer.reason in NON_RETRYABLE
            if self.call is not None and answer.sequence == self.call.header.sequence:
                yield DeliverReply(answer)
                if is_final:
                    self._finish_call(answer.sequence)
        elif answer.reason in NON_RETRYABLE:
            line = self.shard_requests[answer.shard]
            known: dict[int, PullRequest] | dict[int, WriteRequest] = line.pulls if answer.is_pull else line.writes
            if known.pop(answer.sequence, None) is not None:
                yield DeliverReply(answer)
