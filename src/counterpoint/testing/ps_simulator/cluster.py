"""Simulated machines, disks and network with a discrete-event clock; the same seed gives the same run."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

from counterpoint.ps.actions import (
    AppendJournal,
    AppendLog,
    DeliverReply,
    PsAction,
    SaveSnapshot,
    SendMessage,
    Shutdown,
)
from counterpoint.ps.client import PsClient
from counterpoint.ps.coordinator import Coordinator
from counterpoint.ps.message_codec import PsMessage, decode_message, encode_message
from counterpoint.ps.messages import Ack, InstallSnapshot, JournalEntry, PullReply, PushReply, SetMembers, ShardState
from counterpoint.ps.replication import BackupReplica, PrimaryReplica
from counterpoint.ps.server import ServerNode
from counterpoint.ps.write_ahead_log import encode_record
from counterpoint.testing.ps_simulator.simulated_worker import SimulatedWorker


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Fault rates, until faults stop.

    Args:
        loss: probability that a message is lost.
        duplicate: probability that a message arrives twice.
        delay: probability that a message takes seconds, and is overtaken.
        crash_every_s: mean time between crashes; 0 for none.
        pause_every_s: mean time between pauses of a member; 0 for none.
        partition_every_s: mean time between broken links; 0 for none.
        torn_write: probability that a machine crashes during a write.
        stop_s: simulated time after which there are no more faults.
    """

    loss: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    crash_every_s: float = 0.0
    pause_every_s: float = 0.0
    partition_every_s: float = 0.0
    torn_write: float = 0.0
    stop_s: float = 0.0


def draw_faults(random: Random) -> FaultRates:
    """Return the fault rates of one seed."""

    def often(most: float) -> float:
        return random.choice((0.0, random.random() * most))

    def every(least_s: float) -> float:
        return random.choice((0.0, least_s * (1 + 3 * random.random())))

    slow, stop_s = often(0.2), 10 + 20 * random.random()
    return FaultRates(often(0.3), often(0.5), slow, every(2.0), every(4.0), every(4.0), often(0.1), stop_s)


class SimulatedDisk:
    """Logs by name; after a crash, writes in flight are lost, or torn."""

    def __init__(self) -> None:
        self._durable: dict[str, bytearray] = {}
        self._in_flight: list[tuple[float, str, bytes]] = []

    def append(self, log: str, raw: bytes, durable_at: float) -> None:
        """Start a write that becomes durable at the given time."""
        self._in_flight.append((durable_at, log, raw))

    def complete_writes(self, now: float) -> None:
        """Make all writes durable that are due."""
        while self._in_flight and self._in_flight[0][0] <= now:
            _, log, raw = self._in_flight.pop(0)
            self._durable.setdefault(log, bytearray()).extend(raw)

    def crash(self, now: float, random: Random) -> None:
        """Keep a random prefix of the writes in flight, whose end may be zeros."""
        self.complete_writes(now)
        if self._in_flight:
            _, log, _ = self._in_flight[0]
            raw = b"".join(raw for _, name, raw in self._in_flight if name == log)
            written = raw[: random.randrange(len(raw) + 1)]
            if written and random.random() < 0.3:
                zeros = random.randrange(len(written))
                written = written[: len(written) - zeros] + bytes(zeros)
            self._durable.setdefault(log, bytearray()).extend(written)
        self._in_flight.clear()

    def read(self, log: str) -> bytes:
        """Return the durable bytes of a log."""
        return bytes(self._durable.get(log, b""))

    def truncate(self, log: str, num_bytes: int) -> None:
        """Truncate a log."""
        del self._durable.setdefault(log, bytearray())[num_bytes:]


def entry_id(entry: JournalEntry) -> tuple[object, ...]:
    """Return a unique id of a journal entry."""
    if isinstance(entry, SetMembers):
        return ("members", entry.generation)
    return (entry.header.member, entry.header.incarnation, entry.header.sequence)


