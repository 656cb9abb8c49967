"""Discrete-event simulation: ranks execute in order, links carry one transfer at a time, first come first served.

Every rank has one processor, which executes its instructions in order, and one link out, which a send or a collective
occupies while the processor continues; with several hosts it has two, one inside its host and one out of it::

    rank 0  cpu   |F0.0|x1.0>1|F0.1|...              send copies to the link, then the processor continues
            link        |=====x1.0=====|             occupied until the message has arrived
    rank 1  cpu   |wait................|F1.0|        x1.0<0 completes when the transfer does

The loop of :meth:`EventSimulator.run` takes the earliest of three queues::

    pool.next_event_s   activities under contention that end     -> finish
    ready_queue         ranks that can continue, pushes          -> resume
    link_requests       transfers that all members are ready for -> assign_links

Everything that happens on processors at one moment happens before links are assigned at that moment, and links go to
the instruction that comes first in its rank program. So nothing depends on the numbers of ranks, so that
one rank of a class can represent all of them (:mod:`counterpoint.program.rank_classes`).

The disk of a rank works while its processor does (:mod:`counterpoint.simulator.disk_queue`).

Shared resources slow down those that use them at the same time (:mod:`counterpoint.simulator.contention`): the cores
of a host, and its network card in each direction. Without shared resources the end of an instruction is known when
it starts, and no activity enters the pool.
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
    Fetch,
    Forward,
    Free,
    Offload,
    Pull,
    Push,
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    Update,
)
from counterpoint.program.trace import Lane
from counterpoint.ps.consistency import allows_lead
from counterpoint.simulator.contention import CpuDemand, LinkId, ResourceUse, RunQueue, SharedResourcePool
from counterpoint.simulator.disk_queue import find_disk_queues, runs_beside_computing
from counterpoint.simulator.sim_input import LinkTransfer, SimInput, WaitKey, is_async, lane_of

Interval: TypeAlias = tuple[int, float, float, Lane]
"""Index of an instruction, start, stop, lane."""

_RESUME = 1 << 60
"""In place of a push slot, for a rank that continues; it is larger than any slot, so that pushes arrive first."""


@dataclass(frozen=True, slots=True)
class RunningInstruction:
    """An instruction that computes under contention; with the slot of the push that a server applies."""

    location: Location
    start_s: float
    slot: int | None


class SymmetryBroken(Exception):  # noqa: N818 - not an error: all ranks are simulated instead
    """Two ranks of one class request one link at the same moment, so that rank numbers would decide."""


class EventSimulator:
    """Progress of each representative, transfers under way, and the queues of events."""

    def __init__(self, sim_input: SimInput) -> None:
        self.sim_input = sim_input
        self.now = 0.0
        self.cursors = dict.fromkeys(sim_input.seconds, 0)
        self.ready_s = dict.fromkeys(sim_input.seconds, 0.0)
        self.run_queue = RunQueue(sim_input.seconds)
        self.intervals: dict[int, list[Interval]] = {rank: [] for rank in sim_input.seconds}
        self.completed_s: dict[WaitKey, float] = {}
        self.arrived: defaultdict[WaitKey, set[Location]] = defaultdict(set)
        self.waiters: defaultdict[WaitKey, list[int]] = defaultdict(list)
        self.pending_pushes: defaultdict[Location, deque[int]] = defaultdict(deque)
        self.num_served: Counter[Location] = Counter()
        self.held_slots: defaultdict[tuple[Location, int], list[int]] = defaultdict(list)
        self.collective_keys: dict[int, tuple[Location, ...]] = {}
        self.ready_queue: list[tuple[float, int, Location]] = [(0.0, _RESUME, (rank, 0)) for rank in sim_input.seconds]
        self.link_requests: list[tuple[float, int, tuple[Location, ...], int, LinkTransfer]] = []
        self.num_link_requests = 0
        self.link_free_s: defaultdict[LinkId, float] = defaultdict(float)
        self.link_queues: defaultdict[LinkId, deque[LinkTransfer]] = defaultdict(deque)
        self.departed_s: dict[WaitKey, float] = {}
        self.pool: SharedResourcePool[RunningInstruction | LinkTransfer] = SharedResourcePool()
        self.disks = find_disk_queues(sim_input.rank_instructions, list(sim_input.seconds))
        self.has_contention = sim_input.resources.is_oversubscribed or sim_input.resources.has_shared_nics

    def run(self) -> None:
        """Run all ranks to the end of their instructions, or until they stall.

        Raises:
            SymmetryBroken: ranks of one class would behave differently.
        """
        while True:
            ready_s = self.ready_queue[0][0] if self.ready_queue else math.inf
            requested_s = self.link_requests[0][0] if self.link_requests else math.inf
            finished_s = self.pool.next_event_s if self.has_contention else math.inf
            next_s = min(finished_s, ready_s, requested_s)
            if self.has_contention and next_s > self.now and not self.pool.has_current_rates:
                self.pool.update_rates(self.now)
            elif next_s == math.inf:
                return
            else:
                self.now = next_s
                if finished_s == next_s:
                    self.finish(next_s)
                elif ready_s == next_s:
                    self.resume()
                else:
                    self.assign_links()

    @property
    def stalled_ranks(self) -> list[int]:
        """The representatives that never reached the end of their instructions."""
        return [rank for rank, index in self.cursors.items() if index < len(self.sim_input.rank_instructions[rank])]

    def finish(self, now: float) -> None:
        """Complete computations and transfers under contention that end now."""
        for owner in self.pool.pop_finished(now):
            match owner:
                case RunningInstruction(location, start_s, slot):
                    self.record(*location, (start_s, now), lane_of(self.sim_input.instruction(location)))
                    if slot is None:
                        self.send(location, now)
                        self.cursors[location[0]] += 1
                        self.schedule(location[0], now)
                    else:
                        self.reply(location, slot, now)
                case LinkTransfer():
                    for link in owner.links:
                        self.link_queues[link].popleft()
                    self.deliver(owner, self.departed_s[owner.key], now)
                    for link in owner.links:
                        if self.link_queues[link]:
                            self.depart(self.link_queues[link][0], now)

    def resume(self) -> None:
        """Continue the rank that is ready first, or deliver a push to its server."""
        now, slot, (rank, index) = heapq.heappop(self.ready_queue)
        if slot == _RESUME:
            self.advance(rank, now)
        else:
            self.pending_pushes[rank, index].append(slot)
            self.notify(("pushed", rank, index), now)

    def notify(self, key: WaitKey, now: float) -> None:
        """Wake all ranks that wait for something."""
        for rank in self.waiters.pop(key, ()):
            heapq.heappush(self.ready_queue, (now, _RESUME, (rank, 0)))

    def schedule(self, rank: int, until: float) -> None:
        """Continue a rank at a later moment."""
        self.ready_s[rank] = until
        heapq.heappush(self.ready_queue, (until, _RESUME, (rank, 0)))

    def advance(self, rank: int, now: float) -> None:
        """Execute instructions of a rank until one takes time or has to wait."""
        while self.cursors[rank] < len(self.sim_input.rank_instructions[rank]):
            if rank in self.disks and self.await_disk(rank, now):
                return
            until = self.start_instruction(rank, now)
            if until is None:
                return
            self.cursors[rank] += 1
            self.ready_s[rank] = until
            if until > now:
                self.schedule(rank, until)
                return

    def start_instruction(self, rank: int, now: float) -> float | None:  # noqa: C901, PLR0911, PLR0912 - one case for each instruction
        """Start the next instruction; return when the rank continues, or None if other events decide that."""
        index = self.cursors[rank]
        instruction = self.sim_input.rank_instructions[rank][index]
        match instruction:
            case Forward() | Recompute() | Backward() | Update():
                return self.compute((rank, index), self.sim_input.cpu_demand(rank, index), now)
            case Send() | Push():
                self.send((rank, index), now, is_start=True)
                until = self.compute((rank, index), self.sim_input.cpu_demand(rank, index), now)
                if until is not None:
                    self.send((rank, index), until)
                return until
            case Recv():
                source, source_index = self.sim_input.matches.producer[rank, index]
                return self.receive(rank, (self.sim_input.representative[source], source_index), now)
            case Collective(phase="wait"):
                return self.receive(rank, self.collective_key(self.sim_input.matches.producer[rank, index]), now)
            case Collective(phase="start"):
                self.join_collective(rank, index, now)
                return now
            case Collective() | Commit():
                call = self.collective_key((rank, index))
                if (rank, index) not in self.arrived[call]:
                    self.join_collective(rank, index, now)
                return self.receive(rank, call, now)
            case Pull():
                source, source_index = self.sim_input.matches.producer[rank, index]
                key = (
                    "reply",
                    self.sim_input.representative[source],
                    source_index,
                    self.sim_input.matches.slot[rank, index],
                )
                return self.receive(rank, key, now)
            case ApplyPushes():
                return self.apply_push(rank, instruction, now)
            case Fetch() | Offload() if runs_beside_computing(instruction):
                return self.use_disk(rank, index, now)
            case Free() | SwapGradBuffers() | Fetch() | Offload():
                return self.compute((rank, index), self.sim_input.cpu_demand(rank, index), now)

    def use_disk(self, rank: int, index: int, now: float) -> float:
        """Start to read or to write; return when the rank continues."""
        start, stop, continues_s = self.disks[rank].start(index, self.sim_input.seconds[rank][index], now)
        self.record(rank, index, (start, stop), "link")
        if continues_s > now:
            self.record(rank, index, (now, continues_s), "wait")
        return continues_s

    def await_disk(self, rank: int, now: float) -> bool:
        """Return whether the next instruction of a rank has to wait for the disk; then the rank continues later."""
        read_s = self.disks[rank].await_read(self.cursors[rank], now)
        if read_s > now:
            self.record(rank, self.cursors[rank], (now, read_s), "wait")
            self.schedule(rank, read_s)
        return read_s > now

    def compute(self, location: Location, demand: CpuDemand, now: float, slot: int | None = None) -> float | None:
        """Occupy the processor of a rank; return until when, or None if contention may extend it."""
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
        """Request the link of a message: when the send starts if it is streamed, otherwise once it has been written."""
        if (
            isinstance(self.sim_input.instruction(location), Send | Push)
            and self.sim_input.cpu_demand(*location).is_streamed == is_start
        ):
            self.request_links(now, self.sim_input.message_transfer(*location))

    def receive(self, rank: int, key: WaitKey, now: float) -> float | None:
        """Let a rank receive what it waits for and continue if it is complete; otherwise let it sleep."""
        if self.await_done(rank, key, now) is None:
            return None
        index = self.cursors[rank]
        return self.compute((rank, index), self.sim_input.cpu_demand(rank, index), now)

    def apply_push(self, rank: int, instruction: ApplyPushes, now: float) -> float | None:
        """Apply the push that arrived first and reply; continue when all workers have been served."""
        location = (rank, self.cursors[rank])
        if self.pending_pushes[location]:
            slot = self.pending_pushes[location].popleft()
            demand, _ = self.sim_input.server_reply(location, slot)
            if self.ready_s[rank] < now:
                self.run_queue.requeue(rank, now)
                self.record(*location, (self.ready_s[rank], now), "wait")
            until = self.compute(location, demand, now, slot)
            if until is not None:
                self.reply(location, slot, until)
            return None
        if self.num_served[location] == len(instruction.workers) * len(instruction.units):
            return now
        self.waiters["pushed", *location].append(rank)
        return None

    def reply(self, location: Location, slot: int, now: float) -> None:
        """Send the parameters back to a worker; with staleness 0 to all workers, once all pushes have been applied."""
        instruction = self.sim_input.instruction(location)
        assert isinstance(instruction, ApplyPushes), "only servers reply"
        slots = self.held_slots[location, slot % len(instruction.units)]
        slots.append(slot)
        lead = int(len(slots) < len(instruction.workers))  # each worker pushes once
        if allows_lead(instruction.staleness, lead):
            for held_slot in slots if instruction.replies else ():
                self.request_links(now, self.sim_input.server_reply(location, held_slot)[1])
            slots.clear()
        self.num_served[location] += 1
        self.schedule(location[0], now)

    def record(self, rank: int, index: int, times: tuple[float, float], lane: Lane) -> None:
        """Record what a rank did, from when to when."""
        self.intervals[rank].append((index, *times, lane))

    def await_done(self, rank: int, key: WaitKey, now: float) -> float | None:
        """Return now if something is complete; otherwise let the rank sleep until then."""
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
        """Return the identity of a collective: the locations of its members, each by its representative."""
        collective_id = self.sim_input.matches.collective_id[location]
        if collective_id not in self.collective_keys:
            participants = self.sim_input.matches.participants[collective_id]
            self.collective_keys[collective_id] = tuple(
                sorted({(self.sim_input.representative[rank], index) for rank, index in participants})
            )
        return self.collective_keys[collective_id]

    def join_collective(self, rank: int, index: int, now: float) -> None:
        """Let a rank arrive at a collective; the last member requests the links of all."""
        key = self.collective_key((rank, index))
        self.arrived[key].add((rank, index))
        if len(self.arrived[key]) == len(key):
            self.request_links(
                now, self.sim_input.collective_transfer(self.sim_input.matches.collective_id[rank, index], key)
            )

    def request_links(self, now: float, transfer: LinkTransfer) -> None:
        """Queue a transfer that is ready now."""
        first = min(index for _, index in transfer.members)
        self.num_link_requests += 1
        heapq.heappush(self.link_requests, (now, first, transfer.members, self.num_link_requests, transfer))

    def assign_links(self) -> None:
        """Assign links to the transfers that request them now and come first in their rank programs."""
        now, first, *_, transfer = heapq.heappop(self.link_requests)
        batch = [transfer]
        while self.link_requests and self.link_requests[0][:2] == (now, first):
            batch.append(heapq.heappop(self.link_requests)[-1])
        if len(self.sim_input.seconds) < len(self.sim_input.rank_instructions):
            requested = [link for member in batch if member.seconds for link in member.links]
            if len(requested) > len(set(requested)):
                raise SymmetryBroken
        for member in batch:
            self.transfer(member, now)

    def transfer(self, transfer: LinkTransfer, now: float) -> None:
        """Start a transfer as soon as all its links are free; without shared links its end is known at once."""
        if not transfer.seconds:
            self.deliver(transfer, now, now)
        elif self.sim_input.resources.has_shared_nics:
            for link in transfer.links:
                self.link_queues[link].append(transfer)
            self.depart(transfer, now)
        else:
            links = transfer.links
            start = max([now, *[self.link_free_s[link] for link in links]])
            stop = start + transfer.seconds
            for link in links:
                self.link_free_s[link] = stop
            self.deliver(transfer, start, stop)

    def depart(self, transfer: LinkTransfer, now: float) -> None:
        """Start a transfer if it is first in the queues of all its links."""
        if transfer.key in self.departed_s or any(self.link_queues[link][0] is not transfer for link in transfer.links):
            return
        self.departed_s[transfer.key] = now
        if transfer.uses:
            private_s = transfer.seconds - transfer.shared_link_s
            self.pool.start(transfer, now, transfer.shared_link_s, transfer.uses, delay_s=private_s)
        else:
            self.pool.start(transfer, now, transfer.seconds, ())

    def deliver(self, transfer: LinkTransfer, start: float, stop: float) -> None:
        """Complete a transfer and wake all ranks that wait for it."""
        for rank, index in transfer.members:
            if transfer.seconds or is_async(self.sim_input.rank_instructions[rank][index]):
                self.record(rank, index, (start, stop), "link")
        self.completed_s[transfer.key] = stop
        self.notify(transfer.key, stop)
        if transfer.members[0] in self.sim_input.matches.slot:
            server, server_index = self.sim_input.matches.producer[transfer.members[0]]
            slot = self.sim_input.matches.slot[transfer.members[0]]
            heapq.heappush(self.ready_queue, (stop, slot, (self.sim_input.representative[server], server_index)))
