"""Where ranks stand, as far as they are in each other's way: on whose cores they compute, whose cards they cross.

Where one rank speaks for its class, it uses what it shares as many times as ranks of its class do that share it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from counterpoint.program.partners import Place
from counterpoint.program.symmetry import Nearness
from counterpoint.simulator.hands import Hand
from counterpoint.simulator.lines import SLICE_S
from counterpoint.simulator.sharing import Use
from counterpoint.world.cluster import Cluster

Lane: TypeAlias = tuple[int, int]
"""A rank, and 1 for its way out of its host or 0 for the one to others on it; without levels there is only 0."""


PARTS = 16
"""Parts of a processor that are told apart: sums of whole numbers do not depend on the order of who comes and goes."""


class Places:
    """The ranks of a program on a cluster.

    Args:
        cluster: how they stand near each other.
        speaker: for each rank the one that speaks for its class; classes tell apart what :func:`nearness` tells apart.
    """

    def __init__(self, cluster: Cluster, speaker: Sequence[int]) -> None:
        self.cluster = cluster
        self.speaker = speaker
        counts = range(1, len(speaker) + 1)
        self.has_crowds = cluster.turns is not None or any(
            cluster.crowded(count) * cluster.memory_crowded(count) != 1.0 for count in counts
        )
        self.has_cards = has_cards(cluster)
        self.like: Counter[tuple[int, int, int]] = Counter()
        self.together: Counter[int] = Counter(_group(cluster, rank, 1) for rank in range(len(speaker)))
        self.first: dict[tuple[int, int], int] = {}
        for level in _outer(cluster) if self.has_crowds or self.has_cards else ():
            for rank, spokesman in enumerate(speaker):
                group = _group(cluster, rank, level)
                self.like[level, group, spokesman] += 1
                self.first[level, group] = min(spokesman, self.first.get((level, group), spokesman))
        self.known: dict[tuple[object, ...], tuple[Use, ...]] = {}
        self.ways: dict[tuple[int, ...], int] = {}

    def cores(self, rank: int, hand: Hand) -> tuple[Use, ...]:
        """Return what a rank uses when its processor does something.

        Args:
            rank: which.
            hand: what it does.
        """
        if not self.has_crowds:
            return ()
        parts, memory_parts = round(PARTS * hand.share), round(PARTS * hand.over_s / hand.seconds)
        is_short = self.cluster.turns is not None and hand.seconds <= SLICE_S
        key = ("cores", rank, parts, memory_parts, is_short)
        if key not in self.known:
            self.known[key] = tuple(self._cores(rank, parts, memory_parts, is_short=is_short))
        return self.known[key]

    def _cores(self, rank: int, parts: int, memory_parts: int, *, is_short: bool) -> Iterator[Use]:
        turns = self.cluster.turns
        if is_short and turns is not None:
            own = turns.part(self.together[_group(self.cluster, rank, 1)])
            whole = self._use("cores", 1, (rank, 1), lambda _: own)
            yield replace(whole, count=parts * whole.count, seats=PARTS * turns.cores)
        else:
            whole = self._use("cores", 1, (rank, 1), self._crowded)
            yield replace(whole, count=parts * whole.count)
        if memory_parts:
            memory = self._use("memory", 1, (rank, 1), partial(self._over_memory, memory_parts))
            yield replace(memory, count=memory_parts * memory.count)

    def _crowded(self, parts: float) -> float:
        """Return how fast each is while so many parts of processors compute."""
        return self.cluster.crowded(parts / PARTS)

    def _over_memory(self, own: int, parts: float) -> float:
        """Return how fast one is that goes over memory for some parts of its time, while so many parts of all do."""
        return 1 / (1 - own / PARTS + own / PARTS / self.cluster.memory_crowded(parts / PARTS))

    def outwards(self, ranks: tuple[int, ...]) -> int:
        """Return which of its ways a message or a collective of these ranks takes: 1 for the one out of a host."""
        if ranks not in self.ways:
            self.ways[ranks] = int(self.cluster.level_among(ranks) > 0)
        return self.ways[ranks]

    def message(self, sender: int, receiver: int) -> tuple[Use, ...]:
        """Return what a message crosses."""
        ends = (sender, receiver)
        if ends not in self.known:
            self.known[ends] = tuple(
                self._use(direction, level, (end, 1), self._card(ends, level, end))
                for level in self.cluster.shared_levels(ends)
                for end, direction in ((sender, "out"), (receiver, "in"))
            )
        return self.known[ends]

    def call(self, members: Sequence[Place]) -> tuple[Use, ...]:
        """Return what a collective crosses: each of its groups' links in both directions."""
        first = members[0][1]
        places = tuple([(rank, index - first) for rank, index in members])  # of all calls of one shape the same
        if places not in self.known:
            self.known[places] = self._crossed(places)
        return self.known[places]

    def _crossed(self, members: Sequence[Place]) -> tuple[Use, ...]:
        ranks = [rank for rank, _ in members]
        found: dict[tuple[object, object], Use] = {}
        for level in self.cluster.shared_levels(ranks):
            here: defaultdict[int, list[Place]] = defaultdict(list)
            for rank, index in members:
                here[self.cluster.group(rank, level)].append((rank, index))
            for direction in ("out", "in"):
                for use, seats in self._distinct(direction, level, here.values(), ranks):
                    found.setdefault((use.resource, seats), use)
        return _merged(found.values())

    def _distinct(
        self, direction: str, level: int, groups: Iterable[Sequence[Place]], ranks: Sequence[int]
    ) -> Iterable[tuple[Use, object]]:
        """Yield what each group's members use, and how they would be seen from a group like theirs."""
        for inside in groups:
            seats = Counter((self.speaker[rank], index) for rank, index in inside)
            end, index = inside[0]
            together = seats[self.speaker[end], index]
            rate = self._card(ranks, level, end)
            yield self._use(direction, level, (end, together), rate), frozenset(seats.items())

    def _use(self, kind: str, level: int, end: tuple[int, int], rate: Callable[[float], float]) -> Use:
        """Return the use by a rank and those like it in its group, so many of which use it as one."""
        rank, together = end
        group = _group(self.cluster, rank, level)
        count = self.like[level, group, self.speaker[rank]] // together
        return Use((kind, level, self.first[level, group]), count, rate)

    def _card(self, ranks: Sequence[int], level: int, end: int) -> Callable[[float], float]:
        """Return how fast each of so many is on a group's link, 1 for as fast as its whole way alone."""
        room = self.cluster.link_at(level, (end,)).bytes_per_s / self.cluster.link_among(ranks).bytes_per_s
        return partial(_part, room)


