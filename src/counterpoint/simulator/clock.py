"""The virtual clock: rows go forward in time, links carry one thing at a time, first ready first served.

Every rank has one processor, which does its words in order, and one link out, which a send or a collective
occupies while the processor goes on; on several hosts it has two, to its own host and out of it. All that happens at
one moment on processors happens before any link is given away at that moment, and links are given to the word that
stands first in its row; so nothing depends on the numbers of ranks, which is what lets one rank of a class speak for
all (:mod:`counterpoint.program.symmetry`).

What ranks share slows down those that use it at one time (:mod:`counterpoint.simulator.sharing`): the cores of a host,
the card that leads out of it, in each direction. Where nothing is shared, it is known at once when a word ends.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import TypeAlias

from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Compute,
    Forward,
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
from counterpoint.program.partners import Place
from counterpoint.program.trace import Lane
from counterpoint.simulator import places
from counterpoint.simulator.hands import Hand
from counterpoint.simulator.lines import Lines
from counterpoint.simulator.score import Key, Score, Transfer, goes_on_beside, lane_of
from counterpoint.simulator.sharing import Pool, Use

Span: TypeAlias = tuple[int, float, float, Lane]
"""Index of a word, start, stop, lane."""

_GO = 1 << 60
"""Stands where a push has its seat in a server's order, for a rank that goes on; deliveries come first."""


@dataclass(frozen=True, slots=True)
class Work:
    """A word that is being computed since a moment; with the seat of a push where a server applies it."""

    place: Place
    began_s: float
    seat: int | None


class Clash(Exception):  # noqa: N818 - not an error: all ranks are simulated instead
    """Two ranks of one class want one link at one moment, so that their numbers would decide."""


