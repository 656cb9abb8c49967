"""Machines, links and a clock that only moves when something happens; the same seed makes the same world twice."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

from counterpoint.server.actions import Action, Deliver, Note, Save, Send, Stop, Write
from counterpoint.server.client import Client
from counterpoint.server.coordinator import Coordinator
from counterpoint.server.form import Message, from_plain, to_plain
from counterpoint.server.holding import Backed, Primary
from counterpoint.server.log import record
from counterpoint.server.messages import Done, Pulled, Pushed
from counterpoint.server.node import Node
from counterpoint.server.simulator.disk import Disk
from counterpoint.server.simulator.faults import Faults
from counterpoint.server.simulator.history import History
from counterpoint.server.simulator.trainer import Trainer
from counterpoint.server.states import Install

Machine: TypeAlias = Coordinator | Node | Client
Starter: TypeAlias = Callable[["Host", int], Machine]

MEMBERS = (Node, Client)
OF_THE_FIRST = (Pushed, Done, Pulled)
"""What only the first keeper of a shard answers."""


@dataclass(slots=True)
class Host:
    """A machine that runs one life after the other.

    Attributes:
        name: of the member.
        start: makes a life, given a token.
        machine: the life that it runs; None while it is down.
        trainer: the worker's program, on a worker.
        disk: what is left of earlier lives.
        durable_at: when everything that has been written is durable.
        paused_until: until when it does nothing.
    """

    name: str
    start: Starter
    machine: Machine | None = None
    trainer: Trainer | None = None
    disk: Disk = field(default_factory=Disk)
    durable_at: float = 0.0
    paused_until: float = 0.0

    @property
    def life(self) -> tuple[str, int]:
        """Name and incarnation."""
        machine = self.machine
        return self.name, machine.presence.incarnation if isinstance(machine, MEMBERS) else 0


class World:
    """Everything that happens, in its order.

    Args:
        random: decides all that is left open.
        faults: what goes wrong.
        tick_s: how often a machine looks at the clock.
    """

    def __init__(self, random: Random, faults: Faults, tick_s: float) -> None:
        self.random, self.faults, self.tick_s = random, faults, tick_s
        self.now = 0.0
        self.num_events = 0
        self.is_calm = False
        self.hosts: dict[str, Host] = {}
        self.history = History()
        self.broken: dict[frozenset[str], float] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def is_bad(self) -> bool:
        """Whether things still go wrong."""
        return self.now < self.faults.stop_s and not self.is_calm

    def at(self, time_s: float, what: Callable[[], None]) -> None:
        """It happens then."""
        self._count += 1
        heapq.heappush(self._due, (time_s, self._count, what))

    def add(self, host: Host, start_s: float) -> None:
        """There is one machine more, and it starts then."""
        self.hosts[host.name] = host
        self.at(start_s, lambda: self.boot(host))

    def step(self) -> None:
        """The next thing happens."""
        self.now, _, what = heapq.heappop(self._due)
        self.num_events += 1
        what()

    def boot(self, host: Host) -> None:
        """The machine runs a new life, unless it runs one."""
        if host.machine is None:
            host.disk.settle(self.now)
            host.durable_at = self.now
            machine = host.machine = host.start(host, self.random.getrandbits(60))
            self._tick(host, machine)

    def _tick(self, host: Host, machine: Machine) -> None:
        if host.machine is machine:
            self.take(host, machine, None)
            self.at(self.now + self.tick_s * (0.9 + 0.2 * self.random.random()), lambda: self._tick(host, machine))

    def crash(self, host: Host, back_s: float | None) -> None:
        """The machine is down; if a time is given, it comes back after it."""
        host.disk.crash(self.now, self.random)
        host.machine = None
        if back_s is not None:
            self.at(self.now + back_s, lambda: self.boot(host))

    def take(self, host: Host, machine: Machine, message: Message | None) -> None:
        """A life takes in a message, or the time, as soon as it is not paused."""
        if host.machine is not machine:
            return
        if host.paused_until > self.now:
            self.at(host.paused_until, lambda: self.take(host, machine, message))
            return
        actions: Sequence[Action] = machine.on_event(message, self.now)
        if host.trainer is not None:
            actions = host.trainer.go_on(self._heard(host, actions))
            if host.trainer.has_left:
                self.crash(host, 4 * self.random.random())
        if isinstance(machine, Node):
            self._inherit(host, machine, message)
            self._promote(host, machine)
        for action in actions:
            self._act(host, machine, action)

    def _heard(self, host: Host, actions: Sequence[Action]) -> Sequence[Action]:
        for action in actions:
            if isinstance(action, Deliver) and isinstance(action.answer, Pushed):
                self.history.acknowledge(host.life, action.answer)
        return actions

    def _inherit(self, host: Host, node: Node, message: Message | None) -> None:
        """What a backup had of its own counts no more, once it has been given the primary's state; what that has does.

        A primary that was the backup before may have entries of which nobody has been told yet that they are certain.
        """
        held = node.holdings.get(message.shard) if isinstance(message, Install) else None
        if not isinstance(message, Install) or not isinstance(held, Backed) or held.shard is None:
            return
        if held.is_installed and held.shard.position == message.state.position:
            source = message.origin.member, message.origin.incarnation
            self.history.inherit(host.life, message.shard, source, message.state.position)

    def _promote(self, host: Host, node: Node) -> None:
        for index, held in node.holdings.items():
            if isinstance(held, Primary) and held.keepers.is_complete:
                self.history.promote((host.name, node.presence.incarnation), index)

    def _act(self, host: Host, machine: Machine, action: Action) -> None:
        match action:
            case Send() | Note():
                if isinstance(action, Send):
                    self._watch(host, action.message)
                if host.durable_at <= self.now:
                    self._let_out(host, action)
                else:
                    self.at(host.durable_at, lambda: self._after_write(host, machine, action))
            case Write():
                self._wait_for_disk(host)
                host.disk.append(action.log, record(action.line), host.durable_at)
                if self.is_bad and self.random.random() < self.faults.torn:
                    at = self.now + (host.durable_at - self.now) * self.random.random()
                    self.at(at, lambda: self._tear(host, machine))
            case Save():
                self._wait_for_disk(host)
                self.history.cuts[action.cut, action.shard] = action.state
            case Stop():
                self.crash(host, 0.5)
            case Deliver():
                pass

    def _wait_for_disk(self, host: Host) -> None:
        host.disk.settle(self.now)
        host.durable_at = max(self.now, host.durable_at) + 0.02 * self.random.random()

    def _watch(self, host: Host, message: Message) -> None:
        """Note who speaks as the first keeper of a shard."""
        machine = host.machine
        if isinstance(machine, Node) and isinstance(message, OF_THE_FIRST):
            self.history.answer(host.life, message.shard, machine.generation)

    def _tear(self, host: Host, machine: Machine) -> None:
        """A life ends while it writes."""
        if host.machine is machine:
            self.crash(host, 4 * self.random.random())

    def _after_write(self, host: Host, machine: Machine, action: Send | Note) -> None:
        if host.machine is machine:
            self._let_out(host, action)

    def _let_out(self, host: Host, action: Send | Note) -> None:
        """What waits for writes happens."""
        if isinstance(action, Send):
            self._transmit(host.name, action)
        elif action.is_certain:
            self.history.note(action.shard, action.position, action.entry)
        else:
            self.history.note_uncertain(host.life, action.shard, action.position, action.entry)

    def _transmit(self, source: str, action: Send) -> None:
        """A message is on its way, or lost."""
        faults, random = self.faults, self.random
        is_bad = self.is_bad
        if is_bad and (random.random() < faults.loss or self._is_broken(source, action.to)):
            return
        copies = 2 if is_bad and random.random() < faults.twice else 1
        for _ in range(copies):
            delay_s = 0.002 + 0.03 * random.random()
            if is_bad and random.random() < faults.slow:
                delay_s += 4 * random.random()
            self.at(self.now + delay_s, lambda: self._arrive(action))

    def _is_broken(self, source: str, target: str) -> bool:
        return bool(self.broken) and self.broken.get(frozenset((source, target)), 0.0) > self.now

    def _arrive(self, action: Send) -> None:
        host = self.hosts.get(action.to)
        if host is not None and host.machine is not None and action.life in {0, host.life[1]}:
            message = action.message
            if self._count % 16 == 0:
                message = from_plain(*to_plain(message))
            self.take(host, host.machine, message)
