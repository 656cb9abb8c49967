"""Membership of a worker or server in a job: join, send heartbeats, follow the newest view."""

from __future__ import annotations

from counterpoint.ps.actions import COORDINATOR, PsAction, SendMessage
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.messages import Heartbeat, JoinReply, JoinRequest, MembershipView, Rejected, RequestHeader, Role

NOT_JOINED = 0


class Membership:
    """Membership of one incarnation of a member.

    Args:
        job: configuration.
        name: of the member.
        role: worker or server.
        token: random number unique to this incarnation.
        address: where other members reach it.
    """

    def __init__(self, job: JobConfig, name: str, role: Role, token: int, address: str = "") -> None:
        self.job, self.name, self.role = job, name, role
        self.join_request = JoinRequest(name, role, token, job.digest(), address)
        self.incarnation = NOT_JOINED
        self.view = MembershipView(0)
        self._next_heartbeat_at = -1.0
        self._joined_generation = 0  # generation of its welcome

    @property
    def is_member(self) -> bool:
        """Whether the coordinator has admitted this incarnation."""
        return self.incarnation != NOT_JOINED

    def header(self, sequence: int = 0, acked_before: int = 0) -> RequestHeader:
        """Return the header of a request."""
        return RequestHeader(self.name, self.incarnation, self.view.generation, sequence, acked_before)

    def on_tick(self, now: float) -> list[PsAction]:
        """Return the heartbeat or join request that is due."""
        if now < self._next_heartbeat_at:
            return []
        self._next_heartbeat_at = now + self.job.timeouts.heartbeat_s
        return [SendMessage(COORDINATOR, Heartbeat(self.header()) if self.is_member else self.join_request)]

    def update(self, message: JoinReply | MembershipView) -> bool:
        """Apply a view; tell whether it is newer than the current one."""
        if isinstance(message, JoinReply):
            if message.token != self.join_request.token or self.is_member:
                return False
            self.incarnation, self._joined_generation = message.incarnation, message.view.generation
            message = message.view
        if not self.is_member or message.generation <= self.view.generation:
            return False
        self.view = message
        return True

    def is_eviction(self, rejected: Rejected) -> bool:
        """Tell whether a rejection means that the job continues without this incarnation.

        A rejection of its own join request may arrive after admission; it is of an earlier generation than the
        admission.
        """
        is_identity_error = rejected.shard < 0 and rejected.reason == "identity"
        return is_identity_error and self.is_member and rejected.generation > self._joined_generation

    @property
    def is_evicted(self) -> bool:
        """Whether the newest view no longer contains this incarnation."""
        members = self.view.workers if self.role == "worker" else self.view.servers
        incarnations = {member.name: member.incarnation for member in members}
        return self.is_member and incarnations.get(self.name) != self.incarnation
