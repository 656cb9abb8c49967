"""The processors of one host that this process may use, with the cores, NUMA nodes and packages that they share."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core.

    Args:
        cpus: numbers of its usable hyperthreads, at least one.
        node: its NUMA node.
        package: its socket.
    """

    cpus: tuple[int, ...]
    node: int = 0
    package: int = 0


@dataclass(frozen=True, slots=True)
class Topology:
    """The cores that a process may use.

    Args:
        cores: sorted by their first hyperthread, without those excluded by a cpuset or an affinity mask.
        quota_cpus: CPU seconds per second that the control group allows; None for no limit.

    Example:
        >>> topology = Topology((Core((0, 2)), Core((1, 3))), quota_cpus=1.5)
        >>> topology.num_usable, topology.nodes
        (1, {0: (Core(cpus=(0, 2), node=0, package=0), Core(cpus=(1, 3), node=0, package=0))})
    """

    cores: tuple[Core, ...]
    quota_cpus: float | None = None

    @property
    def num_usable(self) -> int:
        """Number of threads that can compute at the same time without sharing a core, at least 1."""
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
        >>> format_count(1, "core"), format_count(2, "core")
        ('1 core', '2 cores')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