def has_cards(cluster: Cluster) -> bool:
    """Tell whether some ranks share a link, as those of a host its network card."""
    return any(level.is_shared for level in cluster.levels[1:])


def nearness(cluster: Cluster, num_ranks: int) -> Nearness:
    """Return what tells ranks apart on a cluster: how fast they and their links are, and which groups they are in."""
    levels = range(max(len(cluster.levels), 1))
    slow = {(level, group): part for level, group, part in cluster.slow_links}
    kinds = [
        (cluster.speed(rank), *(slow.get((level, cluster.group(rank, level)), 1.0) for level in levels))
        for rank in range(num_ranks)
    ]
    return Nearness(kinds, [[_group(cluster, rank, level) for rank in range(num_ranks)] for level in _outer(cluster)])


def _outer(cluster: Cluster) -> range:
    """Return the levels whose groups may hold several ranks; where a crowd matters, its host is one."""
    has_crowds = cluster.crowding or cluster.memory_crowding or cluster.turns
    return range(1, max(len(cluster.levels), 2 if has_crowds else 1))


def _group(cluster: Cluster, rank: int, level: int) -> int:
    """Return the group of the level below that a rank is in; without levels all are on one host."""
    return cluster.group(rank, level) if cluster.levels else 0


def _part(room: float, num_users: float) -> float:
    return min(1.0, room / num_users)


def _merged(uses: Iterable[Use]) -> tuple[Use, ...]:
    """Return uses of one resource as one."""
    counts: Counter[object] = Counter()
    rates: dict[object, Use] = {}
    for use in uses:
        counts[use.resource] += use.count
        rates.setdefault(use.resource, use)
    return tuple(Use(use.resource, counts[use.resource], use.rate) for use in rates.values())