@dataclass(slots=True)
class ObservedHistory:
    """A run as seen by an omniscient observer.

    Attributes:
        journals: entries by shard and position.
        acknowledged: pushes whose worker received a reply, by shard and id.
        owners: for each shard and generation, the servers that replied as its primary.
        snapshots: saved states, by snapshot and shard.
        violations: violated invariants.
    """

    journals: dict[int, dict[int, JournalEntry]] = field(default_factory=dict)
    acknowledged: dict[tuple[int, tuple[object, ...]], PushReply] = field(default_factory=dict)
    owners: dict[tuple[int, int], set[tuple[str, int]]] = field(default_factory=dict)
    snapshots: dict[tuple[int, int], ShardState] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    _uncommitted: dict[tuple[str, int, int], dict[int, JournalEntry]] = field(default_factory=dict)

    def add_entry(self, shard: int, position: int, entry: JournalEntry) -> None:
        """Record a committed journal entry."""
        existing = self.journals.setdefault(shard, {}).setdefault(position, entry)
        if entry_id(existing) != entry_id(entry):
            self.violations.append(
                f"entry {position} of shard {shard} is {entry_id(existing)} and {entry_id(entry)}: two servers diverged"
            )

    def add_uncommitted(self, member: tuple[str, int], shard: int, position: int, entry: JournalEntry) -> None:
        """Record an entry of a backup."""
        self._uncommitted.setdefault((*member, shard), {})[position] = entry

    def promote(self, member: tuple[str, int], shard: int) -> None:
        """Commit the entries of a backup that became the primary."""
        entries = self._uncommitted.pop((*member, shard), None)
        if entries:
            for position, entry in entries.items():
                self.add_entry(shard, position, entry)

    def install_snapshot(self, member: tuple[str, int], shard: int, source: tuple[str, int], position: int) -> None:
        """Replace a backup's uncommitted entries by those that its primary's state contains."""
        entries = self._uncommitted.get((*source, shard), {})
        self._uncommitted[*member, shard] = {
            entry_position: entry for entry_position, entry in entries.items() if entry_position < position
        }

    def uncommitted(self, member: tuple[str, int], shard: int) -> dict[int, JournalEntry]:
        """Return the uncommitted entries of a server incarnation."""
        return self._uncommitted.get((*member, shard), {})

    def observe_reply(self, member: tuple[str, int], shard: int, generation: int) -> None:
        """Record that a server replied as the primary of a shard, in a generation."""
        owners = self.owners.setdefault((shard, generation), set())
        owners.add(member)
        if len(owners) == 2:
            self.violations.append(f"shard {shard} has two owners in generation {generation}: {sorted(owners)}")

    def acknowledge(self, worker: tuple[str, int], reply: PushReply | PullReply) -> None:
        """Record that a worker received the reply to a push."""
        if isinstance(reply, PushReply):
            self.acknowledged[reply.shard, (*worker, reply.sequence)] = reply


SimulatedMachine: TypeAlias = Coordinator | ServerNode | PsClient
MachineFactory: TypeAlias = Callable[["SimulatedHost", int], SimulatedMachine]

MEMBER_TYPES = (ServerNode, PsClient)
PRIMARY_REPLIES = (PushReply, Ack, PullReply)
"""Replies that only a primary sends."""


@dataclass(slots=True)
class SimulatedHost:
    """A machine that runs one incarnation of a member after another.

    Attributes:
        name: of the member.
        start: returns a new incarnation, given a token.
        machine: the current incarnation; None while it is down.
        worker: the worker's program, on a worker.
        disk: survives incarnations.
        durable_at: when everything that has been written is durable.
        paused_until: until when it does nothing.
    """

    name: str
    start: MachineFactory
    machine: SimulatedMachine | None = None
    worker: SimulatedWorker | None = None
    disk: SimulatedDisk = field(default_factory=SimulatedDisk)
    durable_at: float = 0.0
    paused_until: float = 0.0

    @property
    def identity(self) -> tuple[str, int]:
        """Name and incarnation."""
        machine = self.machine
        return self.name, machine.membership.incarnation if isinstance(machine, MEMBER_TYPES) else 0


