"""Model contention for what ranks of a host share: cores, memory bandwidth and network cards.

An activity has work left, in the seconds it would take without contention, and a rate. While others use the same
resource its rate is lower::

    rate 1.0 |######            ####      an activity with 16 s of work
         0.5 |      ############          while a second one uses the same resource
             +------+-----------+----> time
               6 s      12 s      4 s     6 + 12 / 2 + 4 = 16; rates change when an activity starts or ends

All starts and ends at one moment are counted before rates are recomputed, and a rate that does not change touches
nothing. So the result depends on which activities are concurrent, never on the order in which those that start
at one moment are listed.

Where a host has fewer cores than ranks with short instructions, ranks wait in a run queue: the ranks that have waited
longest get the cores. Ranks queued at the same moment share what is left equally, and all finish as late as the last.

Where one rank represents its class (:mod:`counterpoint.program.rank_classes`), it counts as many times as ranks of
its class share the resource.
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
    """CPU time that an instruction needs on its own rank.

    Args:
        seconds: in total.
        is_streamed: whether it is a message that the receiver can read while the sender still writes it.
        busy_fraction: of these seconds, the fraction that computes; the rest waits for the other end.
        memory_s: of these seconds, those limited by memory bandwidth, which the ranks of a host share. Messages have 0:
            their measured time already includes cache and memory contention of both ends.
    """

    seconds: float
    is_streamed: bool = False
    busy_fraction: float = 1.0
    memory_s: float = 0.0


NO_DEMAND = CpuDemand(0.0)

TIME_SLICE_S: Final = 3e-3
"""Time slice that the kernel scheduler gives to one of several runnable ranks, approximately."""


class RunQueue:
    """Run queue of the cores: since when each rank has been runnable.

    A rank keeps its place until it waits for something or its time slice ends.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._queued_since_s = dict.fromkeys(ranks, 0.0)
        self._busy_s = self._queued_since_s.copy()

    def enqueue(self, rank: int, seconds: float, now: float) -> float:
        """Return since when a rank has been runnable that is about to compute for some seconds."""
        if self._busy_s[rank] >= TIME_SLICE_S:
            self.requeue(rank, now)
        self._busy_s[rank] += seconds
        return self._queued_since_s[rank]

    def requeue(self, rank: int, now: float) -> None:
        """Move a rank that has waited until now to the end of the queue."""
        self._queued_since_s[rank], self._busy_s[rank] = now, 0.0


Owner = TypeVar("Owner")
Resource: TypeAlias = Hashable
"""Identity of a shared resource: the cores of a host, or one direction of a network card."""


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """Use of a resource by an activity.

    Args:
        resource: the resource.
        count: simultaneous activities like this one; more than one where a rank represents others.
        rate: from the number of users to the speed of each, 1 for the speed without contention.
        slots: how many users can run at a time; 0 where users never queue.
    """

    resource: Resource
    count: int
    rate: Callable[[float], float]
    slots: int = 0


