"""How long messages between two ranks take by their size, and the latency and bandwidth that say so."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from counterpoint.fabric.algorithms.measure import half_trips_s
from counterpoint.fabric.fabric import Fabric
from counterpoint.profiler.effort import Effort
from counterpoint.world.cluster import Link

LARGE_BYTES = 1 << 17
"""From here on the bandwidth counts, and not only the latency."""
FEWEST, MOST = 3, 50
"""So often a message goes there and back, for some spans of the effort if these allow it."""
SPANS = 3
PATIENCE_S = 2.0
"""A size that would take longer is left out, and all above it."""


def trips_by_size(fabric: Fabric, peer: int, effort: Effort) -> list[tuple[int, float]]:
    """Return by bytes how long a message takes from one rank of a pair to the other; both call it with each other.

    The lower rank says how often each size is sent and when it is enough, and has the answer; the other has none.
    """
    found: list[tuple[int, float]] = []
    for size in effort.messages:
        turns = _agreed(fabric, peer, _turns(found, size, SPANS * effort.span_s))
        if turns == 0:
            break
        seconds = half_trips_s(fabric, peer, torch.zeros(size, dtype=torch.uint8), turns)
        found.append((size, seconds))
    return found if fabric.rank < peer else []


def stream_s(fabric: Fabric, peer: int, message: Tensor, turns: int) -> float:
    """Return how long it takes until the higher rank of a pair has so many messages of the lower one; both call it."""
    began = time.perf_counter()
    for _ in range(turns):
        if fabric.rank < peer:
            fabric.send(peer, "stream", [message])
        else:
            fabric.recv(peer, "stream")
    if fabric.rank < peer:
        fabric.recv(peer, "all are here")
    else:
        fabric.send(peer, "all are here", [message[:1]])
    return time.perf_counter() - began


def fitted(trips: Sequence[tuple[int, float]]) -> Link:
    """Return the link by which messages of these bytes take these seconds, as nearly as two figures can say it.

    The latency is what the smallest takes; the bandwidth is what the large ones reach beyond it, all of them together.

    Example:
        >>> fitted([(8, 50e-6), (10**6, 1050e-6), (10**7, 10050e-6)])
        Link(latency_s=5e-05, bytes_per_s=1000000000.0, is_copied=False)
    """
    latency_s = trips[0][1]
    large = [trip for trip in trips if trip[0] >= LARGE_BYTES] or list(trips[-1:])
    beyond_s = sum(max(seconds - latency_s, 1e-9) for _, seconds in large)
    return Link(latency_s, float(f"{sum(size for size, _ in large) / beyond_s:.6g}"))


def _turns(found: Sequence[tuple[int, float]], size: int, span_s: float) -> int:
    """Return how often the next size is sent there and back; 0 where that would take too long."""
    if not found:
        return MOST
    before, seconds = found[-1]
    trip_s = 2 * seconds * (size / before if before >= LARGE_BYTES else 1)
    if FEWEST * trip_s > PATIENCE_S:
        return 0
    return max(FEWEST, min(MOST, int(span_s / trip_s)))


def _agreed(fabric: Fabric, peer: int, turns: int) -> int:
    """Return the number of the lower rank of a pair, on both."""
    if fabric.rank < peer:
        fabric.send(peer, "turns", [torch.tensor([turns])])
        return turns
    (told,) = fabric.recv(peer, "turns")
    return int(told.item())
