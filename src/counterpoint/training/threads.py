"""How many threads the ranks of a host compute with, where their launcher has not seen to it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from counterpoint.fabric.fabric import Fabric
from counterpoint.launchers.machine import read_topology
from counterpoint.launchers.variables import threads_wanted
from counterpoint.world.placement import place
from counterpoint.world.topology import Topology, counted


@dataclass(frozen=True, slots=True)
class Threads:
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
    is_wanted: bool


def settle_threads(fabric: Fabric, *, is_placed: bool) -> None:
    """Where ranks of a host have more threads than cores, they have fewer now, and standard error says so.

    Threads that were asked for stay, unless ranks alone outnumber the cores. All ranks call it together.

    Args:
        fabric: the way to the others.
        is_placed: whether the launcher has done so.
    """
    mine = Threads(socket.gethostname(), allowed_cpus(), torch.get_num_threads(), threads_wanted() is not None)
    told: list[Any] = fabric.gather_values(
        "threads", [mine.host, mine.cpus, mine.threads, mine.is_wanted], tuple(range(fabric.num_ranks))
    )
    if is_placed:
        return
    all_ranks = [Threads(host, tuple(cpus), threads, is_wanted) for host, cpus, threads, is_wanted in told]
    here = [rank for rank, one in enumerate(all_ranks) if one.host == mine.host]
    cpus = {cpu for rank in here for cpu in all_ranks[rank].cpus}
    threads, note = advice([all_ranks[rank] for rank in here], read_topology(Path("/"), cpus), os.cpu_count() or 1)
    if note:
        if threads < mine.threads:
            torch.set_num_threads(threads)
        if fabric.rank == here[0]:
            sys.stderr.write(f"counterpoint: {note}\n")


def advice(ranks: Sequence[Threads], topology: Topology, num_cpus: int) -> tuple[int, str]:
    """Return with how many threads each rank of a host should compute, and what to say; nothing where all is well.

    Args:
        ranks: those of the host.
        topology: the cores that any of them may use.
        num_cpus: hyperthreads of the host, whoever may use them.

    Example:
        >>> from counterpoint.world.topology import Core
        >>> ranks = [Threads("a", (0, 1), 2, is_wanted=False)] * 2
        >>> advice(ranks, Topology((Core((0,)), Core((1,)))), 2)
        (1, '2 ranks x 2 threads on 2 cores; setting 1 thread each, so that they need not take turns')
    """
    most, usable = max(one.threads for one in ranks), topology.num_usable
    if sum(one.threads for one in ranks) <= usable:
        return most, ""
    wanted = any(one.is_wanted for one in ranks)
    placement = place(topology, len(ranks), threads=most if wanted else None)
    threads = placement.places[0].threads
    note = placement.note or (
        f"{counted(len(ranks), 'rank')} x {counted(most, 'thread')} on {counted(usable, 'core')}; setting "
        f"{counted(threads, 'thread')} each, so that they need not take turns"
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
