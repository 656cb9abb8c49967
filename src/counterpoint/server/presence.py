"""Belonging to a job, for workers and servers alike: hello until welcome, then signs of life, and the newest view."""

from __future__ import annotations

from counterpoint.server.actions import COORDINATOR, Action, Send
from counterpoint.server.calls import Heartbeat, Hello, View, Welcome
from counterpoint.server.job import Job
from counterpoint.server.messages import Origin, Refused, Role

NOBODY = 0


class Presence:
    """One life of a member.

    Args:
        job: what all agree on.
        name: of the member.
        role: worker or server.
        token: a number that no other life has drawn.
        address: where others reach it.
    """

    def __init__(self, job: Job, name: str, role: Role, token: int, address: str = "") -> None:
        self.job, self.name, self.role = job, name, role
        self.hello = Hello(name, role, token, job.digest(), address)
        self.incarnation = NOBODY
        self.view = View(0)
        self._due = -1.0
        self._begun = 0  # generation of its welcome

    @property
    def is_welcome(self) -> bool:
        """Whether it belongs to the job, as far as it knows."""
        return self.incarnation != NOBODY

    def origin(self, sequence: int = 0, settled: int = 0) -> Origin:
        """Return what stands at the head of a request."""
        return Origin(self.name, self.incarnation, self.view.generation, sequence, settled)

    def pass_time(self, now: float) -> list[Action]:
        """Return the sign of life that is due."""
        if now < self._due:
            return []
        self._due = now + self.job.patience.beat_s
        return [Send(COORDINATOR, Heartbeat(self.origin()) if self.is_welcome else self.hello)]

    def hear(self, message: Welcome | View) -> bool:
        """Take in who belongs to the job; tell whether that is news."""
        if isinstance(message, Welcome):
            if message.token != self.hello.token or self.is_welcome:
                return False
            self.incarnation, self._begun = message.incarnation, message.view.generation
            message = message.view
        if not self.is_welcome or message.generation <= self.view.generation:
            return False
        self.view = message
        return True

    def is_refused(self, refused: Refused) -> bool:
        """Tell whether a refusal says that the job goes on without this life.

        One of its own hello may come after its welcome. It is of an earlier generation, as whoever joins begins one.
        """
        is_about_it = refused.shard < 0 and refused.reason == "identity"
        return is_about_it and self.is_welcome and refused.generation > self._begun

    @property
    def is_expelled(self) -> bool:
        """Whether the job goes on without this life."""
        members = self.view.workers if self.role == "worker" else self.view.servers
        lives = {member.name: member.incarnation for member in members}
        return self.is_welcome and lives.get(self.name) != self.incarnation
