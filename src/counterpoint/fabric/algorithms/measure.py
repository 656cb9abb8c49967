"""The figures that a choice of algorithm needs, measured on the ranks that will use it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import combinations
from math import inf
from statistics import median

import torch
from torch import Tensor

from counterpoint.fabric.algorithms.choose import Network
from counterpoint.fabric.fabric import Fabric
from counterpoint.world.cluster import Link

SMALL_TURNS, LARGE_TURNS, LARGE_BYTES = 20, 3, 2 << 20


def measure_network(fabric: Fabric) -> Network:
    """Return where the ranks are and how they are joined, the same figures on all of them; all call it together.

    One pair of ranks of one host and one of two hosts send each other small and large messages in turns: half a round
    trip of next to nothing is the latency, what a large one takes beyond it gives the bandwidth. Other ranks wait.

    Cost:
        some tens of messages of 8 bytes and three of 2 MiB each way; 10 to 100 ms.
    """
    hosts = tuple(fabric.hosts)
    near = next((pair for pair in combinations(range(len(hosts)), 2) if hosts[pair[0]] == hosts[pair[1]]), None)
    far = next((pair for pair in combinations(range(len(hosts)), 2) if hosts[pair[0]] != hosts[pair[1]]), None)
    everybody = tuple(range(fabric.num_ranks))
    mine = [_measured(fabric, pair) if pair and fabric.rank in pair else None for pair in (near, far)]
    heard = fabric.gather_values("links", [*mine, _adding_bytes_per_s()], everybody)
    found: list[Link] = []
    for index, pair in enumerate((near, far)):
        row = heard[pair[0]] if pair else None
        figures = row[index] if isinstance(row, list) else None
        found.append(Link(*figures) if isinstance(figures, list) else Link(0.0, inf))
    speeds = [row[2] for row in heard if isinstance(row, list)]
    return Network(hosts, found[0], found[1], min(float(speed) for speed in speeds if isinstance(speed, int | float)))


def _measured(fabric: Fabric, pair: Sequence[int]) -> list[float]:
    """Return latency in seconds and bytes per second between this rank and the other one of a pair."""
    peer = pair[0] if fabric.rank == pair[1] else pair[1]
    small = half_trips_s(fabric, peer, torch.zeros(1, dtype=torch.int64), SMALL_TURNS)
    large = half_trips_s(fabric, peer, torch.zeros(LARGE_BYTES, dtype=torch.uint8), LARGE_TURNS)
    return [small, LARGE_BYTES / max(large - small, 1e-9)]


def half_trips_s(fabric: Fabric, peer: int, message: Tensor, turns: int) -> float:
    """Return the median of half the seconds of a round trip; both ranks call it together.

    Args:
        fabric: of one of the two.
        peer: the other one.
        message: what the lower rank sends and the other one sends back.
        turns: how often.
    """

    def round_trip() -> None:
        if fabric.rank < peer:
            fabric.send(peer, "there", [message])
            fabric.recv(peer, "back")
        else:
            fabric.recv(peer, "there")
            fabric.send(peer, "back", [message])

    return median(_seconds(round_trip) for _ in range(turns)) / 2


def _adding_bytes_per_s() -> float:
    """Return how many bytes a rank adds to others in a second."""
    total, more = (torch.zeros(LARGE_BYTES // 4) for _ in range(2))
    return LARGE_BYTES / max(median(_seconds(lambda: total.add_(more)) for _ in range(5)), 1e-9)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
