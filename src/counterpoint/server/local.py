"""A whole job in one process and one thread: coordinator, servers and workers, the same bits every time.

Nothing happens but when somebody waits: then messages are delivered in the order in which they were sent, and where
there are none left, the clock goes on. For tests and examples; what is promised is what real servers promise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

from counterpoint.errors import PlanError
from counterpoint.server.actions import COORDINATOR, Action, Deliver, Note, Save, Send, Stop, Write
from counterpoint.server.client import Client
from counterpoint.server.coordinator import LOG, Coordinator
from counterpoint.server.form import Message
from counterpoint.server.holding import log_of
from counterpoint.server.job import Job
from counterpoint.server.journal import Notes, fill
from counterpoint.server.messages import Pulled, Push
from counterpoint.server.node import Node
from counterpoint.server.states import Entry, ShardState
from counterpoint.server.worker import WorkerSession

READY_S = 60.0


@dataclass(slots=True)
class Seat:
    """One life of a member.

    Attributes:
        name: of the member.
        machine: what it runs.
        notes: what it has noted, if it is a server.
    """

    name: str
    machine: Coordinator | Node | WorkerSession
    notes: Notes = field(default_factory=Notes)

    @property
    def life(self) -> int:
        """Its incarnation."""
        return 0 if isinstance(self.machine, Coordinator) else self.machine.presence.incarnation


class LocalJob:
    """A job with its servers, all in this thread; workers join it.

    Args:
        job: what all agree on.
        is_journaled: whether the journals are kept; they hold everything that was ever pushed.

    Attributes:
        now: what the job's own clock says.
        journals: what the shards have counted, by shard and position, from which a run is replayed.
        logs: what has been written down, by log.
        cuts: the saved states, by cut and shard.

    Example:
        >>> import torch
        >>> from counterpoint.server.choices import Sgd
        >>> from counterpoint.server.job import Asp
        >>> servers = LocalJob(Job("tour", Asp()))
        >>> with servers.join("worker-0") as session:
        ...     session.init("weight", torch.zeros(2), Sgd(0.5))
        ...     counted = session.push("weight", torch.ones(2)).wait()
        ...     counted.versions, session.pull("weight").wait().values
        ((1,), tensor([-0.5000, -0.5000]))
    """

    def __init__(self, job: Job, *, is_journaled: bool = False) -> None:
        self.job = job
        self.now = 0.0
        self.journals: dict[int, dict[int, Entry]] = {shard: {} for shard in range(job.num_shards)}
        self._handed_on: dict[int, dict[int, Entry]] = {shard: {} for shard in range(job.num_shards)}
        self.logs: dict[str, list[Any]] = {}
        self.cuts: dict[int, dict[int, ShardState]] = {}
        self._is_journaled = is_journaled
        self._seats: list[Seat] = []
        self._paused: list[Seat] = []
        self._mail: deque[tuple[Seat, Seat, Message]] = deque()
        self._num_lives = 0
        self.start_coordinator()
        for index in range(job.num_servers):
            self.start_server(f"server-{index}")
        self.run_until(lambda: len(self.coordinator.book.keepers) == job.num_shards, READY_S)

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator; a PlanError where it has been killed."""
        for seat in self._seats:
            if isinstance(seat.machine, Coordinator):
                return seat.machine
        raise PlanError(f"{self.job.name} has no coordinator now; start it again")

    def node(self, name: str) -> Node:
        """Return a server; a PlanError where it does not run."""
        for seat in self._seats:
            if seat.name == name and isinstance(seat.machine, Node):
                return seat.machine
        raise PlanError(f"{self.job.name} has no server {name} now; start it")

    def start_coordinator(self) -> None:
        """The coordinator runs, after what its log says."""
        self._seats.append(Seat(COORDINATOR, Coordinator(self.job, self.logs.get(LOG, ()), self.now)))

    def start_server(self, name: str) -> None:
        """A server with this name runs, after what the logs of shards say if it keeps them alone."""
        logs = {shard: self.logs.get(log_of(shard), ()) for shard in range(self.job.num_shards)}
        self._sit(Seat(name, Node(self.job, name, self._new_token(), logs=logs)))

    def join(self, name: str) -> WorkerSession:
        """Return the session of a new worker.

        Raises:
            LaunchError: the name is taken, or servers are missing.
        """
        carrier = LocalCarrier(self)
        session = WorkerSession(Client(self.job, name, self._new_token()), carrier)
        carrier.seat = Seat(name, session)
        self._sit(carrier.seat)
        return session.await_ready(READY_S)

    def kill(self, name: str) -> None:
        """The machine is gone without a word; others find out when it has been silent for long enough."""
        self._seats = [seat for seat in self._seats if seat.name != name]

    def pause(self, name: str) -> None:
        """The machine does nothing and hears nothing until it goes on."""
        self._paused += [seat for seat in self._seats if seat.name == name]
        self.kill(name)

    def go_on(self, name: str) -> None:
        """The machine goes on where it was paused."""
        self._seats += [seat for seat in self._paused if seat.name == name]
        self._paused = [seat for seat in self._paused if seat.name != name]

    def remove(self, seat: Seat) -> None:
        """This life is gone."""
        self._seats = [one for one in self._seats if one is not seat]

    def pass_time(self, seconds: float) -> None:
        """So much time has passed, and what follows from it has happened."""
        self.run_until(lambda: False, seconds)

    def run_until(self, holds: Callable[[], bool], deadline_s: float) -> bool:
        """Tell whether the condition comes to hold within the time; meanwhile everything goes on.

        Args:
            holds: the condition.
            deadline_s: the longest that this lasts, by the job's clock.
        """
        end = self.now + deadline_s
        pace_s = min(self.job.patience.beat_s, self.job.patience.retry_s)
        while not holds():
            if self._mail:
                source, seat, message = self._mail.popleft()
                if any(one is seat for one in self._seats):
                    self._take(seat, message, source)
            elif self.now >= end:
                return False
            else:
                self.now = min(end, self.now + pace_s)
                for seat in list(self._seats):
                    self._take(seat, None, seat)
        return True

    def act(self, seat: Seat, actions: Sequence[Action], source: Seat | None = None) -> None:
        """What a machine wants to happen has happened, or is in the mail.

        Args:
            seat: whose.
            actions: what it wants.
            source: whose message made it want so.
        """
        for action in actions:
            match action:
                case Send():
                    self._mail_to(seat, action, source)
                case Write():
                    self.logs.setdefault(action.log, []).append(action.line)
                case Note() if self._is_journaled:
                    self._note(action.shard, seat.notes.note(action))
                case Save():
                    self.cuts.setdefault(action.cut, {})[action.shard] = action.state
                case Stop() if isinstance(seat.machine, Node):
                    self.remove(seat)
                    self.start_server(seat.name)
                case Note() | Stop() | Deliver():
                    pass
                case _:
                    assert_never(action)

    def _new_token(self) -> int:
        self._num_lives += 1
        return self._num_lives

    def _sit(self, seat: Seat) -> None:
        self._seats.append(seat)
        self._take(seat, None, seat)

    def _take(self, seat: Seat, message: Message | None, source: Seat) -> None:
        machine = seat.machine
        if isinstance(machine, Node):
            seat.notes.before(machine, message)
        self.act(seat, machine.on_event(message, self.now), source)
        if isinstance(machine, Node) and self._is_journaled:
            for shard, entries in seat.notes.promoted(machine.holdings).items():
                self._note(shard, entries)
            for shard, entries in seat.notes.handed_on(machine).items():
                self._handed_on[shard] |= entries

    def _note(self, shard: int, entries: Mapping[int, Entry]) -> None:
        """These entries are certain, and so is what was handed on before them."""
        journal = self.journals[shard]
        has_gap = any(at and at - 1 not in journal and at - 1 not in entries for at in entries)
        journal.update(entries)
        if has_gap:
            fill(journal, self._handed_on[shard])

    def _mail_to(self, seat: Seat, send: Send, source: Seat | None) -> None:
        """It is delivered to that life; what is for any life answers the one that has asked, if it has the name."""
        found = [one for one in self._seats if one.name == send.to and send.life in {0, one.life}]
        if not send.life and source in found:
            found = [source]
        if found:
            self._mail.append((seat, found[-1], _copied(send.message)))


class LocalCarrier:
    """A session's messages in the job that it is in.

    Args:
        job: which.
    """

    seat: Seat

    def __init__(self, job: LocalJob) -> None:
        self.lock = nullcontext()
        self._job = job

    def act(self, actions: Sequence[Action]) -> None:
        """Messages are on their way."""
        self._job.act(self.seat, actions)

    def together(self) -> AbstractContextManager[None]:
        """Return a block that changes nothing: messages leave when the job's time goes on."""
        return nullcontext()

    def wait(self, holds: Callable[[], bool], deadline_s: float) -> bool:
        """Tell whether the condition comes to hold within the time of the job's clock."""
        return self._job.run_until(holds, deadline_s)

    def has_room(self) -> bool:
        """More may always be sent."""
        return True

    @property
    def trouble(self) -> None:
        """Nothing stands in the way."""
        return None

    def close(self) -> None:
        """The worker is out of the job."""
        self._job.remove(self.seat)


def _copied(message: Message) -> Message:
    """Return the message with tensors of its own where somebody's program has them, too."""
    if isinstance(message, Push | Pulled):
        return replace(message, values=message.values.clone())
    return message
