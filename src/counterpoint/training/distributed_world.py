"""The ranks' fabrics: all ranks in this process, or one in each of many; and their number of compute threads."""

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

from counterpoint.errors import LaunchError, first_line
from counterpoint.fabric.fabric import Fabric
from counterpoint.fabric.local import LocalWorld
from counterpoint.fabric.rendezvous import Address, connect, parse_transport
from counterpoint.launchers.environment import RankEnvironment, read_job_key
from counterpoint.launchers.machine import read_topology
from counterpoint.launchers.ports import LOOPBACK
from counterpoint.launchers.rank_main import has_exited_rank
from counterpoint.launchers.variables import requested_threads
from counterpoint.world.cpu_affinity import place_ranks
from counterpoint.world.topology import Topology, format_count


@dataclass(frozen=True, slots=True)
class RankThreads:
    """The compute threads of a rank.

    Args:
        host: its host name.
        cpus: the hardware threads that it may use.
        threads: how many it computes with.
        is_requested: whether its user has asked for that many.
    """

    host: str
    cpus: tuple[int, ...]
    threads: int
    is_requested: bool


def configure_threads(fabric: Fabric, *, is_placed: bool) -> None:
    """Reduce the compute threads if the ranks of a host have more than there are cores; a note goes to standard error.

    Requested threads are kept, unless the ranks alone outnumber the cores. All ranks call it together.

    Args:
        fabric: this rank's fabric.
        is_placed: whether the launcher has set the threads.
    """
    local = RankThreads(socket.gethostname(), allowed_cpus(), torch.get_num_threads(), requested_threads() is not None)
    gathered: list[Any] = fabric.gather_values(
        "threads", [local.host, local.cpus, local.threads, local.is_requested], tuple(range(fabric.num_ranks))
    )
    if is_placed:
        return
    all_ranks = [RankThreads(host, tuple(cpus), threads, is_wanted) for host, cpus, threads, is_wanted in gathered]
    local_ranks = [rank for rank, rank_threads in enumerate(all_ranks) if rank_threads.host == local.host]
    cpus = {cpu for rank in local_ranks for cpu in all_ranks[rank].cpus}
    threads, note = recommend_threads(
        [all_ranks[rank] for rank in local_ranks], read_topology(Path("/"), cpus), os.cpu_count() or 1
    )
    if note:
        if threads < local.threads:
            torch.set_num_threads(threads)
        if fabric.rank == local_ranks[0]:
            sys.stderr.write(f"counterpoint: {note}\n")


def recommend_threads(ranks: Sequence[RankThreads], topology: Topology, num_cpus: int) -> tuple[int, str]:
    """Return how many threads each rank of a host should use, and a note; the note is empty if nothing is wrong.

    Args:
        ranks: those of the host.
        topology: the cores that any of them may use.
        num_cpus: hardware threads of the host, also those that these ranks may not use.

    Example:
        >>> from counterpoint.world.topology import Core
        >>> ranks = [RankThreads("a", (0, 1), 2, is_requested=False)] * 2
        >>> recommend_threads(ranks, Topology((Core((0,)), Core((1,)))), 2)
        (1, '2 ranks x 2 threads on 2 cores; setting 1 thread each to avoid oversubscription')
    """
    max_threads, num_cores = max(rank.threads for rank in ranks), topology.num_usable
    if sum(rank.threads for rank in ranks) <= num_cores:
        return max_threads, ""
    is_requested = any(rank.is_requested for rank in ranks)
    placement = place_ranks(topology, len(ranks), threads=max_threads if is_requested else None)
    threads = placement.ranks[0].threads
    note = placement.note or (
        f"{format_count(len(ranks), 'rank')} x {format_count(max_threads, 'thread')} on "
        f"{format_count(num_cores, 'core')}; setting {format_count(threads, 'thread')} each to avoid oversubscription"
    )
    cpus = sorted(cpu for core in topology.cores for cpu in core.cpus)
    if len(cpus) < num_cpus:
        numbers = ",".join(map(str, cpus))
        bound = f"they are bound to {len(cpus)} of {num_cpus} hardware threads ({numbers})"
        note += f"; {bound}: bind each rank to its own cores, or none"
    return threads, note


