"""A worker's side: what it has asked for and not been told yet is asked again, of whoever keeps the shard by now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from counterpoint.server.actions import COORDINATOR, Action, Deliver, Send, Stop
from counterpoint.server.calls import Checkpoint, Lease, Leased, Leave, Promised, Report, View, Welcome
from counterpoint.server.form import Message
from counterpoint.server.job import Job
from counterpoint.server.messages import Done, Origin, Pull, Pulled, Pushed, Refused
from counterpoint.server.presence import Presence
from counterpoint.server.states import Change

Call: TypeAlias = Lease | Report | Leave | Checkpoint

FINAL = {"request", "full", "lost"}
"""Refusals that asking again would not change; what was refused for another reason is asked again."""


@dataclass(slots=True)
class Line:
    """What is under way to one shard."""

    upcoming: int = 0
    changes: dict[int, Change] = field(default_factory=dict)
    pulls: dict[int, Pull] = field(default_factory=dict)

    @property
    def settled(self) -> int:
        """Everything before this has been answered."""
        return min(self.changes, default=self.upcoming)


class Client:
    """One life of a worker.

    Args:
        job: what all agree on.
        name: of the worker.
        token: a number that no other life has drawn.
        address: where it is reached.
    """

    def __init__(self, job: Job, name: str, token: int, address: str = "") -> None:
        self.job, self.name = job, name
        self.presence = Presence(job, name, "worker", token, address)
        self.lines = [Line() for _ in range(job.num_shards)]
        self.call: Call | None = None
        self._num_calls = 0
        self._num_tickets = 0
        self._sent_at = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether requests can be made: it belongs to the job, and servers keep all shards."""
        return self.presence.is_welcome and len(self.presence.view.shards) == self.job.num_shards

    def change(self, shard: int, make: Callable[[Origin], Change]) -> tuple[int, list[Action]]:
        """Ask a shard to change; returns the sequence that the answer will have, and what is to be done.

        Args:
            shard: which.
            make: returns the request, given what stands at its head.
        """
        line = self.lines[shard]
        sequence = line.upcoming
        line.changes[sequence] = make(self.presence.origin(sequence, line.settled))
        line.upcoming += 1
        return sequence, list(self._to(shard, line.changes[sequence]))

    def pull(self, shard: int, make: Callable[[Origin, int], Pull]) -> tuple[int, list[Action]]:
        """Ask a shard for numbers; returns the ticket that the answer will have, and what is to be done.

        Args:
            shard: which.
            make: returns the request, given what stands at its head and the ticket.
        """
        line, ticket = self.lines[shard], self._num_tickets
        self._num_tickets += 1
        line.pulls[ticket] = make(self.presence.origin(line.upcoming), ticket)
        return ticket, list(self._to(shard, line.pulls[ticket]))

    def ask(self, make: Callable[[Origin], Call]) -> list[Action]:
        """Ask the coordinator for one thing, after the one before has been answered; returns what is to be done."""
        self.call = make(self.presence.origin(self._num_calls))
        return [Send(COORDINATOR, self.call)]

    def on_event(self, message: Message | None, now: float) -> list[Action]:
        """Take in a message, or the time, and return what is to be done about it.

        Args:
            message: what came; None where only time has passed.
            now: what the clock says.
        """
        return list(self._events(message, now))

    def _events(self, message: Message | None, now: float) -> Iterator[Action]:
        match message:
            case None:
                yield from self.presence.pass_time(now)
                if now - self._sent_at >= self.job.patience.retry_s:
                    yield from self._again(now)
            case Welcome() | View():
                if not self.presence.hear(message):
                    return
                if self.presence.is_expelled:
                    yield Stop(f"the job goes on without this life of {self.name}")
                else:
                    yield from self._again(now)
            case Pushed() | Done() | Leased() | Promised() | Pulled():
                yield from self._settle(message)
            case Refused():
                yield from self._refused(message)
            case _:
                pass

    def _to(self, shard: int, message: Change | Pull) -> Iterator[Action]:
        if self.is_ready:
            keepers = self.presence.view.shards[shard]
            yield Send(keepers.primary, message)

    def _again(self, now: float) -> Iterator[Action]:
        """Yield everything that has not been answered, as of the newest generation."""
        self._sent_at = now
        if not self.presence.is_welcome:
            return
        for shard, line in enumerate(self.lines):
            for number, change in line.changes.items():
                line.changes[number] = replace(change, origin=self.presence.origin(number, line.settled))
                yield from self._to(shard, line.changes[number])
            for ticket, pull in line.pulls.items():
                line.pulls[ticket] = replace(pull, origin=self.presence.origin(pull.origin.sequence))
                yield from self._to(shard, line.pulls[ticket])
        if self.call is not None:
            self.call = replace(self.call, origin=self.presence.origin(self.call.origin.sequence))
            yield Send(COORDINATOR, self.call)

    def _settle(self, answer: Pushed | Done | Leased | Promised | Pulled) -> Iterator[Action]:
        """Yield an answer that was waited for."""
        if isinstance(answer, Pulled):
            found: object = self.lines[answer.shard].pulls.pop(answer.ticket, None)
        elif isinstance(answer, Leased | Promised) or answer.shard < 0:
            found = self._settle_call(answer.sequence)
        else:
            found = self.lines[answer.shard].changes.pop(answer.sequence, None)
        if found is not None:
            yield Deliver(answer)

    def _settle_call(self, sequence: int) -> Call | None:
        if self.call is None or self.call.origin.sequence != sequence:
            return None
        found, self.call = self.call, None
        self._num_calls += 1
        return found

    def _refused(self, answer: Refused) -> Iterator[Action]:
        """Yield a refusal that asking again would not change, and every one by the coordinator."""
        if answer.reason == "over" and answer.shard < 0:
            yield Stop(answer.text)
        elif answer.reason in {"identity", "lost"} and answer.shard < 0 and not self.presence.is_welcome:
            yield Deliver(answer)
        elif answer.reason == "identity" and answer.shard < 0:
            if self.presence.is_refused(answer):
                yield Stop(answer.text)
        elif answer.shard < 0:
            is_final = answer.reason in FINAL
            if self.call is not None and answer.sequence == self.call.origin.sequence:
                yield Deliver(answer)
                if is_final:
                    self._settle_call(answer.sequence)
        elif answer.reason in FINAL:
            line = self.lines[answer.shard]
            known: dict[int, Pull] | dict[int, Change] = line.pulls if answer.is_pull else line.changes
            if known.pop(answer.sequence, None) is not None:
                yield Deliver(answer)
