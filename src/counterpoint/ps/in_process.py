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
from counterpoint.ps.actions import (
    COORDINATOR,
    AppendJournal,
    AppendLog,
    DeliverReply,
    PsAction,
    SaveSnapshot,
    SendMessage,
    Shutdown,
)
from counterpoint.ps.client import PsClient
from counterpoint.ps.coordinator import COORDINATOR_LOG, Coordinator
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.message_codec import PsMessage
from counterpoint.ps.messages import JournalEntry, PullReply, PushRequest, ShardState
from counterpoint.ps.replication import shard_log_name
from counterpoint.ps.server import JournalTracker, ServerNode, fill_gaps
from counterpoint.ps.worker_session import WorkerSession

READY_TIMEOUT_S = 60.0


@dataclass(slots=True)
class LocalMember:
    """One life of a member.

    Attributes:
        name: of the member.
        machine: what it runs.
        notes: what it has noted, if it is a server.
    """

    name: str
    state_machine: Coordinator | ServerNode | WorkerSession
    journal: JournalTracker = field(default_factory=JournalTracker)

    @property
    def incarnation(self) -> int:
        """Its incarnation."""
        return 0 if isinstance(self.state_machine, Coordinator) else self.state_machine.membership.incarnation


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
        >>> from counterpoint.ps.update_rules import Sgd
        >>> from counterpoint.ps.job_config import Asp
        >>> servers = LocalJob(Job("tour", Asp()))
        >>> with servers.join("worker-0") as session:
        ...     session.init("weight", torch.zeros(2), Sgd(0.5))
        ...     counted = session.push("weight", torch.ones(2)).wait()
        ...     counted.versions, session.pull("weight").wait().values
        ((1,), tensor([-0.5000, -0.5000]))
    """

    def __init__(self, job: JobConfig, *, is_journaled: bool = False) -> None:
        self.job = job
        self.now = 0.0
        self.journals: dict[int, dict[int, JournalEntry]] = {shard: {} for shard in range(job.num_shards)}
        self._transferred: dict[int, dict[int, JournalEntry]] = {shard: {} for shard in range(job.num_shards)}
        self.logs: dict[str, list[Any]] = {}
        self.snapshots: dict[int, dict[int, ShardState]] = {}
        self._is_journaled = is_journaled
        self._members: list[LocalMember] = []
        self._paused: list[LocalMember] = []
        self._message_queue: deque[tuple[LocalMember, LocalMember, PsMessage]] = deque()
        self._num_lives = 0
        self.start_coordinator()
        for index in range(job.num_servers):
            self.start_server(f"server-{index}")
        self.run_until(lambda: len(self.coordinator.state.replicas) == job.num_shards, READY_TIMEOUT_S)

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator; a PlanError where it has been killed."""
        for seat in self._members:
            if isinstance(seat.state_machine, Coordinator):
                return seat.state_machine
        raise PlanError(f"{self.job.name} has no coordinator now; start it again")

    def node(self, name: str) -> ServerNode:
        """Return a server; a PlanError where it does not run."""
        for seat in self._members:
            if seat.name == name and isinstance(seat.state_machine, ServerNode):
                return seat.state_machine
        raise PlanError(f"{self.job.name} has no server {name} now; start it")

    def start_coordinator(self) -> None:
        """The coordinator runs, after what its log says."""
        self._members.append(
            LocalMember(COORDINATOR, Coordinator(self.job, self.logs.get(COORDINATOR_LOG, ()), self.now))
        )

    def start_server(self, name: str) -> None:
        """A server with this name runs, after what the logs of shards say if it keeps them alone."""
        logs = {shard: self.logs.get(shard_log_name(shard), ()) for shard in range(self.job.num_shards)}
        self._start_member(LocalMember(name, ServerNode(self.job, name, self._new_token(), logs=logs)))

    def join(self, name: str) -> WorkerSession:
        """Return the session of a new worker.

        Raises:
            LaunchError: the name is taken, or servers are missing.
        """
        carrier = InProcessTransport(self)
        session = WorkerSession(PsClient(self.job, name, self._new_token()), carrier)
        carrier.member = LocalMember(name, session)
        self._start_member(carrier.member)
        return session.wait_ready(READY_TIMEOUT_S)

    def kill(self, name: str) -> None:
        """The machine is gone without a word; others find out when it has been silent for long enough."""
        self._members = [seat for seat in self._members if seat.name != name]

    def pause(self, name: str) -> None:
        """The machine does nothing and hears nothing until it goes on."""
        self._paused += [seat for seat in self._members if seat.name == name]
        self.kill(name)

    def resume(self, name: str) -> None:
        """The machine goes on where it was paused."""
        self._members += [seat for seat in self._paused if seat.name == name]
        self._paused = [seat for seat in self._paused if seat.name != name]

    def remove(self, member: LocalMember) -> None:
        """This life is gone."""
        self._members = [one for one in self._members if one is not member]

    def advance(self, seconds: float) -> None:
        """So much time has passed, and what follows from it has happened."""
        self.run_until(lambda: False, seconds)

    def run_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Tell whether the condition comes to hold within the time; meanwhile everything goes on.

        Args:
            holds: the condition.
            deadline_s: the longest that this lasts, by the job's clock.
        """
        end = self.now + timeout_s
        pace_s = min(self.job.timeouts.heartbeat_s, self.job.timeouts.resend_s)
        while not condition():
            if self._message_queue:
                source, seat, message = self._message_queue.popleft()
                if any(one is seat for one in self._members):
                    self._deliver(seat, message, source)
            elif self.now >= end:
                return False
            else:
                self.now = min(end, self.now + pace_s)
                for seat in list(self._members):
                    self._deliver(seat, None, seat)
        return True

    def execute(self, member: LocalMember, actions: Sequence[PsAction], source: LocalMember | None = None) -> None:
        """What a machine wants to happen has happened, or is in the mail.

        Args:
            seat: whose.
            actions: what it wants.
            source: whose message made it want so.
        """
        for action in actions:
            match action:
                case SendMessage():
                    self._enqueue_message(member, action, source)
                case AppendLog():
                    self.logs.setdefault(action.log, []).append(action.record)
                case AppendJournal() if self._is_journaled:
                    self._append_journal(action.shard, member.journal.add(action))
                case SaveSnapshot():
                    self.snapshots.setdefault(action.snapshot, {})[action.shard] = action.state
                case Shutdown() if isinstance(member.state_machine, ServerNode):
                    self.remove(member)
                    self.start_server(member.name)
                case AppendJournal() | Shutdown() | DeliverReply():
                    pass
                case _:
                    assert_never(action)

    def _new_token(self) -> int:
        self._num_lives += 1
        return self._num_lives

    def _start_member(self, member: LocalMember) -> None:
        self._members.append(member)
        self._deliver(member, None, member)

    def _deliver(self, member: LocalMember, message: PsMessage | None, source: LocalMember) -> None:
        machine = member.state_machine
        if isinstance(machine, ServerNode):
            member.journal.before_message(machine, message)
        self.execute(member, machine.on_event(message, self.now), source)
        if isinstance(machine, ServerNode) and self._is_journaled:
            for shard, entries in member.journal.take_promoted(machine.shard_replicas).items():
                self._append_journal(shard, entries)
            for shard, entries in member.journal.take_transferred(machine).items():
                self._transferred[shard] |= entries

    def _append_journal(self, shard: int, entries: Mapping[int, JournalEntry]) -> None:
        """These entries are certain, and so is what was handed on before them."""
        journal = self.journals[shard]
        has_gap = any(at and at - 1 not in journal and at - 1 not in entries for at in entries)
        journal.update(entries)
        if has_gap:
            fill_gaps(journal, self._transferred[shard])

    def _enqueue_message(self, member: LocalMember, send: SendMessage, source: LocalMember | None) -> None:
        """It is delivered to that life; what is for any life answers the one that has asked, if it has the name."""
        found = [one for one in self._members if one.name == send.to and send.incarnation in {0, one.incarnation}]
        if not send.incarnation and source in found:
            found = [source]
        if found:
            self._message_queue.append((member, found[-1], _clone_tensors(send.message)))


class InProcessTransport:
    """A session's messages in the job that it is in.

    Args:
        job: which.
    """

    member: LocalMember

    def __init__(self, job: LocalJob) -> None:
        self.lock = nullcontext()
        self._job = job

    def execute(self, actions: Sequence[PsAction]) -> None:
        """Messages are on their way."""
        self._job.execute(self.member, actions)

    def batch(self) -> AbstractContextManager[None]:
        """Return a block that changes nothing: messages leave when the job's time goes on."""
        return nullcontext()

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Tell whether the condition comes to hold within the time of the job's clock."""
        return self._job.run_until(condition, timeout_s)

    def can_send(self) -> bool:
        """More may always be sent."""
        return True

    @property
    def last_error(self) -> None:
        """Nothing stands in the way."""
        return None

    def close(self) -> None:
        """The worker is out of the job."""
        self._job.remove(self.member)


def _clone_tensors(message: PsMessage) -> PsMessage:
    """Return the message with tensors of its own where somebody's program has them, too."""
    if isinstance(message, PushRequest | PullReply):
        return replace(message, values=message.values.clone())
    return message
