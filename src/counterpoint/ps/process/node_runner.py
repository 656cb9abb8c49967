"""One machine of a job at work: messages to and from the wire, lines to the disk, and the time that passes."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TypeAlias, assert_never

from counterpoint.errors import CounterpointError, PeerError
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
from counterpoint.ps.coordinator import Coordinator
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.message_codec import PsMessage
from counterpoint.ps.messages import Heartbeat, JoinReply, JoinRequest, MembershipView, SnapshotSaved
from counterpoint.ps.process.connection_pool import ConnectionPool, Peer
from counterpoint.ps.process.wal_writer import JournalWriter, WalWriter
from counterpoint.ps.server import ServerNode
from counterpoint.ps.worker_session import WorkerSession
from counterpoint.rpc.address import RpcAddress
from counterpoint.rpc.event_loop import EventLoop
from counterpoint.rpc.handshake import JobCredentials

StateMachine: TypeAlias = Coordinator | ServerNode | WorkerSession
TICKS_PER_TIMEOUT = 4
"""Looks at the clock within the shortest time that the job's patience knows."""
FLUSH_TIMEOUT_S = 60.0
MAX_FUTURE_REQUESTS = 4096
"""Requests of a generation that this machine has not heard of yet, which wait until it has."""


class NodeRunner:
    """Runs one machine.

    Args:
        job: what all agree on.
        loop: that looks after everything; its clock is the machine's.
        secret: of the job.
        coordinator: where it listens; None on the coordinator itself.
        folder: for what is to be durable; None if nothing is.
        journal: for the journals of the shards, all that was ever pushed; None if nobody is to look at them.
    """

    def __init__(
        self,
        job: JobConfig,
        loop: EventLoop,
        credentials: JobCredentials,
        coordinator: RpcAddress | None = None,
        folder: Path | None = None,
        journal: Path | None = None,
    ) -> None:
        self._job, self._loop = job, loop
        self._coordinator = "" if coordinator is None else str(coordinator)
        self.connections = ConnectionPool(loop, credentials, self._on_message, job.timeouts.resend_s)
        self._state_machine: StateMachine | None = None
        self._writer = None if folder is None else WalWriter(folder, self._on_durable, self._on_failure)
        self._journal = None if journal is None else JournalWriter(WalWriter(journal, lambda _: None, self._on_failure))
        self._num_enqueued = self._num_logged = self._num_durable = 0
        self._waiting_sends: deque[tuple[int, SendMessage, Peer | None]] = deque()
        self._future_requests: list[tuple[PsMessage, Peer]] = []
        self._tick_s = min(job.timeouts.heartbeat_s, job.timeouts.resend_s) / TICKS_PER_TIMEOUT
        self.deadline = 0.0
        self.stop_reason = ""
        self.error: CounterpointError | None = None

    def run(self, state_machine: StateMachine) -> None:
        """The host runs this machine from now on."""
        with self._loop.lock:
            self._state_machine, self.stop_reason = state_machine, ""
            self._future_requests.clear()
            self._waiting_sends.clear()
            if self._journal is not None and isinstance(state_machine, ServerNode):
                self._journal.start_incarnation(state_machine)
            self._loop.watch(self, 0)
            self.on_timeout()

    @property
    def is_stopped(self) -> bool:
        """The machine's life is over, or its disk has failed."""
        return bool(self.stop_reason) or self.error is not None

    def execute(self, actions: list[PsAction], source: Peer | None = None) -> None:
        """What the machine wants to happen happens, or will when what it has written before is durable.

        To save a shard takes the disk a while: nobody waits for that but who is to be told so.

        Args:
            actions: in their order.
            source: whose message made it want so.
        """
        for action in actions:
            match action:
                case SendMessage() if self._num_durable < (num_orders := self._required_durability(action.message)):
                    self._waiting_sends.append((num_orders, action, source))
                case SendMessage():
                    self._send(action, source)
                case AppendLog() | SaveSnapshot():
                    self._enqueue_write(action)
                case Shutdown():
                    self.stop_reason = action.reason
                case AppendJournal() if self._journal is not None:
                    self._journal.append(action)
                case AppendJournal() | DeliverReply():
                    pass
                case _:
                    assert_never(action)

    def _enqueue_write(self, action: AppendLog | SaveSnapshot) -> None:
        if self._journal is not None and isinstance(action, SaveSnapshot):
            self._journal.flush()  # a log may go that says what the journal has not heard yet
        if self._writer is not None:
            self._num_enqueued = self._writer.enqueue(action)
            self._num_logged = self._num_enqueued if isinstance(action, AppendLog) else self._num_logged

    def _required_durability(self, message: PsMessage) -> int:
        """Return up to which order all must be durable before a message leaves; signs of life promise nothing."""
        match message:
            case Heartbeat() | JoinRequest():
                return 0
            case SnapshotSaved():
                return self._num_enqueued
            case _:
                return self._num_logged

    def flush(self) -> None:
        """What the machine has written is durable; a PeerError where the disk takes too long."""
        what = f"the disk to take {self._num_enqueued - self._num_durable} lines"
        self._loop.wait_for(
            lambda: self._num_durable >= self._num_enqueued or self.error is not None, FLUSH_TIMEOUT_S, what
        )

    def close(self) -> None:
        """The machine does nothing any more; what it has written is durable, and its connections say goodbye."""
        with self._loop.lock:
            self._loop.unwatch(self)
            self._state_machine = None
            self.connections.close()
        for writer in (self._writer, self._journal):
            if writer is not None:
                writer.close()
        self._loop.wait(lambda: self.connections.is_closed, 1.0)

    # What the loop calls

    def fileno(self) -> int:
        """Return no descriptor: it has no socket of its own."""
        return -1

    def on_ready(self, events: int) -> None:
        """Nothing is: it has no socket of its own."""
        raise PeerError(f"events {events} for a host, which has no socket; this is a fault of the loop")

    def on_timeout(self) -> None:
        """Time has passed."""
        self.deadline = self._loop.clock() + self._tick_s
        self._step(None, None)

    def abort(self) -> None:
        """The loop is closed."""
        self._state_machine = None

    # Messages

    def _on_message(self, message: PsMessage, peer: Peer) -> None:
        origin = getattr(message, "header", None)
        if (
            isinstance(self._state_machine, ServerNode)
            and origin is not None
            and origin.generation > self._state_machine.generation
        ):
            if len(self._future_requests) < MAX_FUTURE_REQUESTS:
                self._future_requests.append((message, peer))
            return
        self._step(message, peer)
        if isinstance(message, MembershipView | JoinReply):
            self._apply_view()

    def _apply_view(self) -> None:
        """The view may be a new one: servers that are gone are not called any more, and early requests have come."""
        machine = self._state_machine
        if machine is None or isinstance(machine, Coordinator):
            return
        servers = {member.address for member in machine.membership.view.servers}
        self.connections.disconnect_except(servers | {self._coordinator})
        early, self._future_requests = self._future_requests, []
        for message, peer in early:
            self._on_message(message, peer)

    def _step(self, message: PsMessage | None, peer: Peer | None) -> None:
        if self._state_machine is None or self.is_stopped:
            return
        if self._journal is not None:
            self._journal.before_message(message)
        self.execute(self._state_machine.on_event(message, self._loop.clock()), peer)
        if self._journal is not None:
            self._journal.after_message()

    def _send(self, send: SendMessage, source: Peer | None) -> None:
        peer = self._find_peer(send, source)
        if peer is not None:
            self.connections.send(send.message, peer)

    def _find_peer(self, send: SendMessage, source: Peer | None) -> Peer | None:
        """Return whom a message goes to; None where nobody can be reached now."""
        if send.incarnation or (source is not None and source.name == send.to):
            return self.connections.find_peer(send.to, send.incarnation, source)
        if send.to == COORDINATOR:
            return self.connections.connect_peer(COORDINATOR, self._coordinator)
        if isinstance(self._state_machine, Coordinator | None):
            return self.connections.find_peer(send.to, 0, None)
        for member in self._state_machine.membership.view.servers:
            if member.name == send.to and member.address:
                return self.connections.connect_peer(send.to, member.address)
        return self.connections.find_peer(send.to, 0, None)

    # What the writer calls

    def _on_durable(self, num_orders: int) -> None:
        with self._loop.lock, self._loop.cork():
            self._num_durable = num_orders
            while self._waiting_sends and self._waiting_sends[0][0] <= num_orders:
                _, send, source = self._waiting_sends.popleft()
                self._send(send, source)

    def _on_failure(self, error: CounterpointError) -> None:
        with self._loop.lock:
            self.error = error
