"""The virtual clock: rows go forward in time, links carry one thing at a time, first ready first served.

Every rank has one processor, which does its words in order, and one link out, which a send or a collective
occupies while the processor goes on. All that happens at one moment on processors happens before any link is given
away at that moment, and links are given to the word that stands first in its row; so nothing depends on the
numbers of ranks, which is what lets one rank of a class speak for all (:mod:`counterpoint.program.symmetry`).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Forward,
    Instruction,
    Pull,
    Push,
    Recompute,
    Recv,
    Release,
    Send,
    Serve,
    Swap,
    Update,
)
from counterpoint.program.partners import Partners, Place
from counterpoint.program.program import Words
from counterpoint.program.trace import Lane
from counterpoint.simulator.costs import Costs

Span: TypeAlias = tuple[int, float, float, Lane]
"""Index of a word, start, stop, lane."""
Key: TypeAlias = tuple[object, ...]
"""What a word may wait for: the place of a send, the places of a call, or an answer."""

_GO = 1 << 60
"""Stands where a push has its seat in a server's order, for a rank that goes on; deliveries come first."""


@dataclass(frozen=True, slots=True)
class Score:
    """What is played: rows, who meets whom, which rank speaks for which, and what each word costs.

    Args:
        rows: the flat rows of all ranks.
        partners: who meets whom in them.
        speaker: for each rank the one that speaks for its class.
        seconds: for each speaker the seconds of each of its words, on the processor or on the link.
        costs: for what a server does with each push.
    """

    rows: Sequence[Words]
    partners: Partners
    speaker: Sequence[int]
    seconds: Mapping[int, Sequence[float]]
    costs: Costs


@dataclass(frozen=True, slots=True)
class Transfer:
    """Something that wants the links of its members for a while."""

    key: Key
    members: tuple[Place, ...]
    seconds: float


class Clash(Exception):  # noqa: N818 - not an error: all ranks are simulated instead
    """Two ranks of one class want one link at one moment, so that their numbers would decide."""


