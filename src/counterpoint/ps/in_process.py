"""A whole job in one process and one thread, deterministic: coordinator, servers and workers.

Nothing runs except while somebody waits: then messages are delivered in the order in which they were sent, and when
none is left, the simulated clock advances. For tests and examples; the guarantees are those of real servers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, assert_never

from msgspec.structs import replace

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
    """One incarnation of a member.

    Attributes:
        name: of the member.
        state_machine: what it runs.
        journal: entries it has seen, if it is a server.
    """

    name: str
    state_machine: Coordinator | ServerNode | WorkerSession
    journal: JournalTracker = field(default_factory=JournalTracker)

    @property
    def incarnation(self) -> int:
        """Its incarnation; 0 for the coordinator."""
        return 0 if isinstance(self.state_machine, Coordinator) else self.state_machine.membership.incarnation


class LocalJob:
    """A job with its servers, all in this thread; workers join it.

    Args:
        job: configuration.
        is_journaled: whether to keep the journals, which hold everything that was ever pushed.

    Attributes:
        now: simulated time.
        journals: committed entries, by shard and position, for replay.
        logs: log records, by log name.
        snapshots: saved states, by snapshot and shard.

    Example:
        >>> import torch
        >>> from counterpoint.ps.consistency import Asp
        >>> from counterpoint.ps.update_rules import Sgd
        >>> servers = LocalJob(JobConfig("tour", Asp()))
        >>> with servers.join("worker-0") as session:
        ...     session.init("weight", torch.zeros(2), Sgd(0.5))
        ...     pushed = session.push("weight", torch.ones(2)).wait()
        ...     pushed.versions, session.pull("weight").wait().values
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
        """The coordinator; raises PlanError if it has been killed."""
        for member in self._members:
            if isinstance(member.state_machine, Coordinator):
                return member.state_machine
        raise PlanError(f"{self.job.name} has no running coordinator; start it again")

    def node(self, name: str) -> ServerNode:
        """Return a server; raise PlanError if it does not run."""
        for member in self._members:
            if member.name == name and isinstance(member.state_machine, ServerNode):
                return member.state_machine
        raise PlanError(f"{self.job.name} has no running server {name}; start it")

    def start_coordinator(self) -> None:
        """Start the coordinator from its log."""
        self._members.append(
            LocalMember(COORDINATOR, Coordinator(self.job, self.logs.get(COORDINATOR_LOG, ()), self.now))
        )

    def start_server(self, name: str) -> None:
        """Start a server with this name, from the logs of shards without a backup."""
        logs = {shard: self.logs.get(shard_log_name(shard), ()) for shard in range(self.job.num_shards)}
        self._start_member(LocalMember(name, ServerNode(self.job, name, self._new_token(), logs=logs)))

    def join(self, name: str) -> WorkerSession:
        """Return the session of a new worker.

        Raises:
            LaunchError: the name is taken, or servers are missing.
        """
        transport = InProcessTransport(self)
        session = WorkerSession(PsClient(self.job, name, self._new_token()), transport)
        transport.member = LocalMember(name, session)
        self._start_member(transport.member)
        return session.wait_ready(READY_TIMEOUT_S)

    def kill(self, name: str) -> None:
        """Remove a member without notice; others find out by timeout."""
        self._members = [member for member in self._members if member.name != name]

    def pause(self, name: str) -> None:
        """Stop delivering messages and time to a member until it is resumed."""
        self._paused += [member for member in self._members if member.name == name]
        self.kill(name)

    def resume(self, name: str) -> None:
        """Continue a paused member."""
        self._members += [member for member in self._paused if member.name == name]
        self._paused = [member for member in self._paused if member.name != name]

    def remove(self, member: LocalMember) -> None:
        """Remove one incarnation."""
        self._members = [other for other in self._members if other is not member]

    def advance(self, seconds: float) -> None:
        """Let simulated time pass."""
        self.run_until(lambda: False, seconds)

    def run_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Run the job until the condition holds; tell whether it did within the time.

        Args:
            condition: the condition.
            timeout_s: limit, in simulated time.
        """
        end = self.now + timeout_s
        tick_s = min(self.job.timeouts.heartbeat_s, self.job.timeouts.resend_s)
        while not condition():
            if self._message_queue:
                source, member, message = self._message_queue.popleft()
                if any(other is member for other in self._members):
                    self._deliver(member, message, source)
            elif self.now >= end:
                return False
            else:
                self.now = min(end, self.now + tick_s)
                for member in list(self._members):
                    self._deliver(member, None, member)
        return True

    def execute(self, member: LocalMember, actions: Sequence[PsAction], source: LocalMember | None = None) -> None:
        """Execute the actions of a state machine.

        Args:
            member: whose.
            actions: to be executed.
            source: sender of the message that caused them.
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
        state_machine = member.state_machine
        if isinstance(state_machine, ServerNode):
            member.journal.before_message(state_machine, message)
        self.execute(member, state_machine.on_event(message, self.now), source)
        if isinstance(state_machine, ServerNode) and self._is_journaled:
            for shard, entries in member.journal.take_promoted(state_machine.shard_replicas).items():
                self._append_journal(shard, entries)
            for shard, entries in member.journal.take_transferred(state_machine).items():
                self._transferred[shard] |= entries

    def _append_journal(self, shard: int, entries: Mapping[int, JournalEntry]) -> None:
        """Add committed entries to a journal; fill gaps before them with transferred entries."""
        journal = self.journals[shard]
        has_gap = any(position and position - 1 not in journal and position - 1 not in entries for position in entries)
        journal.update(entries)
        if has_gap:
            fill_gaps(journal, self._transferred[shard])

    def _enqueue_message(self, member: LocalMember, send: SendMessage, source: LocalMember | None) -> None:
        """Queue a message for the requested incarnation; for any incarnation, prefer the sender of the request."""
        recipients = [
            candidate
            for candidate in self._members
            if candidate.name == send.to and send.incarnation in {0, candidate.incarnation}
        ]
        if not send.incarnation and source in recipients:
            recipients = [source]
        if recipients:
            self._message_queue.append((member, recipients[-1], _clone_tensors(send.message)))


class InProcessTransport:
    """Transport of a session inside a :class:`LocalJob`.

    Args:
        job: the job.
    """

    member: LocalMember

    def __init__(self, job: LocalJob) -> None:
        self.lock = nullcontext()
        self._job = job

    def execute(self, actions: Sequence[PsAction]) -> None:
        """Send messages."""
        self._job.execute(self.member, actions)

    def batch(self) -> AbstractContextManager[None]:
        """Return a context without effect: messages are delivered when the job runs."""
        return nullcontext()

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Tell whether the condition becomes true within the simulated time."""
        return self._job.run_until(condition, timeout_s)

    def can_send(self) -> bool:
        """Return True: messages are queued without a limit."""
        return True

    @property
    def last_error(self) -> None:
        """None: there are no connections."""
        return None

    def close(self) -> None:
        """Remove the worker from the job."""
        self._job.remove(self.member)


def _clone_tensors(message: PsMessage) -> PsMessage:
    """Return the message with tensors of its own if the sender's program may change them."""
    if isinstance(message, PushRequest | PullReply):
        return replace(message, values=message.values.clone())
    return message
