"""The virtual clock: rows go forward in time, links carry one thing at a time, first ready first served.

Every rank has one processor, which does its words in order, and one link out, which a send or a collective
occupies while the processor goes on; on several hosts it has two, to its own host and out of it. All that happens at
one moment on processors happens before any link is given away at that moment, and links are given to the word that
stands first in its row; so nothing depends on the numbers of ranks, which is what lets one rank of a class speak for
all (:mod:`counterpoint.program.rank_classes`).

What ranks share slows down those that use it at one time (:mod:`counterpoint.simulator.contention`): the cores of a host,
the card that leads out of it, in each direction. Where nothing is shared, it is known at once when a word ends.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import TypeAlias

from counterpoint.program.comm_matching import Location
from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Compute,
    Forward,
    Free,
    Pull,
    Push,
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    Update,
)
from counterpoint.program.trace import Lane
from counterpoint.simulator import contention as places
from counterpoint.simulator.contention import CpuDemand, ResourceUse, RunQueue, SharedResourcePool
from counterpoint.simulator.sim_input import LinkTransfer, SimInput, WaitKey, is_async, lane_of

Interval: TypeAlias = tuple[int, float, float, Lane]
"""Index of a word, start, stop, lane."""

_RESUME = 1 << 60
"""Stands where a push has its seat in a server's order, for a rank that goes on; deliveries come first."""


@dataclass(frozen=True, slots=True)
class RunningInstruction:
    """A word that is being computed since a moment; with the seat of a push where a server applies it."""

    location: Location
    start_s: float
    slot: int | None


class SymmetryBroken(Exception):  # noqa: N818 - not an error: all ranks are simulated instead
    """Two ranks of one class want one link at one moment, so that their numbers would decide."""


