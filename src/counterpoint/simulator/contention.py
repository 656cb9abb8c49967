"""What a word asks of its rank's own processor.

Since when ranks have wanted a turn at their host's cores.

What several activities use at one time: each goes on at the rate that is left to it, until others begin or end.

An activity has work left, in the seconds it would take alone, and a rate. Ends and beginnings of one moment are all
counted before rates are set anew, and a rate that stays as it was touches nothing; so what happens depends on who
is active when, not on the order in which activities of one moment were named.

Where only so many have a turn at a time, those have it who came first; who came at one moment comes in one line, and
each of them is as late as the last.

Where ranks stand, as far as they are in each other's way: on whose cores they compute, whose cards they cross.

Where one rank speaks for its class, it uses what it shares as many times as ranks of its class do that share it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from counterpoint.program.comm_matching import Location
from counterpoint.program.rank_classes import TopologyKeys
from counterpoint.world.cluster import Cluster


class CpuDemand(NamedTuple):
    """What a word asks of its rank's own processor.

    Args:
        seconds: how long.
        is_streamed: whether it is a message that can be taken out as soon as it begins to be put in.
        share: of these seconds, the part in which it computes, and does not wait for the other end.
        over_s: of these seconds, those in which it goes over memory, which the ranks of a host have together. What a
            message takes was measured with both ends at work, and with the cache that they have in common: it has none.
    """

    seconds: float
    is_streamed: bool = False
    busy_fraction: float = 1.0
    memory_s: float = 0.0


NO_DEMAND = CpuDemand(0.0)
"""That of a word that asks for nothing."""


TIME_SLICE_S: Final = 3e-3
"""So long the kernel leaves a core to one of those that want it, about, if that one does not wait."""


class RunQueue:
    """Where each rank stands: one that goes on keeps its turn, until it waits or its slice of time ends.

    Args:
        ranks: which.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._queued_since_s = dict.fromkeys(ranks, 0.0)
        self._busy_s = self._queued_since_s.copy()

    def enqueue(self, rank: int, seconds: float, now: float) -> float:
        """Return since when a rank has wanted a turn that is about to compute for some seconds."""
        if self._busy_s[rank] >= TIME_SLICE_S:
            self.requeue(rank, now)
        self._busy_s[rank] += seconds
        return self._queued_since_s[rank]

    def requeue(self, rank: int, now: float) -> None:
        """The rank has waited until now, and comes anew."""
        self._queued_since_s[rank], self._busy_s[rank] = now, 0.0


Owner = TypeVar("Owner")
Resource: TypeAlias = Hashable
"""What is shared: the cores of a host, a network card in one direction."""


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """That an activity uses something.

    Args:
        resource: what.
        count: how many activities like this one use it at the same times; more than one where a rank speaks for others.
        rate: from how many use it to how fast each of them is there, 1 for as fast as alone.
        seats: how many uses like this one have a turn at a time; 0 where none waits for its turn.
    """

    resource: Resource
    count: int
    rate: Callable[[float], float]
    slots: int = 0


