"""The processors of one host as far as this process may use them: which share a core, a memory, a package."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core.

    Args:
        cpus: the numbers of its hyperthreads that may be used, at least one.
        node: the NUMA node whose memory is near.
        package: the socket that it is in.
    """

    cpus: tuple[int, ...]
    node: int = 0
    package: int = 0


@dataclass(frozen=True, slots=True)
class Topology:
    """The cores that a process may use.

    Args:
        cores: in the order of their first hyperthread, without those that a cpuset or an affinity keeps from it.
        quota_cpus: seconds of computing per second that its control group allows; None for no limit.

    Example:
        >>> topology = Topology((Core((0, 2)), Core((1, 3))), quota_cpus=1.5)
        >>> topology.num_usable, topology.nodes
        (1, {0: (Core(cpus=(0, 2), node=0, package=0), Core(cpus=(1, 3), node=0, package=0))})
    """

    cores: tuple[Core, ...]
    quota_cpus: float | None = None

    @property
    def num_usable(self) -> int:
        """How many threads can compute at once without taking turns on a core: at least 1."""
        limit = len(self.cores) if self.quota_cpus is None else math.floor(self.quota_cpus)
        return max(1, min(len(self.cores), limit))

    @property
    def nodes(self) -> dict[int, tuple[Core, ...]]:
        """The cores of each NUMA node that has any."""
        numbers = sorted({core.node for core in self.cores})
        return {number: tuple(core for core in self.cores if core.node == number) for number in numbers}

    def __str__(self) -> str:
        cpus, packages = sum(len(core.cpus) for core in self.cores), len({core.package for core in self.cores})
        parts = [f"{format_count(len(self.cores), 'core')} ({format_count(cpus, 'hyperthread')})"]
        parts += [f"{format_count(len(self.nodes), 'NUMA node')}, {format_count(packages, 'package')}"]
        if self.quota_cpus is not None:
            parts += [f"a quota of {self.quota_cpus:g} cores"]
        return ", ".join(parts)


def format_count(count: int, noun: str) -> str:
    """Return a number with its noun.

    Example:
        >>> counted(1, "core"), counted(2, "core")
        ('1 core', '2 cores')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
