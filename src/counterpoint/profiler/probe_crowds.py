"""How fast ranks of one host are while several do the same at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from counterpoint.fabric.fabric import Fabric
from counterpoint.profiler.effort import Effort
from counterpoint.profiler.probe_compute import Pieces, layer_pieces

DIGITS = 3
"""So many digits of a measured figure count."""


def rounded(figure: float) -> float:
    """Return a measured figure with the digits that count."""
    return float(f"{figure:.{DIGITS}g}")


def crowd(
    fabric: Fabric, per_host: int, effort: Effort, ready: Callable[[Effort], Pieces] = layer_pieces
) -> list[float]:
    """Return how many pieces a second each of 1, 2, ... ranks of this host does at once; known to its first rank.

    Args:
        fabric: the way to the other ranks, all of which call this together.
        per_host: ranks of each host.
        effort: how large what they do is, and how long they do it.
        ready: makes their pieces ready; who still does so takes nothing from those that are measured.
    """
    first = fabric.rank - fabric.rank % per_host
    here, pieces, found = tuple(range(first, first + per_host)), ready(effort), []
    for count in range(1, per_host + 1):
        fabric.barrier(here)
        heard = fabric.gather_values("pieces", pieces() if fabric.rank - first < count else [], here)
        found.append(at_once([ends for ends in heard[:count] if isinstance(ends, list)]))
    return found


def at_once(ranks: Sequence[Sequence[float]]) -> float:
    """Return how many pieces a second each rank does, on average, while all do.

    Where ranks outnumber cores some begin late and some end early, and the others are faster then: that does not count,
    unless there is nothing else.

    Args:
        ranks: when each began, and when each of its pieces was done.

    Example:
        >>> at_once([[0.0, 1.0, 3.0, 5.0], [1.0, 3.0, 5.0, 6.0]])  # both from 1 to 5
        0.5
    """
    firsts, lasts = [own[0] for own in ranks], [own[-1] for own in ranks]
    began, ended = max(firsts), min(lasts)
    if began >= ended:
        began, ended = min(firsts), max(lasts)
    done = (np.interp((began, ended), own, np.arange(len(own))) for own in ranks)
    return float(sum(after - before for before, after in done)) / (ended - began) / len(ranks)


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
