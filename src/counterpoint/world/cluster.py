"""The machines a program runs on, as the simulator sees them: devices, alike or not, and links by level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from counterpoint.errors import PlanError


@dataclass(frozen=True, slots=True)
class Link:
    """The way out of a rank: how long a message takes before its first byte arrives, and how fast the rest follows.

    The defaults are those of two processes of one host that talk over its loopback.

    Args:
        latency_s: of a message without any bytes.
        bytes_per_s: of a long one.
        is_copied: whether it is memory that both ends see, so that nothing carries a message but their own processors:
            one copies it in, the other one out, for half of its time each.
    """

    latency_s: float = 50e-6
    bytes_per_s: float = 1e9
    is_shared_memory: bool = False

    def seconds(self, num_bytes: float) -> float:
        """Return how long one message of so many bytes takes."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Device:
    """What a rank computes with. The defaults are those of one core of a laptop.

    Args:
        cost_per_s: how much block cost it works off in a second; floating point operations, if costs count those.
        memory_bytes: how much it can hold.
        memory_bytes_per_s: how fast an update reads and writes what it holds.
    """

    cost_per_s: float = 30e9
    memory_bytes: int = 8 * 2**30
    memory_bytes_per_s: float = 10e9


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a network: groups of the level below, ranks at the innermost one, joined by links of one kind.

    Args:
        name: what such a level is called, ``host`` or ``rack``.
        count: how many groups it joins.
        link: between two of them.
        is_shared: whether all ranks of a group below have one link out together, as those of a host its network card;
            else every rank has its own.
    """

    name: str
    count: int
    link: Link
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class TimeSlicing:
    """How ranks of a host go on where what each does before it waits for another takes less than a slice of time.

    Args:
        cores: so many ranks compute at a time; others wait until one of these does, first come first served.
        parts: how fast each of 1, 2, ... ranks of a host is in its turn, as a part of the speed of one alone: others
            have used its caches meanwhile. The last one counts for more ranks, too.
        message_s: for how long a message keeps its two ends together, beside copying it, when each comes to it from
            other work.
    """

    cores: int
    speed_fractions: tuple[float, ...] = ()
    message_s: float = 0.0

    def speed_fraction(self, num_ranks: int) -> float:
        """Return how fast each of so many ranks of a host is in its turn."""
        return self.speed_fractions[min(num_ranks, len(self.speed_fractions)) - 1] if self.speed_fractions else 1.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks with one device each, joined by links that may differ from level to level.

    Args:
        device: of each rank.
        link: between any two ranks, where there are no levels.
        speeds: how many times as fast as ``device`` each rank computes; empty where all are alike.
        levels: the innermost first, whose groups are hosts; rank r is in group r // count, and so on outwards.
        compute_contention: how fast each of 1, 2, ... ranks of one host computes while so many do, as a part of the speed of one
            alone; while more do, they share what as many as are listed have. Empty where nobody is in anybody's way.
        slow_links: ``(level, group, part)`` for each group of the level below, a rank at level 0 and a host at level 1,
            whose link of that level, out and in, has only that part of its speed. Without levels there is only 0.
        memory_contention: as ``compute_contention``, of ranks that go over memory, which is the host's where cores are their own.
        turns: how short pieces of work go on; None where they do as long ones.

    Example:
        >>> hosts = (Level("host", 2, Link(5e-6, 10e9)), Level("network", 2, Link(50e-6, 125e6), is_shared=True))
        >>> Cluster(speeds=(2.0, 1.0), levels=hosts).link_among((1, 2)).bytes_per_s
        125000000.0
    """

    device: Device = Device()
    link: Link = Link()
    speeds: tuple[float, ...] = ()
    levels: tuple[Level, ...] = ()
    compute_contention: tuple[float, ...] = ()
    slow_links: tuple[tuple[int, int, float], ...] = ()
    memory_contention: tuple[float, ...] = ()
    time_slicing: TimeSlicing | None = None

    def speed(self, rank: int) -> float:
        """Return how many times as fast as the device a rank computes; ranks that nothing is said of are as fast."""
        return self.speeds[rank] if rank < len(self.speeds) else 1.0

    def host(self, rank: int) -> int:
        """Return the host of a rank; without levels all are on one."""
        return rank // self.levels[0].count if self.levels else 0

    def level_among(self, ranks: Sequence[int]) -> int:
        """Return the innermost level that joins all of these ranks; -1 without levels."""
        width = 1
        for at, level in enumerate(self.levels):
            width *= level.count
            if len({rank // width for rank in ranks}) == 1:
                return at
        return len(self.levels) - 1

    def link_among(self, ranks: Sequence[int]) -> Link:
        """Return what a message between any of these ranks finds: the way of their level, as slow as its worst part."""
        level = self.level_among(ranks)
        if level < 1:
            return self.link_at(0, ranks)
        links = [self.link_at(at, ranks) for at in range(1, level + 1)]
        return Link(links[-1].latency_s, min(link.bytes_per_s for link in links), links[-1].is_shared_memory)

    def link_at(self, level: int, ranks: Sequence[int]) -> Link:
        """Return a level's link as it is for these ranks: as slow as that of the slowest of their groups."""
        link = self.levels[level].link if self.levels else self.link
        groups = {self.group(rank, level) for rank in ranks} if self.slow_links else set()
        slow = [part for at, group, part in self.slow_links if at == level and group in groups]
        return replace(link, bytes_per_s=link.bytes_per_s * min(slow)) if slow else link

    def group(self, rank: int, level: int) -> int:
        """Return which group of the level below a rank is in: itself at level 0, its host at level 1."""
        return rank // math.prod(below.count for below in self.levels[:level])

    def shared_levels(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the levels on the way between any of these ranks at which all ranks of a group share its link."""
        return tuple(at for at in range(1, self.level_among(ranks) + 1) if self.levels[at].is_shared)

    def contended_compute_fraction(self, num_computing: float) -> float:
        """Return how fast each rank of a host computes while so many do, as a part of the speed of one alone.

        One that computes half of the time counts half; between two whole numbers the part falls evenly.
        """
        return _interpolate_fraction(self.compute_contention, num_computing)

    def contended_memory_fraction(self, num_ranks: float) -> float:
        """Return how fast each rank of a host goes over memory while so many do, see :meth:`crowded`."""
        return _interpolate_fraction(self.memory_contention, num_ranks)

    @property
    def num_ranks(self) -> int:
        """How many ranks the levels have; 0 without levels, where there may be any number."""
        return math.prod(level.count for level in self.levels) if self.levels else 0

    def require_ranks(self, num_ranks: int) -> None:
        """Check that there is a place for so many ranks; fewer than there are places have the first ones.

        Raises:
            PlanError: there is not; the message says how many there are at which level.
        """
        if self.levels and num_ranks > self.num_ranks:
            counts = ", ".join(f"{level.name}={level.count}" for level in self.levels)
            raise PlanError(
                f"{num_ranks} ranks do not fit into a cluster of {self.num_ranks} ({counts}); take as many ranks or "
                "fewer, or give a level a larger count"
            )


def _interpolate_fraction(fractions: tuple[float, ...], number: float) -> float:
    """Return what part of its speed each has among so many; between two whole numbers the part falls evenly."""
    if not fractions or number <= 1:
        return fractions[0] if fractions and number == 1 else 1.0
    if number >= len(fractions):
        return fractions[-1] * len(fractions) / number
    below = int(number)
    return fractions[below - 1] - (fractions[below - 1] - fractions[below]) * (number - below)