def allowed_cpus() -> tuple[int, ...]:
    """Return the hardware threads that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return tuple(range(os.cpu_count() or 1))
    return tuple(sorted(os.sched_getaffinity(0)))


T = TypeVar("T")


class FabricWorld(Protocol):
    """The fabrics of this process's ranks: one for each."""

    @property
    def fabrics(self) -> Sequence[Fabric]:
        """The fabrics of this process's ranks."""
        ...

    def run(self, work: Callable[[Fabric], T]) -> list[T]:
        """Return the result of ``work`` on each rank of this process."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class DistributedWorld:
    """This process's one rank among many processes.

    Args:
        fabric: its fabric; it stays open for the next world of this process, unless something failed.
        failures: the error that ended the ranks of this process; at most one, appended here.
    """

    def __init__(self, fabric: Fabric, failures: list[str]) -> None:
        self.fabrics: Sequence[Fabric] = (fabric,)
        self.failures = failures

    @property
    def has_failed(self) -> bool:
        """Whether the ranks have ended with an error."""
        return bool(self.failures)

    def run(self, work: Callable[[Fabric], T]) -> list[T]:
        """Return the result of ``work`` here; stop the other ranks if it fails."""
        try:
            return [work(self.fabrics[0])]
        except BaseException as error:
            self.stop(error)
            raise

    def stop(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed."""
        if not self.has_failed:
            self.failures.append(f"{type(error).__name__}: {first_line(error)}")
            self.fabrics[0].abort(self.failures[0])

    def close(self) -> None:
        """Close the connection if the ranks have failed; otherwise the next world uses it."""
        if self.has_failed:
            self.fabrics[0].close()


@cache
def connected_fabrics(environment: RankEnvironment) -> list[Fabric]:
    """Return the list of this process's connection: ranks connect once per job, but may train several models."""
    return []


@cache
def recorded_failures(environment: RankEnvironment) -> list[str]:
    """Return the list of the error that has ended the ranks of this process."""
    return []


def open_world(environment: RankEnvironment | None, num_ranks: int, timeout_s: float) -> FabricWorld:
    """Return the world that a launcher made, or one with all ranks in this process.

    Args:
        environment: what a launcher set for this process; None without a launcher.
        num_ranks: ranks of the plan, for a world in this process.
        timeout_s: the longest that a rank waits for another.

    Raises:
        LaunchError: this process only imports the script of its parent, or its ranks have ended.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise LaunchError(
            f"this is {multiprocessing.current_process().name}, which imports the script of the process that started "
            "it, and the script trains when it is imported; put the training under "
            "`if __name__ == '__main__':`"
        )
    if environment is None or environment.world_size == 1:
        return LocalWorld(num_ranks, timeout_s)
    fabrics, failures = connected_fabrics(environment), recorded_failures(environment)
    if failures:
        raise LaunchError(
            f"the ranks of this job have ended with an error, {failures[0]!r}; an error on one rank ends all of them, "
            "so these processes cannot train any more: start the ranks again"
        )
    if fabrics:
        return DistributedWorld(fabrics[0], failures)
    timeout_s = environment.timeout_s if environment.timeout_s is not None else timeout_s
    key, is_one_host = read_job_key(environment), environment.local_world_size == environment.world_size
    is_private = is_one_host and key is None  # ranks meet at a UNIX socket of their user
    address = Address(
        LOOPBACK if is_private else environment.master_addr,
        environment.master_port,
        environment.store_fd,
        store_owner="launcher" if environment.agent_keeps_store and not is_private else "rank 0",
        reserves_port=not environment.agent_keeps_store,
    )
    fabric = connect(
        environment.rank,
        environment.world_size,
        address,
        key=key,
        job=environment.job,
        timeout_s=timeout_s,
        transport=parse_transport(environment.transport),
        should_cancel=has_exited_rank,
    )
    atexit.register(fabric.close)
    fabrics.append(fabric)
    configure_threads(fabric, is_placed=environment.is_placed)
    return DistributedWorld(fabric, failures)


def sibling_world(world: FabricWorld, timeout_s: float) -> FabricWorld:
    """Return a world of the same ranks for a second model."""
    return world if isinstance(world, DistributedWorld) else LocalWorld(world.fabrics[0].num_ranks, timeout_s)


def has_remote_ranks(world: FabricWorld) -> bool:
    """Tell whether other processes have ranks, too."""
    return len(world.fabrics) < world.fabrics[0].num_ranks
