"""Run one state machine of a job: messages from and to sockets, log records to disk, clock ticks."""

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
"""Clock ticks within the shortest timeout of the job."""
FLUSH_TIMEOUT_S = 60.0
MAX_FUTURE_REQUESTS = 4096
"""Requests of a newer generation that may wait until this process has received that view."""


class NodeRunner:
    """Runs the state machine of one process.

    Args:
        job: configuration.
        loop: event loop; its clock is the state machine's.
        credentials: of the job.
        coordinator: its address; None on the coordinator itself.
        folder: for durable state; None if there is none.
        journal: folder for the shards' journals; None to keep none.
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
        """Run this state machine from now on."""
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
        """Whether the incarnation has ended, or its disk has failed."""
        return bool(self.stop_reason) or self.error is not None

    def execute(self, actions: list[PsAction], source: Peer | None = None) -> None:
        """Execute actions; sends wait until the log records before them are durable.

        Saving a shard takes long, so only the message that reports it waits for it.

        Args:
            actions: in order.
            source: sender of the message that caused them.
        """
        for action in actions:
            match action:
                case SendMessage() if self._num_durable < (num_required := self._required_durability(action.message)):
                    self._waiting_sends.append((num_required, action, source))
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
            self._journal.flush()  # the snapshot removes log records that the journal may not have yet
        if self._writer is not None:
            self._num_enqueued = self._writer.enqueue(action)
            self._num_logged = self._num_enqueued if isinstance(action, AppendLog) else self._num_logged

    def _required_durability(self, message: PsMessage) -> int:
        """Return the number of the write that must be durable before a message is sent; heartbeats wait for none."""
        match message:
            case Heartbeat() | JoinRequest():
                return 0
            case SnapshotSaved():
                return self._num_enqueued
            case _:
                return self._num_logged

    def flush(self) -> None:
        """Wait until everything written is durable; raise PeerError if the disk takes too long."""
        what = f"the disk to take {self._num_enqueued - self._num_durable} lines"
        self._loop.wait_for(
            lambda: self._num_durable >= self._num_enqueued or self.error is not None, FLUSH_TIMEOUT_S, what
        )

    def close(self) -> None:
        """Stop the state machine, make its writes durable, and close its connections gracefully."""
        with self._loop.lock:
            self._loop.unwatch(self)
            self._state_machine = None
            self.connections.close()
        for writer in (self._writer, self._journal):
            if writer is not None:
                writer.close()
        self._loop.wait(lambda: self.connections.is_closed, 1.0)

    # Called by the event loop

    def fileno(self) -> int:
        """Return -1: it has no socket of its own."""
        return -1

    def on_ready(self, events: int) -> None:
        """Raise PeerError: it has no socket of its own."""
        raise PeerError(f"events {events} for a node runner, which has no socket; this is a bug in the event loop")

    def on_timeout(self) -> None:
        """Run a clock tick."""
        self.deadline = self._loop.clock() + self._tick_s
        self._step(None, None)

    def abort(self) -> None:
        """Stop the state machine, since the loop is closed."""
        self._state_machine = None

    # Messages

    def _on_message(self, message: PsMessage, peer: Peer) -> None:
        header = getattr(message, "header", None)
        if (
            isinstance(self._state_machine, ServerNode)
            and header is not None
            and header.generation > self._state_machine.generation
        ):
            if len(self._future_requests) < MAX_FUTURE_REQUESTS:
                self._future_requests.append((message, peer))
            return
        self._step(message, peer)
        if isinstance(message, MembershipView | JoinReply):
            self._apply_view()

    def _apply_view(self) -> None:
        """Disconnect from servers that have left, and process requests that waited for this view."""
        state_machine = self._state_machine
        if state_machine is None or isinstance(state_machine, Coordinator):
            return
        servers = {member.address for member in state_machine.membership.view.servers}
        self.connections.disconnect_except(servers | {self._coordinator})
        waiting, self._future_requests = self._future_requests, []
        for message, peer in waiting:
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
        """Return the recipient of a message; None if it cannot be reached now."""
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

    # Called by the writer thread

    def _on_durable(self, num_orders: int) -> None:
        with self._loop.lock, self._loop.cork():
            self._num_durable = num_orders
            while self._waiting_sends and self._waiting_sends[0][0] <= num_orders:
                _, send, source = self._waiting_sends.popleft()
                self._send(send, source)

    def _on_failure(self, error: CounterpointError) -> None:
        with self._loop.lock:
            self.error = error