@dataclass(slots=True)
class Activity(Generic[Owner]):
    """A running activity.

    Args:
        owner: what it belongs to.
        uses: the resources that it needs at the same time.
        queued_since_s: since when it, or the sequence of activities that it continues, has been runnable.
        remaining_s: work left at ``rate_since_s``, in seconds without contention.
        rate_since_s: since when it has had its present rate.
        rate: its speed; 0 before it runs.
        version: of its end event, so that outdated end events are recognized; 0 where there is none.
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
    """Which users of a resource with slots run.

    Args:
        load: present users, without those that wait for a slot.
        shares: by the moment since which a user has been runnable, the fraction of the time that it has a slot.
    """

    load: int
    shares: Mapping[float, float]


class SharedResourcePool(Generic[Owner]):
    """All running activities and the time of the next event."""

    def __init__(self) -> None:
        self.loads: Counter[Resource] = Counter()
        self.rated_loads: Counter[Resource] = Counter()
        self.num_slotted_uses: Counter[Resource] = Counter()  # uses that may wait for a slot
        self.occupancies: dict[Resource, Occupancy] = {}
        self.users: defaultdict[Resource, dict[int, Activity[Owner]]] = defaultdict(dict)
        self.changed_resources: set[Resource] = set()
        self.started: list[Activity[Owner]] = []
        self.end_events: list[tuple[float, int, Activity[Owner]]] = []
        self.delayed: list[tuple[float, int, Activity[Owner]]] = []
        self.counter = 0

    @property
    def has_current_rates(self) -> bool:
        """Whether no activity has started or ended since the last :meth:`update_rates`."""
        return not self.started and not self.changed_resources

    @property
    def next_event_s(self) -> float:
        """When the next activity ends, or starts to use its resources, at present rates; infinity for never."""
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
        """Start an activity: first a delay that contention cannot extend, then its work on its resources.

        Args:
            owner: what it belongs to.
            now: the present time.
            work_s: work in seconds without contention.
            uses: its resources.
            delay_s: seconds before it uses them.
            queued_since_s: since when its owner has been runnable; by default since now.
        """
        activity = Activity(owner, uses, now if queued_since_s is None else queued_since_s, work_s, now + delay_s)
        if delay_s:
            self.counter += 1
            heapq.heappush(self.delayed, (now + delay_s, self.counter, activity))
        else:
            self._activate(activity)

    def update_rates(self, now: float) -> None:
        """Recompute the rates of new activities, and of those on resources whose load has changed."""
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
        """Return the speed of an activity on one resource; 0 while it waits for a slot."""
        if use.resource not in self.occupancies:
            return use.rate(self.loads[use.resource])
        occupancy = self.occupancies[use.resource]
        return use.rate(occupancy.load) * (occupancy.shares[activity.queued_since_s] if use.slots else 1.0)

    def _occupancy(self, resource: Resource) -> Occupancy:
        """Assign the slots of a resource to those that have been runnable longest."""
        queued: Counter[float] = Counter()
        slots = 0
        for activity in self.users[resource].values():
            for use in activity.uses:
                if use.resource == resource and use.slots:
                    queued[activity.queued_since_s] += use.count
                    slots = use.slots
        free_slots, shares = slots, {}
        for since_s in sorted(queued):
            shares[since_s] = 1 / max(1, math.ceil(queued[since_s] / free_slots)) if free_slots > 0 else 0.0
            free_slots -= queued[since_s]
        waiting = sum(queued.values())
        return Occupancy(self.loads[resource] - waiting + min(slots, waiting), shares)

    def pop_finished(self, now: float) -> list[Owner]:
        """Return the owners of activities that end now, and free their resources."""
        while self.delayed and self.delayed[0][0] == now:
            self._activate(heapq.heappop(self.delayed)[-1])
        owners = []
        while self.next_event_s == now:
            activity = heapq.heappop(self.end_events)[-1]
            activity.version = 0
            for use in activity.uses:
                self.num_slotted_uses[use.resource] -= use.slots > 0
                self.loads[use.resource] -= use.count
                self.changed_resources.add(use.resource)
                del self.users[use.resource][id(activity)]
            owners.append(activity.owner)
        return owners

    def _activate(self, activity: Activity[Owner]) -> None:
        self.started.append(activity)
        for use in activity.uses:
            self.num_slotted_uses[use.resource] += use.slots > 0
            self.loads[use.resource] += use.count
            self.changed_resources.add(use.resource)
            self.users[use.resource][id(activity)] = activity


LinkId: TypeAlias = tuple[int, int]
"""A rank, and 1 for its link out of the host or 0 for the link inside it; without levels there is only 0."""


FRACTION_STEPS = 16
"""CPU fractions are counted in steps: sums of integers do not depend on the order of starts and ends."""


class SharedResources:
    """Resources that the ranks of a program share on a cluster.

    Args:
        cluster: hosts, levels and links.
        representative: for each rank the representative of its class; classes distinguish at least what
            :func:`topology_keys` distinguishes.
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
            for rank, first in enumerate(representative):
                group = _group(cluster, rank, level)
                self.num_alike[level, group, first] += 1
                self.first_representative[level, group] = min(
                    first, self.first_representative.get((level, group), first)
                )
        self.cache: dict[tuple[object, ...], tuple[ResourceUse, ...]] = {}
        self.link_indices: dict[tuple[int, ...], int] = {}

    def core_uses(self, rank: int, demand: CpuDemand) -> tuple[ResourceUse, ...]:
        """Return the resources that a rank uses while it computes."""
        if not self.is_oversubscribed:
            return ()
        steps, memory_steps = (
            round(FRACTION_STEPS * demand.busy_fraction),
            round(FRACTION_STEPS * demand.memory_s / demand.seconds),
        )
        is_short = self.cluster.time_slicing is not None and demand.seconds <= TIME_SLICE_S
        key = ("cores", rank, steps, memory_steps, is_short)
        if key not in self.cache:
            self.cache[key] = tuple(self._core_uses(rank, steps, memory_steps, is_short=is_short))
        return self.cache[key]

    def _core_uses(self, rank: int, steps: int, memory_steps: int, *, is_short: bool) -> Iterator[ResourceUse]:
        time_slicing = self.cluster.time_slicing
        if is_short and time_slicing is not None:
            speed = time_slicing.speed_fraction(self.ranks_per_host[_group(self.cluster, rank, 1)])
            cores = self._use("cores", 1, (rank, 1), lambda _: speed)
            yield replace(cores, count=steps * cores.count, slots=FRACTION_STEPS * time_slicing.cores)
        else:
            cores = self._use("cores", 1, (rank, 1), self._core_rate)
            yield replace(cores, count=steps * cores.count)
        if memory_steps:
            memory = self._use("memory", 1, (rank, 1), partial(self._memory_rate, memory_steps))
            yield replace(memory, count=memory_steps * memory.count)

    def _core_rate(self, steps: float) -> float:
        """Return the speed of each rank for a number of busy ranks."""
        return self.cluster.contended_compute_fraction(steps / FRACTION_STEPS)

    def _memory_rate(self, own_steps: int, steps: float) -> float:
        """Return the speed of a rank with memory-bound steps, given how many all ranks have."""
        return 1 / (
            1
            - own_steps / FRACTION_STEPS
            + own_steps / FRACTION_STEPS / self.cluster.contended_memory_fraction(steps / FRACTION_STEPS)
        )

    def link_index(self, ranks: tuple[int, ...]) -> int:
        """Return which link of each rank communication among these ranks uses; see :data:`LinkId`."""
        if ranks not in self.link_indices:
            self.link_indices[ranks] = int(self.cluster.level_among(ranks) > 0)
        return self.link_indices[ranks]

    def message_uses(self, sender: int, receiver: int) -> tuple[ResourceUse, ...]:
        """Return the shared links that a message crosses."""
        ends = (sender, receiver)
        if ends not in self.cache:
            self.cache[ends] = tuple(
                self._use(direction, level, (end, 1), self._nic_rate(ends, level, end))
                for level in self.cluster.shared_levels(ends)
                for end, direction in ((sender, "out"), (receiver, "in"))
            )
        return self.cache[ends]

    def collective_uses(self, members: Sequence[Location]) -> tuple[ResourceUse, ...]:
        """Return the shared links that a collective crosses, in both directions."""
        first = members[0][1]
        relative_members = tuple(
            [(rank, index - first) for rank, index in members]
        )  # equal for all collectives of the same shape
        if relative_members not in self.cache:
            self.cache[relative_members] = self._link_uses(relative_members)
        return self.cache[relative_members]

    def _link_uses(self, members: Sequence[Location]) -> tuple[ResourceUse, ...]:
        ranks = [rank for rank, _ in members]
        uses: dict[tuple[object, object], ResourceUse] = {}
        for level in self.cluster.shared_levels(ranks):
            members_of_group: defaultdict[int, list[Location]] = defaultdict(list)
            for rank, index in members:
                members_of_group[self.cluster.group(rank, level)].append((rank, index))
            for direction in ("out", "in"):
                for use, pattern in self._uses_per_group(direction, level, members_of_group.values(), ranks):
                    uses.setdefault((use.resource, pattern), use)
        return _merge_uses(uses.values())

    def _uses_per_group(
        self, direction: str, level: int, groups: Iterable[Sequence[Location]], ranks: Sequence[int]
    ) -> Iterable[tuple[ResourceUse, object]]:
        """Yield the use of each group's link, and what makes two groups indistinguishable."""
        for members in groups:
            counts = Counter((self.representative[rank], index) for rank, index in members)
            end, index = members[0]
            num_alike = counts[self.representative[end], index]
            rate = self._nic_rate(ranks, level, end)
            yield self._use(direction, level, (end, num_alike), rate), frozenset(counts.items())

    def _use(self, kind: str, level: int, end: tuple[int, int], rate: Callable[[float], float]) -> ResourceUse:
        """Return the use of a resource by a rank and all ranks of its class in its group."""
        rank, num_counted_once = end
        group = _group(self.cluster, rank, level)
        count = self.num_alike[level, group, self.representative[rank]] // num_counted_once
        return ResourceUse((kind, level, self.first_representative[level, group]), count, rate)

    def _nic_rate(self, ranks: Sequence[int], level: int, rank: int) -> Callable[[float], float]:
        """Return the speed of each of n users of a group's link, 1 for the speed that the path allows."""
        capacity = self.cluster.link_at(level, (rank,)).bytes_per_s / self.cluster.link_among(ranks).bytes_per_s
        return partial(_capped_share, capacity)