class SimulatedCluster:
    """Event queue of all machines and messages.

    Args:
        random: source of all random choices.
        faults: fault rates.
        tick_s: interval of clock ticks.
    """

    def __init__(self, random: Random, faults: FaultRates, tick_s: float) -> None:
        self.random, self.faults, self.tick_s = random, faults, tick_s
        self.now = 0.0
        self.num_events = 0
        self.is_healed = False
        self.hosts: dict[str, SimulatedHost] = {}
        self.history = ObservedHistory()
        self.broken_links: dict[frozenset[str], float] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def has_faults(self) -> bool:
        """Whether faults are still injected."""
        return self.now < self.faults.stop_s and not self.is_healed

    def schedule(self, time_s: float, event: Callable[[], None]) -> None:
        """Schedule an event."""
        self._count += 1
        heapq.heappush(self._due, (time_s, self._count, event))

    def add_host(self, host: SimulatedHost, start_s: float) -> None:
        """Add a machine that starts at the given time."""
        self.hosts[host.name] = host
        self.schedule(start_s, lambda: self.boot(host))

    def step(self) -> None:
        """Run the next event."""
        self.now, _, what = heapq.heappop(self._due)
        self.num_events += 1
        what()

    def boot(self, host: SimulatedHost) -> None:
        """Start a new incarnation, unless one is running."""
        if host.machine is None:
            host.disk.complete_writes(self.now)
            host.durable_at = self.now
            machine = host.machine = host.start(host, self.random.getrandbits(60))
            self._tick(host, machine)

    def _tick(self, host: SimulatedHost, machine: SimulatedMachine) -> None:
        if host.machine is machine:
            self.deliver(host, machine, None)
            self.schedule(
                self.now + self.tick_s * (0.9 + 0.2 * self.random.random()), lambda: self._tick(host, machine)
            )

    def crash(self, host: SimulatedHost, back_s: float | None) -> None:
        """Stop a machine, which restarts after the given time."""
        host.disk.crash(self.now, self.random)
        host.machine = None
        if back_s is not None:
            self.schedule(self.now + back_s, lambda: self.boot(host))

    def deliver(self, host: SimulatedHost, machine: SimulatedMachine, message: PsMessage | None) -> None:
        """Deliver a message or a clock tick, as soon as the machine is not paused."""
        if host.machine is not machine:
            return
        if host.paused_until > self.now:
            self.schedule(host.paused_until, lambda: self.deliver(host, machine, message))
            return
        actions: Sequence[PsAction] = machine.on_event(message, self.now)
        if host.worker is not None:
            actions = host.worker.step(self._observe_replies(host, actions))
            if host.worker.has_left:
                self.crash(host, 4 * self.random.random())
        if isinstance(machine, ServerNode):
            self._observe_install(host, machine, message)
            self._observe_promotion(host, machine)
        for action in actions:
            self._execute(host, machine, action)

    def _observe_replies(self, host: SimulatedHost, actions: Sequence[PsAction]) -> Sequence[PsAction]:
        for action in actions:
            if isinstance(action, DeliverReply) and isinstance(action.reply, PushReply):
                self.history.acknowledge(host.identity, action.reply)
        return actions

    def _observe_install(self, host: SimulatedHost, node: ServerNode, message: PsMessage | None) -> None:
        """Record that a backup's uncommitted entries were replaced by its primary's state.

        A primary that was the backup before may have entries that are not known to be committed.
        """
        replica = node.shard_replicas.get(message.shard) if isinstance(message, InstallSnapshot) else None
        if not isinstance(message, InstallSnapshot) or not isinstance(replica, BackupReplica) or replica.shard is None:
            return
        if replica.is_installed and replica.shard.position == message.state.position:
            source = message.header.member, message.header.incarnation
            self.history.install_snapshot(host.identity, message.shard, source, message.state.position)

    def _observe_promotion(self, host: SimulatedHost, node: ServerNode) -> None:
        for index, replica in node.shard_replicas.items():
            if isinstance(replica, PrimaryReplica) and replica.replicas.is_backup_ready:
                self.history.promote((host.name, node.membership.incarnation), index)

    def _execute(self, host: SimulatedHost, machine: SimulatedMachine, action: PsAction) -> None:
        match action:
            case SendMessage() | AppendJournal():
                if isinstance(action, SendMessage):
                    self._observe_send(host, action.message)
                if host.durable_at <= self.now:
                    self._release(host, action)
                else:
                    self.schedule(host.durable_at, lambda: self._after_write(host, machine, action))
            case AppendLog():
                self._wait_for_disk(host)
                host.disk.append(action.log, encode_record(action.record), host.durable_at)
                if self.has_faults and self.random.random() < self.faults.torn_write:
                    crash_s = self.now + (host.durable_at - self.now) * self.random.random()
                    self.schedule(crash_s, lambda: self._tear_write(host, machine))
            case SaveSnapshot():
                self._wait_for_disk(host)
                self.history.snapshots[action.snapshot, action.shard] = action.state
            case Shutdown():
                self.crash(host, 0.5)
            case DeliverReply():
                pass

    def _wait_for_disk(self, host: SimulatedHost) -> None:
        host.disk.complete_writes(self.now)
        host.durable_at = max(self.now, host.durable_at) + 0.02 * self.random.random()

    def _observe_send(self, host: SimulatedHost, message: PsMessage) -> None:
        """Record who replies as the primary of a shard."""
        machine = host.machine
        if isinstance(machine, ServerNode) and isinstance(message, PRIMARY_REPLIES):
            self.history.observe_reply(host.identity, message.shard, machine.generation)

    def _tear_write(self, host: SimulatedHost, machine: SimulatedMachine) -> None:
        """Crash a machine during a write."""
        if host.machine is machine:
            self.crash(host, 4 * self.random.random())

    def _after_write(self, host: SimulatedHost, machine: SimulatedMachine, action: SendMessage | AppendJournal) -> None:
        if host.machine is machine:
            self._release(host, action)

    def _release(self, host: SimulatedHost, action: SendMessage | AppendJournal) -> None:
        """Execute an action that waited for writes."""
        if isinstance(action, SendMessage):
            self._transmit(host.name, action)
        elif action.is_committed:
            self.history.add_entry(action.shard, action.position, action.entry)
        else:
            self.history.add_uncommitted(host.identity, action.shard, action.position, action.entry)

    def _transmit(self, source: str, action: SendMessage) -> None:
        """Send a message, which may be lost, duplicated or delayed."""
        faults, random = self.faults, self.random
        is_bad = self.has_faults
        if is_bad and (random.random() < faults.loss or self._is_broken(source, action.to)):
            return
        copies = 2 if is_bad and random.random() < faults.duplicate else 1
        for _ in range(copies):
            delay_s = 0.002 + 0.03 * random.random()
            if is_bad and random.random() < faults.delay:
                delay_s += 4 * random.random()
            self.schedule(self.now + delay_s, lambda: self._arrive(action))

    def _is_broken(self, source: str, target: str) -> bool:
        return bool(self.broken_links) and self.broken_links.get(frozenset((source, target)), 0.0) > self.now

    def _arrive(self, action: SendMessage) -> None:
        host = self.hosts.get(action.to)
        if host is not None and host.machine is not None and action.incarnation in {0, host.identity[1]}:
            message = action.message
            if self._count % 16 == 0:
                message = decode_message(*encode_message(message))
            self.deliver(host, host.machine, message)