class Clock:
    """How far each speaker has come, what is under way, and what happens next."""

    def __init__(self, score: Score) -> None:
        self.score = score
        self.now = 0.0
        self.cursor = dict.fromkeys(score.seconds, 0)
        self.came_s = dict.fromkeys(score.seconds, 0.0)
        self.lines = Lines(score.seconds)
        self.spans: dict[int, list[Span]] = {rank: [] for rank in score.seconds}
        self.done: dict[Key, float] = {}
        self.present: defaultdict[Key, set[Place]] = defaultdict(set)
        self.asleep: defaultdict[Key, list[int]] = defaultdict(list)
        self.pushed: defaultdict[Place, deque[int]] = defaultdict(deque)
        self.served: Counter[Place] = Counter()
        self.held: defaultdict[tuple[Place, int], list[int]] = defaultdict(list)  # seats that wait for slower ones
        self.calls: dict[int, tuple[Place, ...]] = {}
        self.ready: list[tuple[float, int, Place]] = [(0.0, _GO, (rank, 0)) for rank in score.seconds]
        self.wishes: list[tuple[float, int, tuple[Place, ...], int, Transfer]] = []
        self.num_wishes = 0
        self.free_s: defaultdict[places.Lane, float] = defaultdict(float)
        self.queues: defaultdict[places.Lane, deque[Transfer]] = defaultdict(deque)
        self.left_s: dict[Key, float] = {}
        self.pool: Pool[Work | Transfer] = Pool()
        self.shares = score.places.has_crowds or score.places.has_cards

    def run(self) -> None:
        """Play the rows to their end, as far as they go.

        Raises:
            Clash: ranks of one class would differ, see there.
        """
        while True:
            ready_s = self.ready[0][0] if self.ready else math.inf
            wished_s = self.wishes[0][0] if self.wishes else math.inf
            ended_s = self.pool.next_s if self.shares else math.inf
            soonest = min(ended_s, ready_s, wished_s)
            if self.shares and soonest > self.now and not self.pool.is_settled:
                self.pool.settle(self.now)
            elif soonest == math.inf:
                return
            else:
                self.now = soonest
                if ended_s == soonest:
                    self.end(soonest)
                elif ready_s == soonest:
                    self.go_on()
                else:
                    self.grant()

    @property
    def stuck(self) -> list[int]:
        """The speakers that never came to the end of their rows."""
        return [rank for rank, at in self.cursor.items() if at < len(self.score.rows[rank])]

    def end(self, now: float) -> None:
        """Let what is computed or crosses shared links end, where its time has come."""
        for owner in self.pool.ended(now):
            match owner:
                case Work(place, began_s, seat):
                    self.note(*place, (began_s, now), lane_of(self.score.word(place)))
                    if seat is None:
                        self.say(place, now)
                        self.cursor[place[0]] += 1
                        self.pause(place[0], now)
                    else:
                        self.answer(place, seat, now)
                case Transfer():
                    for lane in owner.lanes:
                        self.queues[lane].popleft()
                    self.arrive(owner, self.left_s[owner.key], now)
                    for lane in owner.lanes:
                        if self.queues[lane]:
                            self.leave(self.queues[lane][0], now)

    def go_on(self) -> None:
        """Let the rank that is ready first do its words, or a server get its push."""
        now, seat, (rank, index) = heapq.heappop(self.ready)
        if seat == _GO:
            self.advance(rank, now)
        else:
            self.pushed[rank, index].append(seat)
            self.wake(("pushed", rank, index), now)

    def wake(self, key: Key, now: float) -> None:
        """Let all that wait for something look again at a moment."""
        for rank in self.asleep.pop(key, ()):
            heapq.heappush(self.ready, (now, _GO, (rank, 0)))

    def pause(self, rank: int, until: float) -> None:
        """Let a rank go on at a moment."""
        self.came_s[rank] = until
        heapq.heappush(self.ready, (until, _GO, (rank, 0)))

    def advance(self, rank: int, now: float) -> None:
        """Let a rank do words until one takes time or has to wait."""
        while self.cursor[rank] < len(self.score.rows[rank]):
            until = self.perform(rank, now)
            if until is None:
                return
            self.cursor[rank] += 1
            self.came_s[rank] = until
            if until > now:
                self.pause(rank, until)
                return

    def perform(self, rank: int, now: float) -> float | None:  # noqa: C901, PLR0911, PLR0912 - one case for each instruction
        """Begin the next word; return when the rank goes on, or None when that depends on something else."""
        index = self.cursor[rank]
        word = self.score.rows[rank][index]
        match word:
            case Forward() | Recompute() | Backward() | Update():
                return self.work((rank, index), self.score.hand(rank, index), now)
            case Send() | Push():
                self.say((rank, index), now, begins=True)
                until = self.work((rank, index), self.score.hand(rank, index), now)
                if until is not None:
                    self.say((rank, index), until)
                return until
            case Recv():
                source, at = self.score.partners.source[rank, index]
                return self.hear(rank, (self.score.speaker[source], at), now)
            case Collective(phase="wait"):
                return self.hear(rank, self.call_of(self.score.partners.source[rank, index]), now)
            case Collective(phase="start"):
                self.join(rank, index, now)
                return now
            case Collective() | Commit():
                call = self.call_of((rank, index))
                if (rank, index) not in self.present[call]:
                    self.join(rank, index, now)
                return self.hear(rank, call, now)
            case Pull():
                source, at = self.score.partners.source[rank, index]
                key = ("answer", self.score.speaker[source], at, self.score.partners.seat[rank, index])
                return self.hear(rank, key, now)
            case Serve():
                return self.serve(rank, word, now)
            case Release() | Swap():
                return self.work((rank, index), self.score.hand(rank, index), now)

    def work(self, place: Place, hand: Hand, now: float, seat: int | None = None) -> float | None:
        """Let a rank's processor do something; return until when, or None where others of its host may slow it down."""
        seconds = hand.seconds
        if not seconds and seat is None and not isinstance(self.score.word(place), Compute | Update | Release | Swap):
            return now
        uses: tuple[Use, ...] = ()
        if seconds and self.shares:
            uses = self.score.places.cores(place[0], hand)
        if uses:
            self.pool.begin(Work(place, now, seat), now, seconds, uses, came_s=self.lines.stand(place[0], seconds, now))
            return None
        self.note(*place, (now, now + seconds), lane_of(self.score.word(place)))
        return now + seconds

    def say(self, place: Place, now: float, *, begins: bool = False) -> None:
        """Put a message on its link, if the word at a place is one and this is when: as it begins, or ready."""
        if isinstance(self.score.word(place), Send | Push) and self.score.hand(*place).is_streamed == begins:
            self.wish(now, self.score.message(*place))

    def hear(self, rank: int, key: Key, now: float) -> float | None:
        """Let a rank take what it waits for if that is done, and go on; else let it sleep until then."""
        if self.await_done(rank, key, now) is None:
            return None
        index = self.cursor[rank]
        return self.work((rank, index), self.score.hand(rank, index), now)

    def serve(self, rank: int, word: Serve, now: float) -> float | None:
        """Apply the push that came first and answer it; go on when all workers have been served."""
        place = (rank, self.cursor[rank])
        if self.pushed[place]:
            seat = self.pushed[place].popleft()
            hand, _ = self.score.answer(place, seat)
            if self.came_s[rank] < now:
                self.lines.leave(rank, now)
                self.note(*place, (self.came_s[rank], now), "wait")
            until = self.work(place, hand, now, seat)
            if until is not None:
                self.answer(place, seat, until)
            return None
        if self.served[place] == len(word.workers) * len(word.units):
            return now
        self.asleep["pushed", *place].append(rank)
        return None

    def answer(self, place: Place, seat: int, now: float) -> None:
        """Send the weights back to whom a server has served, and let it go on; all at once where all are waited for."""
        word = self.score.word(place)
        assert isinstance(word, Serve), "nothing else answers"
        held = self.held[place, seat % len(word.units)]
        held.append(seat)
        if word.staleness != 0 or len(held) == len(word.workers):
            for one in held if word.answers else ():
                self.wish(now, self.score.answer(place, one)[1])
            held.clear()
        self.served[place] += 1
        self.pause(place[0], now)

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
        if self.came_s[rank] < now:
            self.lines.leave(rank, now)
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
            self.wish(now, self.score.call(self.score.partners.call[rank, index], call))

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
            wanted = [lane for each in batch if each.seconds for lane in each.lanes]
            if len(wanted) > len(set(wanted)):
                raise Clash
        for each in batch:
            self.carry(each, now)

    def carry(self, transfer: Transfer, now: float) -> None:
        """Give a transfer the links of its members as soon as all are free; those who share none know until when."""
        if not transfer.seconds:
            self.arrive(transfer, now, now)
        elif self.score.places.has_cards:
            for lane in transfer.lanes:
                self.queues[lane].append(transfer)
            self.leave(transfer, now)
        else:
            lanes = transfer.lanes
            start = max([now, *[self.free_s[lane] for lane in lanes]])
            stop = start + transfer.seconds
            for lane in lanes:
                self.free_s[lane] = stop
            self.arrive(transfer, start, stop)

    def leave(self, transfer: Transfer, now: float) -> None:
        """Put a transfer under way if it is first in line for all of its links."""
        if transfer.key in self.left_s or any(self.queues[lane][0] is not transfer for lane in transfer.lanes):
            return
        self.left_s[transfer.key] = now
        if transfer.uses:
            apart_s = transfer.seconds - transfer.crossing_s
            self.pool.begin(transfer, now, transfer.crossing_s, transfer.uses, apart_s=apart_s)
        else:
            self.pool.begin(transfer, now, transfer.seconds, ())

    def arrive(self, transfer: Transfer, start: float, stop: float) -> None:
        """Let a transfer be done at a moment; all that wait for it look again then."""
        for rank, index in transfer.members:
            if transfer.seconds or goes_on_beside(self.score.rows[rank][index]):
                self.note(rank, index, (start, stop), "link")
        self.done[transfer.key] = stop
        self.wake(transfer.key, stop)
        if transfer.members[0] in self.score.partners.seat:
            server, at = self.score.partners.source[transfer.members[0]]
            seat = self.score.partners.seat[transfer.members[0]]
            heapq.heappush(self.ready, (stop, seat, (self.score.speaker[server], at)))