class EventSimulator:
    """How far each speaker has come, what is under way, and what happens next."""

    def __init__(self, score: SimInput) -> None:
        self.sim_input = score
        self.now = 0.0
        self.cursors = dict.fromkeys(score.seconds, 0)
        self.ready_s = dict.fromkeys(score.seconds, 0.0)
        self.run_queue = RunQueue(score.seconds)
        self.intervals: dict[int, list[Interval]] = {rank: [] for rank in score.seconds}
        self.completed_s: dict[WaitKey, float] = {}
        self.arrived: defaultdict[WaitKey, set[Location]] = defaultdict(set)
        self.waiters: defaultdict[WaitKey, list[int]] = defaultdict(list)
        self.pending_pushes: defaultdict[Location, deque[int]] = defaultdict(deque)
        self.num_served: Counter[Location] = Counter()
        self.held_slots: defaultdict[tuple[Location, int], list[int]] = defaultdict(
            list
        )  # seats that wait for slower ones
        self.collective_keys: dict[int, tuple[Location, ...]] = {}
        self.ready_queue: list[tuple[float, int, Location]] = [(0.0, _RESUME, (rank, 0)) for rank in score.seconds]
        self.link_requests: list[tuple[float, int, tuple[Location, ...], int, LinkTransfer]] = []
        self.num_link_requests = 0
        self.link_free_s: defaultdict[places.LinkId, float] = defaultdict(float)
        self.link_queues: defaultdict[places.LinkId, deque[LinkTransfer]] = defaultdict(deque)
        self.departed_s: dict[WaitKey, float] = {}
        self.pool: SharedResourcePool[RunningInstruction | LinkTransfer] = SharedResourcePool()
        self.has_contention = score.resources.is_oversubscribed or score.resources.has_shared_nics

    def run(self) -> None:
        """Play the rows to their end, as far as they go.

        Raises:
            Clash: ranks of one class would differ, see there.
        """
        while True:
            ready_s = self.ready_queue[0][0] if self.ready_queue else math.inf
            wished_s = self.link_requests[0][0] if self.link_requests else math.inf
            ended_s = self.pool.next_event_s if self.has_contention else math.inf
            soonest = min(ended_s, ready_s, wished_s)
            if self.has_contention and soonest > self.now and not self.pool.has_current_rates:
                self.pool.update_rates(self.now)
            elif soonest == math.inf:
                return
            else:
                self.now = soonest
                if ended_s == soonest:
                    self.finish(soonest)
                elif ready_s == soonest:
                    self.resume()
                else:
                    self.assign_links()

    @property
    def stalled_ranks(self) -> list[int]:
        """The speakers that never came to the end of their rows."""
        return [rank for rank, at in self.cursors.items() if at < len(self.sim_input.rank_instructions[rank])]

    def finish(self, now: float) -> None:
        """Let what is computed or crosses shared links end, where its time has come."""
        for owner in self.pool.pop_finished(now):
            match owner:
                case RunningInstruction(place, began_s, seat):
                    self.record(*place, (began_s, now), lane_of(self.sim_input.instruction(place)))
                    if seat is None:
                        self.send(place, now)
                        self.cursors[place[0]] += 1
                        self.schedule(place[0], now)
                    else:
                        self.reply(place, seat, now)
                case LinkTransfer():
                    for lane in owner.links:
                        self.link_queues[lane].popleft()
                    self.deliver(owner, self.departed_s[owner.key], now)
                    for lane in owner.links:
                        if self.link_queues[lane]:
                            self.depart(self.link_queues[lane][0], now)

    def resume(self) -> None:
        """Let the rank that is ready first do its words, or a server get its push."""
        now, seat, (rank, index) = heapq.heappop(self.ready_queue)
        if seat == _RESUME:
            self.advance(rank, now)
        else:
            self.pending_pushes[rank, index].append(seat)
            self.notify(("pushed", rank, index), now)

    def notify(self, key: WaitKey, now: float) -> None:
        """Let all that wait for something look again at a moment."""
        for rank in self.waiters.pop(key, ()):
            heapq.heappush(self.ready_queue, (now, _RESUME, (rank, 0)))

    def schedule(self, rank: int, until: float) -> None:
        """Let a rank go on at a moment."""
        self.ready_s[rank] = until
        heapq.heappush(self.ready_queue, (until, _RESUME, (rank, 0)))

    def advance(self, rank: int, now: float) -> None:
        """Let a rank do words until one takes time or has to wait."""
        while self.cursors[rank] < len(self.sim_input.rank_instructions[rank]):
            until = self.start_instruction(rank, now)
            if until is None:
                return
            self.cursors[rank] += 1
            self.ready_s[rank] = until
            if until > now:
                self.schedule(rank, until)
                return

    def start_instruction(self, rank: int, now: float) -> float | None:  # noqa: C901, PLR0911, PLR0912 - one case for each instruction
        """Begin the next word; return when the rank goes on, or None when that depends on something else."""
        index = self.cursors[rank]
        word = self.sim_input.rank_instructions[rank][index]
        match word:
            case Forward() | Recompute() | Backward() | Update():
                return self.compute((rank, index), self.sim_input.cpu_demand(rank, index), now)
            case Send() | Push():
                self.send((rank, index), now, is_start=True)
                until = self.compute((rank, index), self.sim_input.cpu_demand(rank, index), now)
                if until is not None:
                    self.send((rank, index), until)
                return until
            case Recv():
                source, at = self.sim_input.partners.producer[rank, index]
                return self.receive(rank, (self.sim_input.representative[source], at), now)
            case Collective(phase="wait"):
                return self.receive(rank, self.collective_key(self.sim_input.partners.producer[rank, index]), now)
            case Collective(phase="start"):
                self.join_collective(rank, index, now)
                return now
            case Collective() | Commit():
                call = self.collective_key((rank, index))
                if (rank, index) not in self.arrived[call]:
                    self.join_collective(rank, index, now)
                return self.receive(rank, call, now)
            case Pull():
                source, at = self.sim_input.partners.producer[rank, index]
                key = ("answer", self.sim_input.representative[source], at, self.sim_input.partners.slot[rank, index])
                return self.receive(rank, key, now)
            case ApplyPushes():
                return self.apply_push(rank, word, now)
            case Free() | SwapGradBuffers():
                return self.compute((rank, index), self.sim_input.cpu_demand(rank, index), now)

    def compute(self, location: Location, demand: CpuDemand, now: float, slot: int | None = None) -> float | None:
        """Let a rank's processor do something; return until when, or None where others of its host may slow it down."""
        seconds = demand.seconds
        if (
            not seconds
            and slot is None
            and not isinstance(self.sim_input.instruction(location), Compute | Update | Free | SwapGradBuffers)
        ):
            return now
        uses: tuple[ResourceUse, ...] = ()
        if seconds and self.has_contention:
            uses = self.sim_input.resources.core_uses(location[0], demand)
        if uses:
            self.pool.start(
                RunningInstruction(location, now, slot),
                now,
                seconds,
                uses,
                queued_since_s=self.run_queue.enqueue(location[0], seconds, now),
            )
            return None
        self.record(*location, (now, now + seconds), lane_of(self.sim_input.instruction(location)))
        return now + seconds

    def send(self, location: Location, now: float, *, is_start: bool = False) -> None:
        """Put a message on its link, if the word at a place is one and this is when: as it begins, or ready."""
        if (
            isinstance(self.sim_input.instruction(location), Send | Push)
            and self.sim_input.cpu_demand(*location).is_streamed == is_start
        ):
            self.request_links(now, self.sim_input.message_transfer(*location))

    def receive(self, rank: int, key: WaitKey, now: float) -> float | None:
        """Let a rank take what it waits for if that is done, and go on; else let it sleep until then."""
        if self.await_done(rank, key, now) is None:
            return None
        index = self.cursors[rank]
        return self.compute((rank, index), self.sim_input.cpu_demand(rank, index), now)

    def apply_push(self, rank: int, instruction: ApplyPushes, now: float) -> float | None:
        """Apply the push that came first and answer it; go on when all workers have been served."""
        place = (rank, self.cursors[rank])
        if self.pending_pushes[place]:
            seat = self.pending_pushes[place].popleft()
            hand, _ = self.sim_input.server_reply(place, seat)
            if self.ready_s[rank] < now:
                self.run_queue.requeue(rank, now)
                self.record(*place, (self.ready_s[rank], now), "wait")
            until = self.compute(place, hand, now, seat)
            if until is not None:
                self.reply(place, seat, until)
            return None
        if self.num_served[place] == len(instruction.workers) * len(instruction.units):
            return now
        self.waiters["pushed", *place].append(rank)
        return None

    def reply(self, location: Location, slot: int, now: float) -> None:
        """Send the weights back to whom a server has served, and let it go on; all at once where all are waited for."""
        word = self.sim_input.instruction(location)
        assert isinstance(word, ApplyPushes), "nothing else answers"
        held = self.held_slots[location, slot % len(word.units)]
        held.append(slot)
        if word.staleness != 0 or len(held) == len(word.workers):
            for one in held if word.replies else ():
                self.request_links(now, self.sim_input.server_reply(location, one)[1])
            held.clear()
        self.num_served[location] += 1
        self.schedule(location[0], now)

    def record(self, rank: int, index: int, times: tuple[float, float], lane: Lane) -> None:
        """Keep what a rank did from when to when."""
        self.intervals[rank].append((index, *times, lane))

    def await_done(self, rank: int, key: WaitKey, now: float) -> float | None:
        """Let a rank go on if something is done, else let it sleep until then."""
        if self.completed_s.get(key, math.inf) > now:
            self.waiters[key].append(rank)
            if key in self.completed_s:
                self.notify(key, self.completed_s[key])
            return None
        if self.ready_s[rank] < now:
            self.run_queue.requeue(rank, now)
        self.record(rank, self.cursors[rank], (self.ready_s[rank], now), "wait")
        return now

    def collective_key(self, location: Location) -> tuple[Location, ...]:
        """Return what identifies a call: the places of its members, each by who speaks for it."""
        number = self.sim_input.partners.collective_id[location]
        if number not in self.collective_keys:
            members = self.sim_input.partners.participants[number]
            self.collective_keys[number] = tuple(
                sorted({(self.sim_input.representative[rank], index) for rank, index in members})
            )
        return self.collective_keys[number]

    def join_collective(self, rank: int, index: int, now: float) -> None:
        """Let a rank come to a call; the last one to come asks for the links of all."""
        call = self.collective_key((rank, index))
        self.arrived[call].add((rank, index))
        if len(self.arrived[call]) == len(call):
            self.request_links(
                now, self.sim_input.collective_transfer(self.sim_input.partners.collective_id[rank, index], call)
            )

    def request_links(self, now: float, transfer: LinkTransfer) -> None:
        """Queue a transfer that is ready at a moment."""
        first = min(index for _, index in transfer.members)
        self.num_link_requests += 1
        heapq.heappush(self.link_requests, (now, first, transfer.members, self.num_link_requests, transfer))

    def assign_links(self) -> None:
        """Give links to all that want them now and stand equally far in their rows."""
        now, first, *_, transfer = heapq.heappop(self.link_requests)
        batch = [transfer]
        while self.link_requests and self.link_requests[0][:2] == (now, first):
            batch.append(heapq.heappop(self.link_requests)[-1])
        if len(self.sim_input.seconds) < len(self.sim_input.rank_instructions):
            wanted = [lane for each in batch if each.seconds for lane in each.links]
            if len(wanted) > len(set(wanted)):
                raise SymmetryBroken
        for each in batch:
            self.transfer(each, now)

    def transfer(self, transfer: LinkTransfer, now: float) -> None:
        """Give a transfer the links of its members as soon as all are free; those who share none know until when."""
        if not transfer.seconds:
            self.deliver(transfer, now, now)
        elif self.sim_input.resources.has_shared_nics:
            for lane in transfer.links:
                self.link_queues[lane].append(transfer)
            self.depart(transfer, now)
        else:
            lanes = transfer.links
            start = max([now, *[self.link_free_s[lane] for lane in lanes]])
            stop = start + transfer.seconds
            for lane in lanes:
                self.link_free_s[lane] = stop
            self.deliver(transfer, start, stop)

    def depart(self, transfer: LinkTransfer, now: float) -> None:
        """Put a transfer under way if it is first in line for all of its links."""
        if transfer.key in self.departed_s or any(self.link_queues[lane][0] is not transfer for lane in transfer.links):
            return
        self.departed_s[transfer.key] = now
        if transfer.uses:
            apart_s = transfer.seconds - transfer.shared_link_s
            self.pool.start(transfer, now, transfer.shared_link_s, transfer.uses, delay_s=apart_s)
        else:
            self.pool.start(transfer, now, transfer.seconds, ())

    def deliver(self, transfer: LinkTransfer, start: float, stop: float) -> None:
        """Let a transfer be done at a moment; all that wait for it look again then."""
        for rank, index in transfer.members:
            if transfer.seconds or is_async(self.sim_input.rank_instructions[rank][index]):
                self.record(rank, index, (start, stop), "link")
        self.completed_s[transfer.key] = stop
        self.notify(transfer.key, stop)
        if transfer.members[0] in self.sim_input.partners.slot:
            server, at = self.sim_input.partners.producer[transfer.members[0]]
            seat = self.sim_input.partners.slot[transfer.members[0]]
            heapq.heappush(self.ready_queue, (stop, seat, (self.sim_input.representative[server], at)))
