"""One seed: a job, its machines, their bad days, and the verdict on what came out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch

from counterpoint.errors import CounterpointError
from counterpoint.server.actions import COORDINATOR
from counterpoint.server.client import Client
from counterpoint.server.coordinator import LOG, Coordinator
from counterpoint.server.holding import log_of
from counterpoint.server.job import Asp, Bsp, Budget, Consistency, Job, Patience, Ssp, Work
from counterpoint.server.log import read_log
from counterpoint.server.node import Node
from counterpoint.server.simulator.checks import verdict
from counterpoint.server.simulator.faults import Faults, draw
from counterpoint.server.simulator.history import History
from counterpoint.server.simulator.trainer import Trainer
from counterpoint.server.simulator.world import Host, World

PATIENCE = Patience(beat_s=0.5, silence_s=3.0, lease_s=6.0, retry_s=1.0)
BUDGET = Budget(failures=1000, preemptions=10_000)
END_S = 200.0
"""Virtual time after the last fault within which a job must be done."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one seed came to.

    Attributes:
        seed: which.
        job: what was done.
        faults: what went wrong.
        events: how much happened.
        seconds: of virtual time.
        violations: what must not be, and was.
        history: all that was seen.
    """

    seed: int
    job: Job
    faults: Faults
    events: int
    seconds: float
    violations: tuple[str, ...]
    history: History


def draw_job(random: Random) -> Job:
    """Return a small job: a way of counting, one to three servers, some data."""
    step = random.choice((2, 3, 4))
    consistency: Consistency = random.choice((Bsp(step), Ssp(random.randrange(3)), Asp()))
    is_bsp = isinstance(consistency, Bsp)
    task = 1 if is_bsp else random.choice((1, 2, 3))
    work = Work(step * random.choice((2, 3)), random.choice((1, 2)), task, step if is_bsp else 0)
    return Job("j" * random.randrange(1, 4), consistency, random.choice((1, 2, 3)), work, BUDGET, PATIENCE)


def simulate(seed: int, *, faults: Faults | None = None, draw_job: Callable[[Random], Job] = draw_job) -> Outcome:
    """Return what a seed comes to.

    Args:
        seed: of everything that is left to chance.
        faults: what goes wrong; drawn from the seed, if not given.
        draw_job: makes the job.
    """
    with torch.inference_mode():  # tensors of a few numbers are made by the thousand: nothing is kept for a backward
        return _simulated(seed, faults, draw_job)


def _simulated(seed: int, faults: Faults | None, draw_job: Callable[[Random], Job]) -> Outcome:
    random = Random(seed)
    job = draw_job(random)
    bad = draw(random) if faults is None else faults
    world = World(random, bad, tick_s=0.5)
    cast = _Cast(world, job)
    cast.enter()
    try:
        while not cast.is_done and world.now < bad.stop_s + END_S and not world.history.violations:
            world.step()
    except CounterpointError as error:
        world.history.violations.append(f"a machine stopped at {world.now:.1f} s: {error}")
    found = [*world.history.violations, *(host.trainer.error for host in cast.workers if host.trainer)]
    if not any(found):
        book = cast.book
        found += [cast.where()] if book is None or not cast.is_done else verdict(job, book, cast.nodes, world.history)
    return Outcome(seed, job, bad, world.num_events, world.now, tuple(filter(None, found)), world.history)


class _Cast:
    """The machines of a job, and what befalls them."""

    def __init__(self, world: World, job: Job) -> None:
        self.world, self.job = world, job
        self.random = world.random
        self.coordinator = Host(COORDINATOR, self._coordinator)
        self.servers = [Host(f"server-{index}", self._node) for index in range(job.num_servers)]
        self.workers = [Host(f"worker-{index}", self._client) for index in range(self.random.randrange(1, 4))]
        self.trouble = self.random.choice((0.0, 0.1))

    def enter(self) -> None:
        """Everybody starts, and their troubles begin."""
        spare = [Host(f"server-{self.job.num_servers}", self._node)] if self.job.num_servers > 1 else []
        self.servers += spare
        for host in (self.coordinator, *self.servers):
            self.world.add(host, self.random.random())
        for host in self.workers:
            self.world.add(host, 5 * self.random.random())
        faults = self.world.faults
        for every_s, what in (
            (faults.crash_every_s, self._crash),
            (faults.pause_every_s, self._pause),
            (faults.cut_every_s, self._break),
        ):
            if every_s:
                self._again(every_s, what)

    def _coordinator(self, host: Host, _token: int) -> Coordinator:
        raw = host.disk.read(LOG)
        lines, size = read_log(raw)
        host.disk.truncate(LOG, size)
        return Coordinator(self.job, lines, self.world.now)

    def _node(self, host: Host, token: int) -> Node:
        logs = {}
        for shard in range(self.job.num_shards):
            lines, size = read_log(host.disk.read(log_of(shard)))
            host.disk.truncate(log_of(shard), size)
            for position, entry in enumerate(lines):
                self.world.history.note(shard, position, entry)
            if lines:
                logs[shard] = lines
        return Node(self.job, host.name, token, logs=logs)

    def _client(self, host: Host, token: int) -> Client:
        client = Client(self.job, host.name, token)
        host.trainer = Trainer(client, self.random, self.trouble if self.world.is_bad else 0.0)
        return client

    @property
    def book(self) -> Coordinator | None:
        """The coordinator, if it is up."""
        return self.coordinator.machine if isinstance(self.coordinator.machine, Coordinator) else None

    @property
    def nodes(self) -> list[Node]:
        """The servers that are up."""
        return [host.machine for host in self.servers if isinstance(host.machine, Node)]

    @property
    def is_done(self) -> bool:
        """Whether all data is counted, everybody is well, and the servers agree on who they are."""
        machine = self.coordinator.machine
        if not isinstance(machine, Coordinator):
            return False
        book = machine.book
        if book.queue.todo or book.queue.doing or book.cut is not None or not book.keepers:
            return False
        self.world.is_calm = True
        up = {node.name for node in self.nodes if node.generation == book.generation}
        return all(one.is_complete and {one.primary, one.backup} - {""} <= up for one in book.keepers)

    def where(self) -> str:
        """Say how far it came."""
        if self.book is None:
            return "no progress: there is no coordinator"
        queue = self.book.book.queue
        errors = [host.trainer.error for host in self.workers if host.trainer and host.trainer.error]
        return (
            f"no progress: {len(queue.done)} tasks done, {len(queue.doing)} given, {len(queue.todo)} left, "
            f"keepers {self.book.book.keepers}, cut {self.book.book.cut} after {self.world.now:.0f} s {errors}"
        )

    def _again(self, every_s: float, what: Callable[[], None]) -> None:
        def now() -> None:
            if self.world.is_bad:
                what()
                self._again(every_s, what)

        self.world.at(self.world.now + self.random.expovariate(1 / every_s), now)

    def _crash(self) -> None:
        host = self.random.choice([self.coordinator, *self.servers, *self.workers])
        if host.machine is None or (isinstance(host.machine, Node) and not self._is_spare(host)):
            return
        self.world.crash(host, 0.2 + 6 * self.random.random())

    def _is_spare(self, host: Host) -> bool:
        """Tell whether another server has everything that this one has."""
        coordinator = self.book
        if self.job.num_servers == 1:
            return True
        if coordinator is None or not coordinator.book.keepers:
            return False
        up = {one.life for one in self.servers if one.machine is not None}
        lives = {name: life.joined.incarnation for name, life in coordinator.book.lives.items()}
        for keepers in coordinator.book.keepers:
            if host.name in {keepers.primary, keepers.backup, keepers.former}:
                other = keepers.backup if host.name == keepers.primary else keepers.primary
                if not keepers.is_complete or (other, lives.get(other, 0)) not in up:
                    return False
        return True

    def _pause(self) -> None:
        host = self.random.choice([self.coordinator, *self.servers, *self.workers])
        host.paused_until = self.world.now + self.random.choice((0.5, 2.0, 8.0)) * self.random.random()

    def _break(self) -> None:
        names = [host.name for host in (self.coordinator, *self.servers, *self.workers)]
        first, second = self.random.sample(names, 2)
        self.world.broken[frozenset((first, second))] = self.world.now + 10 * self.random.random()