def has_shared_nics(cluster: Cluster) -> bool:
    """Return whether ranks of a group share one link out of it, as those of a host share a network card."""
    return any(level.is_shared for level in cluster.levels[1:])


def topology_keys(cluster: Cluster, num_ranks: int) -> TopologyKeys:
    """Return what distinguishes ranks on a cluster: the speeds of ranks and links, and the groups they are in."""
    levels = range(max(len(cluster.levels), 1))
    slow_links = {(level, group): fraction for level, group, fraction in cluster.slow_links}
    keys = [
        (cluster.speed(rank), *(slow_links.get((level, cluster.group(rank, level)), 1.0) for level in levels))
        for rank in range(num_ranks)
    ]
    return TopologyKeys(
        keys, [[_group(cluster, rank, level) for rank in range(num_ranks)] for level in _shared_levels(cluster)]
    )


def _shared_levels(cluster: Cluster) -> range:
    """Return the levels whose groups may share something; with contention on cores a host is one."""
    has_contention = cluster.compute_contention or cluster.memory_contention or cluster.time_slicing
    return range(1, max(len(cluster.levels), 2 if has_contention else 1))


def _group(cluster: Cluster, rank: int, level: int) -> int:
    """Return the group below a level that a rank is in; without levels all ranks are on one host."""
    return cluster.group(rank, level) if cluster.levels else 0


def _capped_share(capacity: float, num_users: float) -> float:
    return min(1.0, capacity / num_users)


def _merge_uses(uses: Iterable[ResourceUse]) -> tuple[ResourceUse, ...]:
    """Merge the uses of the same resource."""
    counts: Counter[object] = Counter()
    rates: dict[object, ResourceUse] = {}
    for use in uses:
        counts[use.resource] += use.count
        rates.setdefault(use.resource, use)
    return tuple(ResourceUse(use.resource, counts[use.resource], use.rate) for use in rates.values())
