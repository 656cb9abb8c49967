"""How fast ranks of one host are while several do the same at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean, median

from counterpoint.fabric.fabric import Fabric
from counterpoint.profiler.effort import Effort
from counterpoint.profiler.probe_compute import flops_for

DIGITS = 3
"""So many digits of a measured figure count."""


def rounded(figure: float) -> float:
    """Return a measured figure with the digits that count."""
    return float(f"{figure:.{DIGITS}g}")


def crowd(fabric: Fabric, per_host: int, effort: Effort, rate: Callable[[Effort], float] = flops_for) -> list[float]:
    """Return how fast each of 1, 2, ... ranks of this host is at once, on average; known to its first rank.

    Args:
        fabric: the way to the other ranks, all of which call this together.
        per_host: ranks of each host.
        effort: how large what they do is, and how long they do it.
        rate: does so, and returns how much of it a second.
    """
    here = tuple(range(fabric.rank - fabric.rank % per_host, fabric.rank - fabric.rank % per_host + per_host))
    found = []
    for count in range(1, per_host + 1):
        fabric.barrier(here)
        mine = rate(effort) if fabric.rank - here[0] < count else 0.0
        heard = fabric.gather_values("rate", mine, here)
        found.append(mean(rate for rate in heard[:count] if isinstance(rate, float)))
    return found


def crowding_of(hosts: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return for each number of ranks the middle one of the parts that hosts have told."""
    return _falling([median(parts) for parts in zip(*hosts, strict=True)])


def parts_of_one(crowds: Sequence[Sequence[float]]) -> list[float]:
    """Return how fast ranks are at once, in parts of how fast one is alone."""
    middles = [median(rates) for rates in zip(*crowds, strict=True)]
    return [rate / middles[0] for rate in middles]


def _falling(parts: Sequence[float]) -> tuple[float, ...]:
    """Return parts of which none is above 1 or above one before it, as no rank is faster in a larger crowd."""
    return tuple(rounded(min(1.0, *parts[: at + 1])) for at in range(len(parts)))
