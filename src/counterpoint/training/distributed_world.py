"""How many threads the ranks of a host compute with, where their launcher has not seen to it.

Where a run's ranks are: in this process, or one in each of many.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from counterpoint.errors import LaunchError
from counterpoint.fabric.fabric import Fabric
from counterpoint.fabric.local import LocalWorld
from counterpoint.fabric.rendezvous import Address, connect, parse_transport
from counterpoint.launchers.environment import RankEnvironment, check_key, key_fingerprint
from counterpoint.launchers.machine import read_topology
from counterpoint.launchers.variables import requested_threads
from counterpoint.world.cpu_affinity import place_ranks
from counterpoint.world.topology import Topology, format_count


@dataclass(frozen=True, slots=True)
class RankThreads:
    """What a rank computes with.

    Args:
        host: where it runs.
        cpus: the hyperthreads that it may use.
        threads: how many it computes with.
        is_wanted: whether its user has asked for that many.
    """

    host: str
    cpus: tuple[int, ...]
    threads: int
    is_requested: bool


def configure_threads(fabric: Fabric, *, is_placed: bool) -> None:
    """Where ranks of a host have more threads than cores, they have fewer now, and standard error says so.

    Threads that were asked for stay, unless ranks alone outnumber the cores. All ranks call it together.

    Args:
        fabric: the way to the others.
        is_placed: whether the launcher has done so.
    """
    mine = RankThreads(socket.gethostname(), allowed_cpus(), torch.get_num_threads(), requested_threads() is not None)
    told: list[Any] = fabric.gather_values(
        "threads", [mine.host, mine.cpus, mine.threads, mine.is_requested], tuple(range(fabric.num_ranks))
    )
    if is_placed:
        return
    all_ranks = [RankThreads(host, tuple(cpus), threads, is_wanted) for host, cpus, threads, is_wanted in told]
    here = [rank for rank, one in enumerate(all_ranks) if one.host == mine.host]
    cpus = {cpu for rank in here for cpu in all_ranks[rank].cpus}
    threads, note = recommend_threads(
        [all_ranks[rank] for rank in here], read_topology(Path("/"), cpus), os.cpu_count() or 1
    )
    if note:
        if threads < mine.threads:
            torch.set_num_threads(threads)
        if fabric.rank == here[0]:
            sys.stderr.write(f"counterpoint: {note}\n")


def recommend_threads(ranks: Sequence[RankThreads], topology: Topology, num_cpus: int) -> tuple[int, str]:
    """Return with how many threads each rank of a host should compute, and what to say; nothing where all is well.

    Args:
        ranks: those of the host.
        topology: the cores that any of them may use.
        num_cpus: hyperthreads of the host, whoever may use them.

    Example:
        >>> from counterpoint.world.topology import Core
        >>> ranks = [RankThreads("a", (0, 1), 2, is_requested=False)] * 2
        >>> recommend_threads(ranks, Topology((Core((0,)), Core((1,)))), 2)
        (1, '2 ranks x 2 threads on 2 cores; setting 1 thread each, so that they need not take turns')
    """
    most, usable = max(one.threads for one in ranks), topology.num_usable
    if sum(one.threads for one in ranks) <= usable:
        return most, ""
    wanted = any(one.is_requested for one in ranks)
    placement = place_ranks(topology, len(ranks), threads=most if wanted else None)
    threads = placement.ranks[0].threads
    note = placement.note or (
        f"{format_count(len(ranks), 'rank')} x {format_count(most, 'thread')} on {format_count(usable, 'core')}; setting "
        f"{format_count(threads, 'thread')} each, so that they need not take turns"
    )
    cpus = sorted(cpu for core in topology.cores for cpu in core.cpus)
    if len(cpus) < num_cpus:
        numbers = ",".join(map(str, cpus))
        bound = f"bound them to {len(cpus)} of {num_cpus} hyperthreads ({numbers})"
        note += f"; whoever started them {bound}: bind each rank to cores of its own, or none"
    return threads, note


def allowed_cpus() -> tuple[int, ...]:
    """Return the hyperthreads that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return tuple(range(os.cpu_count() or 1))
    return tuple(sorted(os.sched_getaffinity(0)))


