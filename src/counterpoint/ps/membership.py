"""Belonging to a job, for workers and servers alike: hello until welcome, then signs of life, and the newest view."""

from __future__ import annotations

from counterpoint.ps.actions import COORDINATOR, PsAction, SendMessage
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.messages import Heartbeat, JoinReply, JoinRequest, MembershipView, Rejected, RequestHeader, Role

NOT_JOINED = 0


class Membership:
    """One life of a member.

    Args:
        job: what all agree on.
        name: of the member.
        role: worker or server.
        token: a number that no other life has drawn.
        address: where others reach it.
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
        """Whether it belongs to the job, as far as it knows."""
        return self.incarnation != NOT_JOINED

    def header(self, sequence: int = 0, acked_before: int = 0) -> RequestHeader:
        """Return what stands at the head of a request."""
        return RequestHeader(self.name, self.incarnation, self.view.generation, sequence, acked_before)

    def on_tick(self, now: float) -> list[PsAction]:
        """Return the sign of life that is due."""
        if now < self._next_heartbeat_at:
            return []
        self._next_heartbeat_at = now + self.job.timeouts.heartbeat_s
        return [SendMessage(COORDINATOR, Heartbeat(self.header()) if self.is_member else self.join_request)]

    def update(self, message: JoinReply | MembershipView) -> bool:
        """Take in who belongs to the job; tell whether that is news."""
        if isinstance(message, JoinReply):
            if message.token != self.join_request.token or self.is_member:
                return False
            self.incarnation, self._joined_generation = message.incarnation, message.view.generation
            message = message.view
        if not self.is_member or message.generation <= self.view.generation:
            return False
        self.view = message
        return True

    def is_eviction(self, refused: Rejected) -> bool:
        """Tell whether a refusal says that the job goes on without this life.

        One of its own hello may come after its welcome. It is of an earlier generation, as whoever joins begins one.
        """
        is_about_it = refused.shard < 0 and refused.reason == "identity"
        return is_about_it and self.is_member and refused.generation > self._joined_generation

    @property
    def is_evicted(self) -> bool:
        """Whether the job goes on without this life."""
        members = self.view.workers if self.role == "worker" else self.view.servers
        lives = {member.name: member.incarnation for member in members}
        return self.is_member and lives.get(self.name) != self.incarnation