@dataclass(slots=True)
class Activity(Generic[Owner]):
    """One activity that goes on.

    Args:
        owner: whose it is.
        uses: what it uses.
        came_s: since when it, or what it goes on with, has wanted a turn.
        left_s: work left at ``since_s``, in seconds of its own.
        since_s: since when it has had its rate.
        rate: how fast it goes on; 0 before it has begun.
        version: of its end, so that ends that did not come to be are known; 0 where there is none.
    """

    owner: Owner
    uses: Sequence[ResourceUse]
    queued_since_s: float
    remaining_s: float
    rate_since_s: float
    rate: float = 0.0
    version: int = 0


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Who has a turn at what is shared.

    Args:
        load: how many use it now, without those that wait for their turn.
        parts: for those who came at a moment, for which part of the time each has a turn.
    """

    load: int
    shares: Mapping[float, float]


class SharedResourcePool(Generic[Owner]):
    """All activities that go on, and when the next one ends."""

    def __init__(self) -> None:
        self.loads: Counter[Resource] = Counter()
        self.rated_loads: Counter[Resource] = Counter()
        self.num_slotted_uses: Counter[Resource] = Counter()  # uses that may have to wait for their turn
        self.occupancies: dict[Resource, Occupancy] = {}
        self.users: defaultdict[Resource, dict[int, Activity[Owner]]] = defaultdict(dict)
        self.changed_resources: set[Resource] = set()
        self.started: list[Activity[Owner]] = []
        self.end_events: list[tuple[float, int, Activity[Owner]]] = []
        self.delayed: list[tuple[float, int, Activity[Owner]]] = []
        self.counter = 0

    @property
    def has_current_rates(self) -> bool:
        """Whether every activity has the rate that it should have."""
        return not self.started and not self.changed_resources

    @property
    def next_event_s(self) -> float:
        """When the next activity goes over to what it shares, or ends, as things are; infinity if none does."""
        while self.end_events and self.end_events[0][1] != self.end_events[0][2].version:
            heapq.heappop(self.end_events)
        ending = self.end_events[0][0] if self.end_events else math.inf
        return min(ending, self.delayed[0][0]) if self.delayed else ending

    def start(
        self,
        owner: Owner,
        now: float,
        work_s: float,
        uses: Sequence[ResourceUse],
        *,
        delay_s: float = 0.0,
        queued_since_s: float | None = None,
    ) -> None:
        """Let an activity begin: first some seconds that nobody can make longer, then its work on what it uses.

        Args:
            owner: whose it is.
            now: the moment.
            work_s: seconds of its own.
            uses: what it uses.
            apart_s: before it does.
            came_s: since when its owner has wanted a turn; since now, if not given.
        """
        activity = Activity(owner, uses, now if queued_since_s is None else queued_since_s, work_s, now + delay_s)
        if delay_s:
            self.counter += 1
            heapq.heappush(self.delayed, (now + delay_s, self.counter, activity))
        else:
            self._activate(activity)

    def update_rates(self, now: float) -> None:
        """Give every activity its rate from a moment on: to those that began, and where loads have changed."""
        due = {id(activity): activity for activity in self.started}
        for resource in self.changed_resources:
            if self.loads[resource] != self.rated_loads[resource] or self.num_slotted_uses[resource]:
                self.rated_loads[resource] = self.loads[resource]
                due |= self.users[resource]
                self.occupancies[resource] = self._occupancy(resource)
        self.started.clear()
        self.changed_resources.clear()
        for activity in due.values():
            rate = min((self._rate(activity, use) for use in activity.uses), default=1.0)
            if rate == activity.rate:
                continue
            activity.remaining_s = max(0.0, activity.remaining_s - activity.rate * (now - activity.rate_since_s))
            activity.rate_since_s, activity.rate = now, rate
            self.counter += 1
            activity.version = self.counter
            if rate:
                heapq.heappush(self.end_events, (now + activity.remaining_s / rate, activity.version, activity))

    def _rate(self, activity: Activity[Owner], use: ResourceUse) -> float:
        """Return how fast an activity goes on by what it uses; nothing before its turn."""
        if use.resource not in self.occupancies:
            return use.rate(self.loads[use.resource])
        turns = self.occupancies[use.resource]
        return use.rate(turns.load) * (turns.shares[activity.queued_since_s] if use.slots else 1.0)

    def _occupancy(self, resource: Resource) -> Occupancy:
        """Return who has a turn."""
        lines: Counter[float] = Counter()
        seats = 0
        for activity in self.users[resource].values():
            for use in activity.uses:
                if use.resource == resource and use.slots:
                    lines[activity.queued_since_s] += use.count
                    seats = use.slots
        left, parts = seats, {}
        for came_s in sorted(lines):
            parts[came_s] = 1 / max(1, math.ceil(lines[came_s] / left)) if left > 0 else 0.0
            left -= lines[came_s]
        waiting = sum(lines.values())
        return Occupancy(self.loads[resource] - waiting + min(seats, waiting), parts)

    def pop_finished(self, now: float) -> list[Owner]:
        """Return whose activities end at a moment; what they used is free for others from then on."""
        while self.delayed and self.delayed[0][0] == now:
            self._activate(heapq.heappop(self.delayed)[-1])
        found = []
        while self.next_event_s == now:
            activity = heapq.heappop(self.end_events)[-1]
            activity.version = 0
            for use in activity.uses:
                self.num_slotted_uses[use.resource] -= use.slots > 0
                self.loads[use.resource] -= use.count
                self.changed_resources.add(use.resource)
                del self.users[use.resource][id(activity)]
            found.append(activity.owner)
        return found

    def _activate(self, activity: Activity[Owner]) -> None:
        self.started.append(activity)
        for use in activity.uses:
            self.num_slotted_uses[use.resource] += use.slots > 0
            self.loads[use.resource] += use.count
            self.changed_resources.add(use.resource)
            self.users[use.resource][id(activity)] = activity


LinkId: TypeAlias = tuple[int, int]
"""A rank, and 1 for its way out of its host or 0 for the one to others on it; without levels there is only 0."""


FRACTION_STEPS = 16
"""Parts of a processor that are told apart: sums of whole numbers do not depend on the order of who comes and goes."""


class SharedResources:
    """The ranks of a program on a cluster.

    Args:
        cluster: how they stand near each other.
        speaker: for each rank the one that speaks for its class; classes tell apart what :func:`nearness` tells apart.
    """

    def __init__(self, cluster: Cluster, representative: Sequence[int]) -> None:
        self.cluster = cluster
        self.representative = representative
        counts = range(1, len(representative) + 1)
        self.is_oversubscribed = cluster.time_slicing is not None or any(
            cluster.contended_compute_fraction(count) * cluster.contended_memory_fraction(count) != 1.0
            for count in counts
        )
        self.has_shared_nics = has_shared_nics(cluster)
        self.num_alike: Counter[tuple[int, int, int]] = Counter()
        self.ranks_per_host: Counter[int] = Counter(_group(cluster, rank, 1) for rank in range(len(representative)))
        self.first_representative: dict[tuple[int, int], int] = {}
        for level in _shared_levels(cluster) if self.is_oversubscribed or self.has_shared_nics else ():
            for rank, spokesman in enumerate(representative):
                group = _group(cluster, rank, level)
                self.num_alike[level, group, spokesman] += 1
                self.first_representative[level, group] = min(
                    spokesman, self.first_representative.get((level, group), spokesman)
                )
        self.cache: dict[tuple[object, ...], tuple[ResourceUse, ...]] = {}
        self.link_indices: dict[tuple[int, ...], int] = {}

    def core_uses(self, rank: int, demand: CpuDemand) -> tuple[ResourceUse, ...]:
        """Return what a rank uses when its processor does something.

        Args:
            rank: which.
            hand: what it does.
        """
        if not self.is_oversubscribed:
            return ()
        parts, memory_parts = (
            round(FRACTION_STEPS * demand.busy_fraction),
            round(FRACTION_STEPS * demand.memory_s / demand.seconds),
        )
        is_short = self.cluster.time_slicing is not None and demand.seconds <= TIME_SLICE_S
        key = ("cores", rank, parts, memory_parts, is_short)
        if key not in self.cache:
            self.cache[key] = tuple(self._core_uses(rank, parts, memory_parts, is_short=is_short))
        return self.cache[key]

    def _core_uses(self, rank: int, parts: int, memory_parts: int, *, is_short: bool) -> Iterator[ResourceUse]:
        turns = self.cluster.time_slicing
        if is_short and turns is not None:
            own = turns.speed_fraction(self.ranks_per_host[_group(self.cluster, rank, 1)])
            whole = self._use("cores", 1, (rank, 1), lambda _: own)
            yield replace(whole, count=parts * whole.count, seats=FRACTION_STEPS * turns.cores)
        else:
            whole = self._use("cores", 1, (rank, 1), self._core_rate)
            yield replace(whole, count=parts * whole.count)
        if memory_parts:
            memory = self._use("memory", 1, (rank, 1), partial(self._memory_rate, memory_parts))
            yield replace(memory, count=memory_parts * memory.count)

    def _core_rate(self, parts: float) -> float:
        """Return how fast each is while so many parts of processors compute."""
        return self.cluster.contended_compute_fraction(parts / FRACTION_STEPS)

    def _memory_rate(self, own: int, parts: float) -> float:
        """Return how fast one is that goes over memory for some parts of its time, while so many parts of all do."""
        return 1 / (
            1
            - own / FRACTION_STEPS
            + own / FRACTION_STEPS / self.cluster.contended_memory_fraction(parts / FRACTION_STEPS)
        )

    def link_index(self, ranks: tuple[int, ...]) -> int:
        """Return which of its ways a message or a collective of these ranks takes: 1 for the one out of a host."""
        if ranks not in self.link_indices:
            self.link_indices[ranks] = int(self.cluster.level_among(ranks) > 0)
        return self.link_indices[ranks]

    def message_uses(self, sender: int, receiver: int) -> tuple[ResourceUse, ...]:
        """Return what a message crosses."""
        ends = (sender, receiver)
        if ends not in self.cache:
            self.cache[ends] = tuple(
                self._use(direction, level, (end, 1), self._nic_rate(ends, level, end))
                for level in self.cluster.shared_levels(ends)
                for end, direction in ((sender, "out"), (receiver, "in"))
            )
        return self.cache[ends]

    def collective_uses(self, members: Sequence[Location]) -> tuple[ResourceUse, ...]:
        """Return what a collective crosses: each of its groups' links in both directions."""
        first = members[0][1]
        places = tuple([(rank, index - first) for rank, index in members])  # of all calls of one shape the same
        if places not in self.cache:
            self.cache[places] = self._link_uses(places)
        return self.cache[places]

    def _link_uses(self, members: Sequence[Location]) -> tuple[ResourceUse, ...]:
        ranks = [rank for rank, _ in members]
        found: dict[tuple[object, object], ResourceUse] = {}
        for level in self.cluster.shared_levels(ranks):
            here: defaultdict[int, list[Location]] = defaultdict(list)
            for rank, index in members:
                here[self.cluster.group(rank, level)].append((rank, index))
            for direction in ("out", "in"):
                for use, seats in self._uses_per_group(direction, level, here.values(), ranks):
                    found.setdefault((use.resource, seats), use)
        return _merge_uses(found.values())

    def _uses_per_group(
        self, direction: str, level: int, groups: Iterable[Sequence[Location]], ranks: Sequence[int]
    ) -> Iterable[tuple[ResourceUse, object]]:
        """Yield what each group's members use, and how they would be seen from a group like theirs."""
        for inside in groups:
            seats = Counter((self.representative[rank], index) for rank, index in inside)
            end, index = inside[0]
            together = seats[self.representative[end], index]
            rate = self._nic_rate(ranks, level, end)
            yield self._use(direction, level, (end, together), rate), frozenset(seats.items())

    def _use(self, kind: str, level: int, end: tuple[int, int], rate: Callable[[float], float]) -> ResourceUse:
        """Return the use by a rank and those like it in its group, so many of which use it as one."""
        rank, together = end
        group = _group(self.cluster, rank, level)
        count = self.num_alike[level, group, self.representative[rank]] // together
        return ResourceUse((kind, level, self.first_representative[level, group]), count, rate)

    def _nic_rate(self, ranks: Sequence[int], level: int, end: int) -> Callable[[float], float]:
        """Return how fast each of so many is on a group's link, 1 for as fast as its whole way alone."""
        room = self.cluster.link_at(level, (end,)).bytes_per_s / self.cluster.link_among(ranks).bytes_per_s
        return partial(_capped_share, room)