T = TypeVar("T")


class FabricWorld(Protocol):
    """Where ranks run: one fabric for each rank of this process."""

    @property
    def fabrics(self) -> Sequence[Fabric]:
        """The fabrics of this process's ranks."""
        ...

    def run(self, work: Callable[[Fabric], T]) -> list[T]:
        """Return what ``work`` returns on each rank of this process."""
        ...

    def close(self) -> None:
        """Leave the world."""
        ...


class DistributedWorld:
    """This process's one rank among many processes.

    Args:
        fabric: its way to the others; it stays open for the next world of this process, unless something failed.
        failures: what ended the ranks of this process; at most one, noted here.
    """

    def __init__(self, fabric: Fabric, failures: list[str]) -> None:
        self.fabrics: Sequence[Fabric] = (fabric,)
        self.failures = failures

    @property
    def has_failed(self) -> bool:
        """Whether the ranks have ended with an error."""
        return bool(self.failures)

    def run(self, work: Callable[[Fabric], T]) -> list[T]:
        """Return what ``work`` returns here; tell the other ranks if it fails."""
        try:
            return [work(self.fabrics[0])]
        except BaseException as error:
            self.stop(error)
            raise

    def stop(self, error: BaseException) -> None:
        """Tell the other ranks that this one cannot go on."""
        if not self.has_failed:
            self.failures.append(f"{type(error).__name__}: {error}".splitlines()[0])
            self.fabrics[0].abort(self.failures[0])

    def close(self) -> None:
        """Leave the world."""
        if self.has_failed:
            self.fabrics[0].close()


@cache
def connected_fabrics(environment: RankEnvironment) -> list[Fabric]:
    """Return this process's connection, if it has one: ranks meet once per job, but may train several models."""
    return []


@cache
def recorded_failures(environment: RankEnvironment) -> list[str]:
    """Return what has ended the ranks that met in this process."""
    return []


def open_world(environment: RankEnvironment | None, num_ranks: int, timeout_s: float) -> FabricWorld:
    """Return the world a launcher made, or one with all ranks in this process.

    Args:
        environment: what a launcher told this process; None when none started it.
        num_ranks: ranks of the plan, for a world in this process.
        deadline_s: the longest that a rank waits for another.

    Raises:
        LaunchError: this process only imports the script of the one that started it, or its ranks have ended.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise LaunchError(
            f"this is {multiprocessing.current_process().name}, which imports the script of the process that started "
            "it, and the script trains as soon as it is imported; put what it does under "
            "`if __name__ == '__main__':`"
        )
    if environment is None or environment.world_size == 1:
        return LocalWorld(num_ranks, timeout_s)
    known, failures = connected_fabrics(environment), recorded_failures(environment)
    if failures:
        raise LaunchError(
            f"the ranks of this job have ended with an error, {failures[0]!r}; an error on one rank ends all of them, "
            "so that nothing more can be trained in these processes: start the ranks again"
        )
    if known:
        return DistributedWorld(known[0], failures)
    patience = environment.timeout_s if environment.timeout_s is not None else timeout_s
    address = Address(
        environment.master_addr,
        environment.master_port,
        environment.store_fd,
        store_owner="launcher" if environment.agent_keeps_store else "rank 0",
    )
    fabric = connect(
        environment.rank,
        environment.world_size,
        address,
        job=environment.job,
        timeout_s=patience,
        transport=parse_transport(environment.transport),
        attributes={"job key": key_fingerprint(environment.key_file)},
    )
    atexit.register(fabric.close)
    check_key(environment.key_file)  # after the meeting: where only some hosts have it, all ranks know which
    known.append(fabric)
    configure_threads(fabric, is_placed=environment.is_placed)
    return DistributedWorld(fabric, failures)


def sibling_world(world: FabricWorld, timeout_s: float) -> FabricWorld:
    """Return a world of the same ranks for another team beside the one that has this world."""
    return world if isinstance(world, DistributedWorld) else LocalWorld(world.fabrics[0].num_ranks, timeout_s)


def has_remote_ranks(world: FabricWorld) -> bool:
    """Tell whether other processes have ranks, too."""
    return len(world.fabrics) < world.fabrics[0].num_ranks
