"""The machines a program runs on, as the simulator sees them: devices, alike or not, and links, which all are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """The way out of a rank: how long a message takes before its first byte arrives, and how fast the rest follows.

    The defaults are those of two processes of one host that talk over its loopback.
    """

    latency_s: float = 50e-6
    bytes_per_s: float = 1e9

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
class Cluster:
    """Ranks with one device each, every pair joined by the same kind of link.

    Args:
        device: of each rank.
        link: between any two.
        speeds: how many times as fast as ``device`` each rank computes; empty where all are alike.

    Example:
        >>> Cluster(speeds=(2.0, 1.0)).speed(0)
        2.0
    """

    device: Device = Device()
    link: Link = Link()
    speeds: tuple[float, ...] = ()

    def speed(self, rank: int) -> float:
        """Return how many times as fast as the device a rank computes; ranks that nothing is said of are as fast."""
        return self.speeds[rank] if rank < len(self.speeds) else 1.0