class Clock:
    """How far each speaker has come, what is under way, and what happens next."""

    def __init__(self, score: Score) -> None:
        self.score = score
        self.cursor = dict.fromkeys(score.seconds, 0)
        self.came_s = dict.fromkeys(score.seconds, 0.0)
        self.link_free_s = dict.fromkeys(score.seconds, 0.0)
        self.spans: dict[int, list[Span]] = {rank: [] for rank in score.seconds}
        self.done: dict[Key, float] = {}
        self.present: defaultdict[Key, set[Place]] = defaultdict(set)
        self.asleep: defaultdict[Key, list[int]] = defaultdict(list)
        self.pushed: defaultdict[Place, deque[int]] = defaultdict(deque)
        self.served: Counter[Place] = Counter()
        self.calls: dict[int, tuple[Place, ...]] = {}
        self.ready: list[tuple[float, int, Place]] = [(0.0, _GO, (rank, 0)) for rank in score.seconds]
        self.wishes: list[tuple[float, int, tuple[Place, ...], int, Transfer]] = []
        self.num_wishes = 0

    def run(self) -> None:
        """Play the rows to their end, as far as they go.

        Raises:
            Clash: ranks of one class would differ, see there.
        """
        while self.ready or self.wishes:
            if self.wishes and (not self.ready or self.wishes[0][0] < self.ready[0][0]):
                self.grant()
                continue
            now, seat, (rank, index) = heapq.heappop(self.ready)
            if seat == _GO:
                self.advance(rank, now)
            else:
                self.pushed[rank, index].append(seat)
                self.wake(("pushed", rank, index), now)

    @property
    def stuck(self) -> list[int]:
        """The speakers that never came to the end of their rows."""
        return [rank for rank, at in self.cursor.items() if at < len(self.score.rows[rank])]

    def wake(self, key: Key, now: float) -> None:
        """Let all that wait for something look again at a moment."""
        for rank in self.asleep.pop(key, ()):
            heapq.heappush(self.ready, (now, _GO, (rank, 0)))

    def advance(self, rank: int, now: float) -> None:
        """Let a rank do words until one takes time or has to wait."""
        while self.cursor[rank] < len(self.score.rows[rank]):
            until = self.perform(rank, now)
            if until is None:
                return
            self.cursor[rank] += 1
            self.came_s[rank] = until
            if until > now:
                heapq.heappush(self.ready, (until, _GO, (rank, 0)))
                return

    def perform(self, rank: int, now: float) -> float | None:  # noqa: C901, PLR0911 - one case for each instruction
        """Begin the next word; return when the rank goes on, or None when it waits for something else."""
        index = self.cursor[rank]
        word = self.score.rows[rank][index]
        match word:
            case Forward() | Recompute() | Backward() | Update():
                until = now + self.score.seconds[rank][index]
                self.note(rank, index, (now, until), "compute")
                return until
            case Send() | Push():
                place = (rank, index)
                self.wish(now, Transfer(place, (place,), self.score.seconds[rank][index]))
                return now
            case Recv():
                source, at = self.score.partners.source[rank, index]
                return self.await_done(rank, (self.score.speaker[source], at), now)
            case Collective(phase="-"):
                return self.await_done(rank, self.call_of(self.score.partners.source[rank, index]), now)
            case Collective(phase="+"):
                self.join(rank, index, now)
                return now
            case Collective() | Commit():
                call = self.call_of((rank, index))
                if (rank, index) not in self.present[call]:
                    self.join(rank, index, now)
                return self.await_done(rank, call, now)
            case Pull():
                source, at = self.score.partners.source[rank, index]
                key = ("answer", self.score.speaker[source], at, self.score.partners.seat[rank, index])
                return self.await_done(rank, key, now)
            case Serve():
                return self.serve(rank, word, now)
            case Release() | Swap():
                self.note(rank, index, (now, now), "link")
                return now

    def serve(self, rank: int, word: Serve, now: float) -> float | None:
        """Apply the push that came first and answer it; go on when all workers have been served."""
        place = (rank, self.cursor[rank])
        if self.pushed[place]:
            seat = self.pushed[place].popleft()
            update_s, answer_s = self.score.costs.serve_s(word.units[seat % len(word.units)])
            if self.came_s[rank] < now:
                self.note(*place, (self.came_s[rank], now), "wait")
            self.note(*place, (now, now + update_s), "compute")
            self.wish(now + update_s, Transfer(("answer", *place, seat), (place,), answer_s))
            self.served[place] += 1
            self.came_s[rank] = now + update_s
            heapq.heappush(self.ready, (now + update_s, _GO, (rank, 0)))
            return None
        if self.served[place] == len(word.workers) * len(word.units):
            return now
        self.asleep["pushed", *place].append(rank)
        return None

    def note(self, rank: int, index: int, times: tuple[float, float], lane: Lane) -> None:
        """Keep what a rank did from when to when."""
        self.spans[rank].append((index, *times, lane))

    def await_done(self, rank: int, key: Key, now: float) -> float | None:
        """Let a rank go on if something is done, else let it sleep until then."""
        if self.done.get(key, math.inf) > now:
            self.asleep[key].append(rank)
            if key in self.done:
                self.wake(key, self.done[key])
            return None
        self.note(rank, self.cursor[rank], (self.came_s[rank], now), "wait")
        return now

    def call_of(self, place: Place) -> tuple[Place, ...]:
        """Return what identifies a call: the places of its members, each by who speaks for it."""
        number = self.score.partners.call[place]
        if number not in self.calls:
            members = self.score.partners.members[number]
            self.calls[number] = tuple(sorted({(self.score.speaker[rank], index) for rank, index in members}))
        return self.calls[number]

    def join(self, rank: int, index: int, now: float) -> None:
        """Let a rank come to a call; the last one to come asks for the links of all."""
        call = self.call_of((rank, index))
        self.present[call].add((rank, index))
        if len(self.present[call]) == len(call):
            seconds = max(self.score.seconds[member][at] for member, at in call)
            self.wish(now, Transfer(call, call, seconds))

    def wish(self, now: float, transfer: Transfer) -> None:
        """Queue a transfer that is ready at a moment."""
        first = min(index for _, index in transfer.members)
        self.num_wishes += 1
        heapq.heappush(self.wishes, (now, first, transfer.members, self.num_wishes, transfer))

    def grant(self) -> None:
        """Give links to all that want them now and stand equally far in their rows."""
        now, first, *_, transfer = heapq.heappop(self.wishes)
        batch = [transfer]
        while self.wishes and self.wishes[0][:2] == (now, first):
            batch.append(heapq.heappop(self.wishes)[-1])
        if len(self.score.seconds) < len(self.score.rows):
            wanted = [rank for each in batch if each.seconds for rank, _ in each.members]
            if len(wanted) > len(set(wanted)):
                raise Clash
        for each in batch:
            self.carry(each, now)

    def carry(self, transfer: Transfer, now: float) -> None:
        """Give a transfer the links of its members as soon as all are free."""
        start = stop = now
        if transfer.seconds:
            start = max(now, *(self.link_free_s[rank] for rank, _ in transfer.members))
            stop = start + transfer.seconds
        for rank, index in transfer.members:
            if transfer.seconds:
                self.link_free_s[rank] = stop
            if transfer.seconds or _goes_on(self.score.rows[rank][index]):
                self.note(rank, index, (start, stop), "link")
        self.done[transfer.key] = stop
        self.wake(transfer.key, stop)
        if transfer.members[0] in self.score.partners.seat:
            server, at = self.score.partners.source[transfer.members[0]]
            seat = self.score.partners.seat[transfer.members[0]]
            heapq.heappush(self.ready, (stop, seat, (self.score.speaker[server], at)))


def _goes_on(word: Instruction) -> bool:
    """Tell whether a rank does its next word while this one is on the link."""
    return isinstance(word, Send | Push) or (isinstance(word, Collective) and word.phase == "+")