def has_shared_nics(cluster: Cluster) -> bool:
    """Tell whether some ranks share a link, as those of a host its network card."""
    return any(level.is_shared for level in cluster.levels[1:])


def topology_keys(cluster: Cluster, num_ranks: int) -> TopologyKeys:
    """Return what tells ranks apart on a cluster: how fast they and their links are, and which groups they are in."""
    levels = range(max(len(cluster.levels), 1))
    slow = {(level, group): part for level, group, part in cluster.slow_links}
    kinds = [
        (cluster.speed(rank), *(slow.get((level, cluster.group(rank, level)), 1.0) for level in levels))
        for rank in range(num_ranks)
    ]
    return TopologyKeys(
        kinds, [[_group(cluster, rank, level) for rank in range(num_ranks)] for level in _shared_levels(cluster)]
    )


def _shared_levels(cluster: Cluster) -> range:
    """Return the levels whose groups may hold several ranks; where a crowd matters, its host is one."""
    has_crowds = cluster.compute_contention or cluster.memory_contention or cluster.time_slicing
    return range(1, max(len(cluster.levels), 2 if has_crowds else 1))


def _group(cluster: Cluster, rank: int, level: int) -> int:
    """Return the group of the level below that a rank is in; without levels all are on one host."""
    return cluster.group(rank, level) if cluster.levels else 0


def _capped_share(capacity: float, num_users: float) -> float:
    return min(1.0, capacity / num_users)


def _merge_uses(uses: Iterable[ResourceUse]) -> tuple[ResourceUse, ...]:
    """Return uses of one resource as one."""
    counts: Counter[object] = Counter()
    rates: dict[object, ResourceUse] = {}
    for use in uses:
        counts[use.resource] += use.count
        rates.setdefault(use.resource, use)
    return tuple(ResourceUse(use.resource, counts[use.resource], use.rate) for use in rates.values())
