"""One machine of a job at work: messages to and from the wire, lines to the disk, and the time that passes."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TypeAlias, assert_never

from counterpoint.errors import CounterpointError, PeerError
from counterpoint.server.actions import COORDINATOR, Action, Deliver, Note, Save, Send, Stop, Write
from counterpoint.server.calls import Heartbeat, Hello, Saved, View, Welcome
from counterpoint.server.coordinator import Coordinator
from counterpoint.server.form import Message
from counterpoint.server.hosting.journals import Journal
from counterpoint.server.hosting.post import Peer, Post
from counterpoint.server.hosting.writer import Writer
from counterpoint.server.job import Job
from counterpoint.server.node import Node
from counterpoint.server.wire.greeting import Secret
from counterpoint.server.wire.loop import Loop
from counterpoint.server.wire.place import Place
from counterpoint.server.worker import WorkerSession

Machine: TypeAlias = Coordinator | Node | WorkerSession
TICKS = 4
"""Looks at the clock within the shortest time that the job's patience knows."""
SETTLE_S = 60.0
MAX_EARLY = 4096
"""Requests of a generation that this machine has not heard of yet, which wait until it has."""


class Host:
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
        job: Job,
        loop: Loop,
        secret: Secret,
        coordinator: Place | None = None,
        folder: Path | None = None,
        journal: Path | None = None,
    ) -> None:
        self._job, self._loop = job, loop
        self._coordinator = "" if coordinator is None else str(coordinator)
        self.post = Post(loop, secret, self._hear, job.patience.retry_s)
        self._machine: Machine | None = None
        self._writer = None if folder is None else Writer(folder, self._durable, self._failed)
        self._journal = None if journal is None else Journal(Writer(journal, lambda _: None, self._failed))
        self._num_ordered = self._num_logged = self._num_durable = 0
        self._held: deque[tuple[int, Send, Peer | None]] = deque()
        self._early: list[tuple[Message, Peer]] = []
        self._pace_s = min(job.patience.beat_s, job.patience.retry_s) / TICKS
        self.due = 0.0
        self.stopped = ""
        self.error: CounterpointError | None = None

    def run(self, machine: Machine) -> None:
        """The host runs this machine from now on."""
        with self._loop.lock:
            self._machine, self.stopped = machine, ""
            self._early.clear()
            self._held.clear()
            if self._journal is not None and isinstance(machine, Node):
                self._journal.begin(machine)
            self._loop.watch(self, 0)
            self.expire()

    @property
    def is_stopped(self) -> bool:
        """The machine's life is over, or its disk has failed."""
        return bool(self.stopped) or self.error is not None

    def act(self, actions: list[Action], source: Peer | None = None) -> None:
        """What the machine wants to happen happens, or will when what it has written before is durable.

        To save a shard takes the disk a while: nobody waits for that but who is to be told so.

        Args:
            actions: in their order.
            source: whose message made it want so.
        """
        for action in actions:
            match action:
                case Send() if self._num_durable < (num_orders := self._awaited(action.message)):
                    self._held.append((num_orders, action, source))
                case Send():
                    self._send(action, source)
                case Write() | Save():
                    self._order(action)
                case Stop():
                    self.stopped = action.text
                case Note() if self._journal is not None:
                    self._journal.note(action)
                case Note() | Deliver():
                    pass
                case _:
                    assert_never(action)

    def _order(self, action: Write | Save) -> None:
        if self._journal is not None and isinstance(action, Save):
            self._journal.settle()  # a log may go that says what the journal has not heard yet
        if self._writer is not None:
            self._num_ordered = self._writer.order(action)
            self._num_logged = self._num_ordered if isinstance(action, Write) else self._num_logged

    def _awaited(self, message: Message) -> int:
        """Return up to which order all must be durable before a message leaves; signs of life promise nothing."""
        match message:
            case Heartbeat() | Hello():
                return 0
            case Saved():
                return self._num_ordered
            case _:
                return self._num_logged

    def settle(self) -> None:
        """What the machine has written is durable; a PeerError where the disk takes too long."""
        what = f"the disk to take {self._num_ordered - self._num_durable} lines"
        self._loop.wait_for(lambda: self._num_durable >= self._num_ordered or self.error is not None, SETTLE_S, what)

    def close(self) -> None:
        """The machine does nothing any more; what it has written is durable, and its connections say goodbye."""
        with self._loop.lock:
            self._loop.forget(self)
            self._machine = None
            self.post.close()
        for writer in (self._writer, self._journal):
            if writer is not None:
                writer.close()
        self._loop.wait(lambda: self.post.is_over, 1.0)

    # What the loop calls

    def fileno(self) -> int:
        """Return no descriptor: it has no socket of its own."""
        return -1

    def ready(self, events: int) -> None:
        """Nothing is: it has no socket of its own."""
        raise PeerError(f"events {events} for a host, which has no socket; this is a fault of the loop")

    def expire(self) -> None:
        """Time has passed."""
        self.due = self._loop.clock() + self._pace_s
        self._take(None, None)

    def abort(self) -> None:
        """The loop is closed."""
        self._machine = None

    # Messages

    def _hear(self, message: Message, peer: Peer) -> None:
        origin = getattr(message, "origin", None)
        if isinstance(self._machine, Node) and origin is not None and origin.generation > self._machine.generation:
            if len(self._early) < MAX_EARLY:
                self._early.append((message, peer))
            return
        self._take(message, peer)
        if isinstance(message, View | Welcome):
            self._adopt()

    def _adopt(self) -> None:
        """The view may be a new one: servers that are gone are not called any more, and early requests have come."""
        machine = self._machine
        if machine is None or isinstance(machine, Coordinator):
            return
        servers = {member.address for member in machine.presence.view.servers}
        self.post.forget(servers | {self._coordinator})
        early, self._early = self._early, []
        for message, peer in early:
            self._hear(message, peer)

    def _take(self, message: Message | None, peer: Peer | None) -> None:
        if self._machine is None or self.is_stopped:
            return
        if self._journal is not None:
            self._journal.before(message)
        self.act(self._machine.on_event(message, self._loop.clock()), peer)
        if self._journal is not None:
            self._journal.after()

    def _send(self, send: Send, source: Peer | None) -> None:
        peer = self._peer(send, source)
        if peer is not None:
            self.post.send(send.message, peer)

    def _peer(self, send: Send, source: Peer | None) -> Peer | None:
        """Return whom a message goes to; None where nobody can be reached now."""
        if send.life or (source is not None and source.name == send.to):
            return self.post.towards(send.to, send.life, source)
        if send.to == COORDINATOR:
            return self.post.call(COORDINATOR, self._coordinator)
        if isinstance(self._machine, Coordinator | None):
            return self.post.towards(send.to, 0, None)
        for member in self._machine.presence.view.servers:
            if member.name == send.to and member.address:
                return self.post.call(send.to, member.address)
        return self.post.towards(send.to, 0, None)

    # What the writer calls

    def _durable(self, num_orders: int) -> None:
        with self._loop.lock, self._loop.gathering():
            self._num_durable = num_orders
            while self._held and self._held[0][0] <= num_orders:
                _, send, source = self._held.popleft()
                self._send(send, source)

    def _failed(self, error: CounterpointError) -> None:
        with self._loop.lock:
            self.error = error
