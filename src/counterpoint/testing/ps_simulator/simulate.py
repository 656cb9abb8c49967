"""Simulate one seed: a random job, its machines, their faults, and the checks of the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch

from counterpoint.errors import CounterpointError
from counterpoint.ps.actions import COORDINATOR
from counterpoint.ps.client import PsClient
from counterpoint.ps.consistency import Asp, Bsp, Consistency, Ssp
from counterpoint.ps.coordinator import COORDINATOR_LOG, Coordinator
from counterpoint.ps.job_config import DataConfig, JobConfig, RetryPolicy, Timeouts
from counterpoint.ps.replication import shard_log_name
from counterpoint.ps.server import ServerNode
from counterpoint.ps.write_ahead_log import decode_log
from counterpoint.testing.ps_simulator.checks import check_run
from counterpoint.testing.ps_simulator.cluster import (
    FaultRates,
    ObservedHistory,
    SimulatedCluster,
    SimulatedHost,
    draw_faults,
)
from counterpoint.testing.ps_simulator.simulated_worker import SimulatedWorker

TIMEOUTS = Timeouts(heartbeat_s=0.5, failure_timeout_s=3.0, lease_s=6.0, resend_s=1.0)
RETRY_POLICY = RetryPolicy(max_failures=1000, max_preemptions=10_000)
DRAIN_TIMEOUT_S = 200.0
"""Simulated time after the last fault within which a job must finish."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Result of one seed.

    Attributes:
        seed: of all random choices.
        job: that was simulated.
        faults: fault rates.
        events: number of events.
        seconds: simulated time.
        violations: violated invariants.
        history: what was observed.
    """

    seed: int
    job: JobConfig
    faults: FaultRates
    events: int
    seconds: float
    violations: tuple[str, ...]
    history: ObservedHistory


def draw_job(random: Random) -> JobConfig:
    """Return a small random job: consistency model, one to three servers, some data."""
    step = random.choice((2, 3, 4))
    consistency: Consistency = random.choice((Bsp(step), Ssp(random.randrange(3)), Asp()))
    is_bsp = isinstance(consistency, Bsp)
    task = 1 if is_bsp else random.choice((1, 2, 3))
    work = DataConfig(step * random.choice((2, 3)), random.choice((1, 2)), task, step if is_bsp else 0)
    return JobConfig("j" * random.randrange(1, 4), consistency, random.choice((1, 2, 3)), work, RETRY_POLICY, TIMEOUTS)


def simulate(
    seed: int, *, faults: FaultRates | None = None, draw_job: Callable[[Random], JobConfig] = draw_job
) -> SimulationResult:
    """Return the result of a seed.

    Args:
        seed: of all random choices.
        faults: fault rates; drawn from the seed if not given.
        draw_job: returns the job.
    """
    with torch.inference_mode():  # thousands of tiny tensors, none of which needs autograd
        return _simulate(seed, faults, draw_job)


def _simulate(seed: int, faults: FaultRates | None, draw_job: Callable[[Random], JobConfig]) -> SimulationResult:
    random = Random(seed)
    job = draw_job(random)
    bad = draw_faults(random) if faults is None else faults
    world = SimulatedCluster(random, bad, tick_s=0.5)
    cast = _SimulatedJob(world, job)
    cast.start()
    try:
        while not cast.is_finished and world.now < bad.stop_s + DRAIN_TIMEOUT_S and not world.history.violations:
            world.step()
    except CounterpointError as error:
        world.history.violations.append(f"a machine failed at {world.now:.1f} s: {error}")
    violations = [*world.history.violations, *(host.worker.error for host in cast.workers if host.worker)]
    if not any(violations):
        book = cast.running_coordinator
        violations += (
            [cast.describe_progress()]
            if book is None or not cast.is_finished
            else check_run(job, book, cast.nodes, world.history)
        )
    return SimulationResult(seed, job, bad, world.num_events, world.now, tuple(filter(None, violations)), world.history)


class _SimulatedJob:
    """The machines of a job, and the faults that are injected."""

    def __init__(self, world: SimulatedCluster, job: JobConfig) -> None:
        self.cluster, self.job = world, job
        self.random = world.random
        self.coordinator = SimulatedHost(COORDINATOR, self._coordinator)
        self.servers = [SimulatedHost(f"server-{index}", self._node) for index in range(job.num_servers)]
        self.workers = [SimulatedHost(f"worker-{index}", self._client) for index in range(self.random.randrange(1, 4))]
        self.failure_probability = self.random.choice((0.0, 0.1))

    def start(self) -> None:
        """Start all machines, and schedule the faults."""
        spare = [SimulatedHost(f"server-{self.job.num_servers}", self._node)] if self.job.num_servers > 1 else []
        self.servers += spare
        for host in (self.coordinator, *self.servers):
            self.cluster.add_host(host, self.random.random())
        for host in self.workers:
            self.cluster.add_host(host, 5 * self.random.random())
        faults = self.cluster.faults
        for every_s, what in (
            (faults.crash_every_s, self._crash),
            (faults.pause_every_s, self._pause),
            (faults.partition_every_s, self._break_link),
        ):
            if every_s:
                self._repeat(every_s, what)

    def _coordinator(self, host: SimulatedHost, _token: int) -> Coordinator:
        raw = host.disk.read(COORDINATOR_LOG)
        records, size = decode_log(raw)
        host.disk.truncate(COORDINATOR_LOG, size)
        return Coordinator(self.job, records, self.cluster.now)

    def _node(self, host: SimulatedHost, token: int) -> ServerNode:
        logs = {}
        for shard in range(self.job.num_shards):
            records, size = decode_log(host.disk.read(shard_log_name(shard)))
            host.disk.truncate(shard_log_name(shard), size)
            for position, entry in enumerate(records):
                self.cluster.history.add_entry(shard, position, entry)
            if records:
                logs[shard] = records
        return ServerNode(self.job, host.name, token, logs=logs)

    def _client(self, host: SimulatedHost, token: int) -> PsClient:
        client = PsClient(self.job, host.name, token)
        host.worker = SimulatedWorker(client, self.random, self.failure_probability if self.cluster.has_faults else 0.0)
        return client

    @property
    def running_coordinator(self) -> Coordinator | None:
        """The coordinator, if it is up."""
        return self.coordinator.machine if isinstance(self.coordinator.machine, Coordinator) else None

    @property
    def nodes(self) -> list[ServerNode]:
        """Servers that are up."""
        return [host.machine for host in self.servers if isinstance(host.machine, ServerNode)]

    @property
    def is_finished(self) -> bool:
        """Whether all data has been processed, and all replicas are ready and agree on the view."""
        machine = self.coordinator.machine
        if not isinstance(machine, Coordinator):
            return False
        book = machine.state
        if book.tasks.todo or book.tasks.doing or book.snapshot is not None or not book.replicas:
            return False
        self.cluster.is_healed = True
        up = {node.name for node in self.nodes if node.generation == book.generation}
        return all(
            replicas.is_backup_ready and {replicas.primary, replicas.backup} - {""} <= up for replicas in book.replicas
        )

    def describe_progress(self) -> str:
        """Return a description of the progress, for errors."""
        if self.running_coordinator is None:
            return "no progress: there is no coordinator"
        queue = self.running_coordinator.state.tasks
        errors = [host.worker.error for host in self.workers if host.worker and host.worker.error]
        return (
            f"no progress: {len(queue.done)} tasks done, {len(queue.doing)} given, {len(queue.todo)} left, "
            f"replicas {self.running_coordinator.state.replicas}, snapshot {self.running_coordinator.state.snapshot} "
            f"after {self.cluster.now:.0f} s {errors}"
        )

    def _repeat(self, every_s: float, what: Callable[[], None]) -> None:
        def now() -> None:
            if self.cluster.has_faults:
                what()
                self._repeat(every_s, what)

        self.cluster.schedule(self.cluster.now + self.random.expovariate(1 / every_s), now)

    def _crash(self) -> None:
        host = self.random.choice([self.coordinator, *self.servers, *self.workers])
        if host.machine is None or (isinstance(host.machine, ServerNode) and not self._is_redundant(host)):
            return
        self.cluster.crash(host, 0.2 + 6 * self.random.random())

    def _is_redundant(self, host: SimulatedHost) -> bool:
        """Tell whether another live server holds everything that this one holds."""
        coordinator = self.running_coordinator
        if self.job.num_servers == 1:
            return True
        if coordinator is None or not coordinator.state.replicas:
            return False
        up = {one.identity for one in self.servers if one.machine is not None}
        incarnations = {name: member.joined.incarnation for name, member in coordinator.state.members.items()}
        for replicas in coordinator.state.replicas:
            if host.name in {replicas.primary, replicas.backup, replicas.former_replica}:
                other = replicas.backup if host.name == replicas.primary else replicas.primary
                if not replicas.is_backup_ready or (other, incarnations.get(other, 0)) not in up:
                    return False
        return True

    def _pause(self) -> None:
        host = self.random.choice([self.coordinator, *self.servers, *self.workers])
        host.paused_until = self.cluster.now + self.random.choice((0.5, 2.0, 8.0)) * self.random.random()

    def _break_link(self) -> None:
        names = [host.name for host in (self.coordinator, *self.servers, *self.workers)]
        first, second = self.random.sample(names, 2)
        self.cluster.broken_links[frozenset((first, second))] = self.cluster.now + 10 * self.random.random()
