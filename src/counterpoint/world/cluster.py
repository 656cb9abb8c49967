"""Clusters as the simulator sees them: devices, equal or not, and the links of each network level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from counterpoint.errors import PlanError


@dataclass(frozen=True, slots=True)
class Link:
    """A link: latency until the first byte of a message arrives, and bandwidth for the rest.

    The defaults are those of two processes on one host that communicate over its loopback interface.

    Args:
        latency_s: seconds for an empty message.
        bytes_per_s: bandwidth for long messages.
        is_shared_memory: whether the link is memory that both ends access, so that the two ranks' own processors move a
            message: one copies it in, the other one out, half of the time each.
    """

    latency_s: float = 50e-6
    bytes_per_s: float = 1e9
    is_shared_memory: bool = False

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of one message."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Roofline:
    """Peaks of an accelerator by its data sheet and how far kernels stay below them, for times that nobody measured.

    Args:
        name: of the accelerator.
        peaks: peak FLOP/s of dense matrix products by dtype: ``fp32``, and others of :data:`DTYPES` if they are known.
        flops_fraction: fraction of the peak that large matrix products reach.
        memory_fraction: fraction of the memory bandwidth that kernels reach which do nothing but read and write.
        launch_s: seconds from the end of one kernel to the start of the next.

    Source:
        Williams, Waterman and Patterson, Roofline: an insightful visual performance model, CACM 2009.
    """

    name: str
    peaks: tuple[tuple[str, float], ...]
    flops_fraction: float = 1.0
    memory_fraction: float = 1.0
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        """Check the peaks.

        Raises:
            PlanError: there is none of ``fp32``, or one is not positive.
        """
        peaks = dict(self.peaks)
        if "fp32" not in peaks or not all(peak > 0 for peak in peaks.values()):
            found = ", ".join(f"{dtype} {peak:g}" for dtype, peak in self.peaks) or "nothing"
            raise PlanError(
                f"Roofline({self.name!r}) has the peaks {found}; each is above 0 FLOP/s, and that of fp32 is needed "
                'for dtypes without a peak of their own; add ("fp32", FLOPS) from the data sheet'
            )

    def peak_flops_per_s(self, dtype: str) -> float:
        """Return the peak for a dtype; that of ``fp32`` for one without a peak of its own."""
        peaks = dict(self.peaks)
        return peaks.get(dtype, peaks["fp32"])


DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
"""The dtypes of matrix products that a roofline may have peaks of."""


@dataclass(frozen=True, slots=True)
class Device:
    """The processor and memory of a rank. The defaults are those of one laptop core.

    Args:
        cost_per_s: block cost per second; floating point operations per second if costs count those. With a roofline
            that of the dtype holds instead.
        memory_bytes: memory capacity.
        memory_bytes_per_s: memory bandwidth of an update; with a roofline its peak.
        host_bytes_per_s: bandwidth between a device and the memory of its host, to which state is offloaded.
        disk_bytes_per_s: bandwidth of the disk that the rank's state is offloaded to; its share if ranks share one.
        reserve_bytes: memory of which training has no use: the context of the accelerator, workspaces of libraries,
            fragmentation.
        roofline: peaks by dtype; None if ``cost_per_s`` and ``memory_bytes_per_s`` were measured.
    """

    cost_per_s: float = 30e9
    memory_bytes: int = 8 * 2**30
    memory_bytes_per_s: float = 10e9
    reserve_bytes: int = 0
    roofline: Roofline | None = None
    disk_bytes_per_s: float = 1e9
    host_bytes_per_s: float = 16e9

    @property
    def usable_bytes(self) -> int:
        """Memory that training may take."""
        return max(self.memory_bytes - self.reserve_bytes, 0)

    @property
    def reached_bytes_per_s(self) -> float:
        """Memory bandwidth that kernels reach."""
        return self.memory_bytes_per_s * (1.0 if self.roofline is None else self.roofline.memory_fraction)

    def flops_per_s(self, dtype: str = "fp32") -> float:
        """Return the FLOP/s, or the cost per second, that large matrix products of a dtype reach."""
        roofline = self.roofline
        return self.cost_per_s if roofline is None else roofline.flops_fraction * roofline.peak_flops_per_s(dtype)

    def kernel_s(self, flops: float, moved_bytes: float, dtype: str = "fp32") -> float:
        """Return the duration of one kernel: of its arithmetic or of its memory traffic, and of its launch.

        Args:
            flops: floating point operations.
            moved_bytes: bytes of memory that it reads and writes.
            dtype: of its arithmetic, of :data:`DTYPES`.

        Example:
            >>> roofline = Roofline("example", (("fp32", 10.0), ("bf16", 100.0)), flops_fraction=0.5, launch_s=1.0)
            >>> device = Device(memory_bytes_per_s=20.0, roofline=roofline)
            >>> [device.kernel_s(200.0, 40.0, dtype) for dtype in ("fp32", "bf16")]
            [41.0, 5.0]
        """
        launch_s = 0.0 if self.roofline is None else self.roofline.launch_s
        return max(flops / self.flops_per_s(dtype), moved_bytes / self.reached_bytes_per_s) + launch_s


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a network: groups of the level below (ranks at the innermost level) connected by equal links.

    Args:
        name: name of the level, for example ``host`` or ``rack``.
        count: number of groups that it connects.
        link: the link between two of them.
        is_shared: whether all ranks of a group below share one uplink, like the network card of a host; else each rank
            has its own.
    """

    name: str
    count: int
    link: Link
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class TimeSlicing:
    """Time slicing of the cores of a host, for pieces of work that are shorter than a slice.

    Args:
        cores: number of ranks that compute at a time; others wait until one of these blocks, first come first served.
        speed_fractions: speed of each of 1, 2, ... ranks of a host during its time slice, as a fraction of the speed of
            one rank without others, which evict its data from the caches. The last one also holds for more ranks.
        message_s: seconds for which a message occupies both of its ends, in addition to copying it, if they come from
            other work.
    """

    cores: int
    speed_fractions: tuple[float, ...] = ()
    message_s: float = 0.0

    def speed_fraction(self, num_ranks: int) -> float:
        """Return the speed of each of ``num_ranks`` ranks of a host during its time slice."""
        return self.speed_fractions[min(num_ranks, len(self.speed_fractions)) - 1] if self.speed_fractions else 1.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks with one device each, connected by links that may differ from level to level.

    Args:
        device: the device of each rank.
        link: the link between any two ranks, if there are no levels.
        speeds: speed of each rank relative to ``device``; empty if all are equal.
        levels: the innermost first, whose groups are hosts; rank r is in group r // count, and so on outwards.
        compute_contention: speed of each of 1, 2, ... ranks of a host that compute at the same time, as a fraction of
            the speed of one; more ranks share the total of the last entry. Empty if there is no contention.
        slow_links: ``(level, group, fraction)`` for each group of the level below (a rank at level 0, a host at level
            1) whose link at that level has only a fraction of its bandwidth. Without levels there is only level 0.
        memory_contention: like ``compute_contention``, for ranks that access memory, which the ranks of a host share
            even if their cores are their own.
        time_slicing: how short pieces of work share cores; None if like long ones.

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
        """Return the speed of a rank relative to the device; 1 for ranks that are not listed."""
        return self.speeds[rank] if rank < len(self.speeds) else 1.0

    def host(self, rank: int) -> int:
        """Return the host of a rank; without levels all ranks are on one host."""
        return rank // self.levels[0].count if self.levels else 0

    def level_among(self, ranks: Sequence[int]) -> int:
        """Return the innermost level that connects all of these ranks; -1 without levels."""
        width = 1
        for index, level in enumerate(self.levels):
            width *= level.count
            if len({rank // width for rank in ranks}) == 1:
                return index
        return len(self.levels) - 1

    def link_among(self, ranks: Sequence[int]) -> Link:
        """Return the link between any of these ranks: that of their level, as slow as its slowest part."""
        level = self.level_among(ranks)
        if level < 1:
            return self.link_at(0, ranks)
        links = [self.link_at(index, ranks) for index in range(1, level + 1)]
        return Link(links[-1].latency_s, min(link.bytes_per_s for link in links), links[-1].is_shared_memory)

    def link_at(self, level: int, ranks: Sequence[int]) -> Link:
        """Return the link of a level for these ranks, as slow as that of the slowest of their groups."""
        link = self.levels[level].link if self.levels else self.link
        groups = {self.group(rank, level) for rank in ranks} if self.slow_links else set()
        fractions = [fraction for index, group, fraction in self.slow_links if index == level and group in groups]
        return replace(link, bytes_per_s=link.bytes_per_s * min(fractions)) if fractions else link

    def group(self, rank: int, level: int) -> int:
        """Return the group of the level below that a rank is in: itself at level 0, its host at level 1."""
        return rank // math.prod(below.count for below in self.levels[:level])

    def shared_levels(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the levels between any of these ranks at which the ranks of a group share one link."""
        return tuple(index for index in range(1, self.level_among(ranks) + 1) if self.levels[index].is_shared)

    def contended_compute_fraction(self, num_computing: float) -> float:
        """Return the speed of each of ``num_computing`` ranks of a host, as a fraction of the speed of one.

        A rank that computes half of the time counts half; between two integers the fraction is interpolated.
        """
        return _interpolate_fraction(self.compute_contention, num_computing)

    def contended_memory_fraction(self, num_ranks: float) -> float:
        """Return the likewise fraction of memory bandwidth, see :meth:`contended_compute_fraction`."""
        return _interpolate_fraction(self.memory_contention, num_ranks)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the levels; 0 without levels, where there may be any number."""
        return math.prod(level.count for level in self.levels) if self.levels else 0

    def require_ranks(self, num_ranks: int) -> None:
        """Check that the cluster has enough ranks; programs with fewer ranks use the first ones.

        Raises:
            PlanError: it has not; the message has the counts of all levels.
        """
        if self.levels and num_ranks > self.num_ranks:
            counts = ", ".join(f"{level.name}={level.count}" for level in self.levels)
            hosts = ", or more hosts in its name, as in 2x8xh100" if self.device.roofline is not None else ""
            raise PlanError(
                f"{num_ranks} ranks do not fit into a cluster of {self.num_ranks} ({counts}); take as many ranks or "
                f"fewer, or give a level a larger count{hosts}"
            )


def _interpolate_fraction(fractions: tuple[float, ...], number: float) -> float:
    """Return the fraction of its speed that each rank has among a number of ranks, interpolated between integers."""
    if not fractions or number <= 1:
        return fractions[0] if fractions and number == 1 else 1.0
    if number >= len(fractions):
        return fractions[-1] * len(fractions) / number
    below = int(number)
    return fractions[below - 1] - (fractions[below - 1] - fractions[below]) * (number - below)
