"""What a step takes at least, whatever ranks wait for: what one of them does alone, or one host's card carries."""

from __future__ import annotations

from collections import Counter, defaultdict

from counterpoint.planner.rows.folded import Fold
from counterpoint.planner.rows.known import Cut, KnownRow
from counterpoint.program.instruction import Collective, Group
from counterpoint.simulator.network import Message
from counterpoint.world.cluster import Cluster


def least_s(fold: Fold, cut: Cut) -> float:
    """Return what no step of these rows is shorter than, without playing them.

    Args:
        fold: the rows.
        cut: where they are known.
    """
    return max(_card_s(fold, cut), *(cut.time(row, 0).least_s for row in fold.rows))


def _card_s(fold: Fold, cut: Cut) -> float:
    """Return for how long the busiest card is taken by ranks of one host; 0 where hosts and copies do not line up.

    A group of copies has as many members on a host as the first of them on its own, or fewer: it begins there.
    """
    cluster, slices = cut.cluster, fold.num_slices
    if len(cluster.levels) < 2 or not cluster.levels[1].is_shared:
        return 0.0
    width, written = cluster.levels[0].count, fold.num_written
    if max(width, written) % min(width, written) or max(width, slices) % min(width, slices):
        return 0.0
    seconds = [_crossing_s(row, seat * slices, cut) for seat, row in enumerate(fold.rows) for _ in range(slices)]
    if written <= width:
        return sum(seconds) * (min(width, fold.num_ranks) // written)
    return max(sum(seconds[at : at + width]) for at in range(0, written, width))


def _crossing_s(row: KnownRow, rank: int, cut: Cut) -> float:
    """Return a rank's part of the seconds in which what it sends is on its host's card, alone."""
    key = row.outline, row.place
    if key not in cut.crossings:
        times = cut.time(row, 0)
        seconds: defaultdict[Group, float] = defaultdict(float)
        for word, crossing_s in zip(row.words, times.crossings, strict=True):
            if crossing_s:
                assert isinstance(word, Collective | Message), "nothing else crosses"
                seconds[word.group if isinstance(word, Collective) else (rank, word.peer)] += crossing_s
        cut.crossings[key] = sum(_part(ranks, rank, cut.cluster) * own_s for ranks, own_s in seconds.items())
    return cut.crossings[key]


def _part(ranks: Group, rank: int, cluster: Cluster) -> float:
    """Return the part of its host's card that one of some ranks answers for while something between them crosses."""
    together = Counter(map(cluster.host, ranks))[cluster.host(rank)]
    return cluster.link_among(ranks).bytes_per_s / cluster.link_at(1, (rank,)).bytes_per_s / together
