"""What several activities use at one time: each goes on at the rate that is left to it, until others begin or end.

An activity has work left, in the seconds it would take alone, and a rate. Ends and beginnings of one moment are all
counted before rates are set anew, and a rate that stays as it was touches nothing; so what happens depends on who
is active when, not on the order in which activities of one moment were named.

Where only so many have a turn at a time, those have it who came first; who came at one moment comes in one line, and
each of them is as late as the last.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

Owner = TypeVar("Owner")
Resource: TypeAlias = Hashable
"""What is shared: the cores of a host, a network card in one direction."""


@dataclass(frozen=True, slots=True)
class Use:
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
    seats: int = 0


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
    uses: Sequence[Use]
    came_s: float
    left_s: float
    since_s: float
    rate: float = 0.0
    version: int = 0


@dataclass(frozen=True, slots=True)
class Seating:
    """Who has a turn at what is shared.

    Args:
        load: how many use it now, without those that wait for their turn.
        parts: for those who came at a moment, for which part of the time each has a turn.
    """

    load: int
    parts: Mapping[float, float]


class Pool(Generic[Owner]):
    """All activities that go on, and when the next one ends."""

    def __init__(self) -> None:
        self.loads: Counter[Resource] = Counter()
        self.settled: Counter[Resource] = Counter()
        self.seated: Counter[Resource] = Counter()  # uses that may have to wait for their turn
        self.turns: dict[Resource, Seating] = {}
        self.users: defaultdict[Resource, dict[int, Activity[Owner]]] = defaultdict(dict)
        self.touched: set[Resource] = set()
        self.begun: list[Activity[Owner]] = []
        self.ends: list[tuple[float, int, Activity[Owner]]] = []
        self.waiting: list[tuple[float, int, Activity[Owner]]] = []
        self.number = 0

    @property
    def is_settled(self) -> bool:
        """Whether every activity has the rate that it should have."""
        return not self.begun and not self.touched

    @property
    def next_s(self) -> float:
        """When the next activity goes over to what it shares, or ends, as things are; infinity if none does."""
        while self.ends and self.ends[0][1] != self.ends[0][2].version:
            heapq.heappop(self.ends)
        ending = self.ends[0][0] if self.ends else math.inf
        return min(ending, self.waiting[0][0]) if self.waiting else ending

    def begin(
        self,
        owner: Owner,
        now: float,
        work_s: float,
        uses: Sequence[Use],
        *,
        apart_s: float = 0.0,
        came_s: float | None = None,
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
        activity = Activity(owner, uses, now if came_s is None else came_s, work_s, now + apart_s)
        if apart_s:
            self.number += 1
            heapq.heappush(self.waiting, (now + apart_s, self.number, activity))
        else:
            self._enter(activity)

    def settle(self, now: float) -> None:
        """Give every activity its rate from a moment on: to those that began, and where loads have changed."""
        due = {id(activity): activity for activity in self.begun}
        for resource in self.touched:
            if self.loads[resource] != self.settled[resource] or self.seated[resource]:
                self.settled[resource] = self.loads[resource]
                due |= self.users[resource]
                self.turns[resource] = self._turns(resource)
        self.begun.clear()
        self.touched.clear()
        for activity in due.values():
            rate = min((self._rate(activity, use) for use in activity.uses), default=1.0)
            if rate == activity.rate:
                continue
            activity.left_s = max(0.0, activity.left_s - activity.rate * (now - activity.since_s))
            activity.since_s, activity.rate = now, rate
            self.number += 1
            activity.version = self.number
            if rate:
                heapq.heappush(self.ends, (now + activity.left_s / rate, activity.version, activity))

    def _rate(self, activity: Activity[Owner], use: Use) -> float:
        """Return how fast an activity goes on by what it uses; nothing before its turn."""
        if use.resource not in self.turns:
            return use.rate(self.loads[use.resource])
        turns = self.turns[use.resource]
        return use.rate(turns.load) * (turns.parts[activity.came_s] if use.seats else 1.0)

    def _turns(self, resource: Resource) -> Seating:
        """Return who has a turn."""
        lines: Counter[float] = Counter()
        seats = 0
        for activity in self.users[resource].values():
            for use in activity.uses:
                if use.resource == resource and use.seats:
                    lines[activity.came_s] += use.count
                    seats = use.seats
        left, parts = seats, {}
        for came_s in sorted(lines):
            parts[came_s] = 1 / max(1, math.ceil(lines[came_s] / left)) if left > 0 else 0.0
            left -= lines[came_s]
        waiting = sum(lines.values())
        return Seating(self.loads[resource] - waiting + min(seats, waiting), parts)

    def ended(self, now: float) -> list[Owner]:
        """Return whose activities end at a moment; what they used is free for others from then on."""
        while self.waiting and self.waiting[0][0] == now:
            self._enter(heapq.heappop(self.waiting)[-1])
        found = []
        while self.next_s == now:
            activity = heapq.heappop(self.ends)[-1]
            activity.version = 0
            for use in activity.uses:
                self.seated[use.resource] -= use.seats > 0
                self.loads[use.resource] -= use.count
                self.touched.add(use.resource)
                del self.users[use.resource][id(activity)]
            found.append(activity.owner)
        return found

    def _enter(self, activity: Activity[Owner]) -> None:
        self.begun.append(activity)
        for use in activity.uses:
            self.seated[use.resource] += use.seats > 0
            self.loads[use.resource] += use.count
            self.touched.add(use.resource)
            self.users[use.resource][id(activity)] = activity
