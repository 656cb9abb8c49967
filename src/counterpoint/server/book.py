"""All that the coordinator knows for sure: the fold of its log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

from counterpoint.server.calls import Keepers, Leased, Promised, View
from counterpoint.server.job import Job
from counterpoint.server.lines import (
    Asked,
    Assigned,
    Decision,
    Drained,
    Ended,
    Given,
    Gone,
    Joined,
    Lost,
    Overdue,
    Resumed,
    Stored,
)
from counterpoint.server.messages import Done, Member
from counterpoint.server.staffing import without
from counterpoint.server.tasks import Queue

Reply: TypeAlias = Done | Leased | Promised


@dataclass(slots=True)
class Life:
    """A member, and the last answer to it."""

    joined: Joined
    upcoming: int = 0
    reply: Reply | None = None


@dataclass(slots=True)
class CutState:
    """The cut that is being made: asked for, drained, saved so far by shard."""

    number: int
    is_drained: bool = False
    positions: dict[int, int] = field(default_factory=dict)


class Book:
    """Members, generations, keepers of shards, tasks and cuts.

    Args:
        job: what all agree on.
        lines: the log so far.
    """

    def __init__(self, job: Job, lines: Sequence[Decision] = ()) -> None:
        self.job = job
        self.generation = 0
        self.incarnation = 0
        self.lives: dict[str, Life] = {}
        self.keepers: list[Keepers] = []
        self.queue = Queue(job.work, job.budget)
        self.cut: CutState | None = None
        self.cuts: dict[int, dict[int, int]] = {}
        self.lost = ""
        for line in lines:
            self.apply(line)

    def names(self, role: str) -> list[str]:
        """Return the names of the workers or of the servers, in order."""
        return sorted(name for name, life in self.lives.items() if life.joined.role == role)

    @property
    def view(self) -> View:
        """Who belongs to the job, and who keeps what."""
        return View(self.generation, self._members("worker"), self._members("server"), tuple(self.keepers))

    def _members(self, role: str) -> tuple[Member, ...]:
        found = (self.lives[name].joined for name in self.names(role))
        return tuple(Member(joined.name, joined.incarnation, joined.address) for joined in found)

    def apply(self, line: Decision) -> None:
        """The book is as after one line more of its log."""
        match line:
            case Joined():
                self._join(line)
            case Gone():
                self._go(line.name)
            case Assigned():
                self.generation += 1
                self.keepers[line.shard] = line.keepers
            case Given():
                given = self.queue.give(line.worker) if line.task else None
                self._reply(line.worker, Leased(line.sequence, given))
            case Ended():
                self.queue.end(line.task, line.outcome, line.version, line.text)
                self._reply(line.worker, Done(-1, line.sequence))
            case Overdue():
                self.queue.end(line.task, "preempted", 0, "its lease is over")
            case Asked():
                self.cut = self.cut or CutState(len(self.cuts))
                self._reply(line.worker, Promised(line.sequence, self.cut.number))
            case Drained() | Stored():
                self._cut(line)
            case Lost() | Resumed():
                self._break_off(line)
            case _:
                assert_never(line)

    def _reply(self, worker: str, reply: Reply) -> None:
        life = self.lives.get(worker)
        if life is not None:
            life.upcoming, life.reply = reply.sequence + 1, reply

    def _cut(self, line: Drained | Stored) -> None:
        if self.cut is None or self.cut.number != line.cut:
            return
        if isinstance(line, Drained):
            self.cut.is_drained = True
            return
        self.cut.positions[line.shard] = line.position
        if len(self.cut.positions) == self.job.num_shards:
            self.cuts[line.cut] = self.cut.positions
            self.cut = None

    def _join(self, line: Joined) -> None:
        self.generation += 1
        self.incarnation = line.incarnation
        self.lives[line.name] = Life(line)
        if line.role == "worker":
            return
        servers = self.names("server")
        if not self.keepers and len(servers) == self.job.num_servers:
            follower = servers[1:] + servers[:1] if self.job.is_replicated else servers
            self.keepers = [
                Keepers(primary, backup if backup != primary else "", is_complete=True)
                for primary, backup in zip(servers, follower, strict=True)
            ]

    def _go(self, name: str) -> None:
        self.generation += 1
        self.lives.pop(name, None)
        self.queue.recall(name)
        if self.job.num_servers > 1:
            self.keepers = [without(keepers, name) or keepers for keepers in self.keepers]

    def _break_off(self, line: Lost | Resumed) -> None:
        if isinstance(line, Lost):
            self.lost = line.text
            return
        self.generation = max(self.generation, line.generation) + 1
        self.incarnation = max(self.incarnation, line.incarnation)
        self.lives.clear()
        self.keepers.clear()
        self.cut, self.lost = None, ""

    @property
    def is_forsaken(self) -> bool:
        """Whether the weights are lost: no server keeps them, and the last worker has gone before all was done."""
        is_begun = bool(self.queue.done) and not self.queue.is_finished
        return not self.job.num_servers and not self.lives and is_begun and not self.lost

    def load(self, silent: set[str]) -> dict[str, int]:
        """Return how many shards each server keeps, of those that are not silent."""
        named = [name for keepers in self.keepers for name in (keepers.primary, keepers.backup)]
        return {name: named.count(name) for name in self.names("server") if name not in silent}

    def is_needed(self, name: str) -> bool:
        """Tell whether a member that is silent may have what nobody else has, so that it is waited for."""
        if self.job.num_servers == 1 and self.job.is_logged:
            return False
        return any(name in {one.primary, one.backup, one.former} for one in self.keepers)

    def is_last(self, name: str) -> bool:
        """Tell whether there is a shard of which only this server has everything."""
        is_only_in_memory = self.job.num_servers > 1 or not self.job.is_logged
        return is_only_in_memory and any(without(keepers, name) is None for keepers in self.keepers)
