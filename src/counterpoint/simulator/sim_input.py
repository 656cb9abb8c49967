"""What the clock plays: the words of those who speak, what each costs, and what it crosses on its way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from counterpoint.program import trace
from counterpoint.program.comm_matching import CommMatches, Location
from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Forward,
    Free,
    Instruction,
    Pull,
    Push,
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    Update,
    grad,
    weight,
)
from counterpoint.program.program import Instructions
from counterpoint.simulator.contention import CpuDemand, LinkId, ResourceUse, SharedResources
from counterpoint.simulator.cost_model import CostModel
from counterpoint.simulator.network import P2PInstruction

WaitKey: TypeAlias = tuple[object, ...]
"""What a word may wait for: the place of a send, the places of a call, or an answer."""


STREAMING_BUSY_FRACTION = 0.5
"""Of a message larger than the pipe that it goes through, one end puts a piece in while the other one waits for it."""

WHOLE = Fraction(1)


@dataclass(frozen=True, slots=True)
class LinkTransfer:
    """Something that wants links of its members for a while.

    Args:
        key: what it is.
        members: whose links, and for which words.
        seconds: how long it takes if nobody is in its way.
        way: which of a rank's ways out it takes, see :data:`counterpoint.simulator.contention.Lane`.
        crossing_s: of the seconds, how many it takes on links that others may cross at the same time.
        uses: these links.
    """

    key: WaitKey
    members: tuple[Location, ...]
    seconds: float
    link_index: int = 0
    shared_link_s: float = 0.0
    uses: tuple[ResourceUse, ...] = ()

    @property
    def links(self) -> list[LinkId]:
        """The ways that are its own while it is under way."""
        return [(rank, self.link_index) for rank, _ in self.members]


@dataclass(frozen=True, slots=True)
class SimInput:
    """What is played: rows, who meets whom, which rank speaks for which, and what each word costs.

    Args:
        rows: the flat rows of all ranks.
        partners: who meets whom in them.
        speaker: for each rank the one that speaks for its class.
        seconds: for each speaker the seconds of each of its words, on the processor or on the link.
        crossings: likewise, of these the seconds on links that ranks share; empty where they share none.
        hands: likewise, for how long they keep the rank's own processor busy.
        costs: for what a server does with each push.
        places: where the ranks are.
    """

    rank_instructions: Sequence[Instructions]
    partners: CommMatches
    representative: Sequence[int]
    seconds: Mapping[int, Sequence[float]]
    shared_link_s: Mapping[int, Sequence[float]]
    cpu_demands: Mapping[int, Sequence[CpuDemand]]
    costs: CostModel
    resources: SharedResources

    def instruction(self, location: Location) -> Instruction:
        """Return the word at a place."""
        return self.rank_instructions[location[0]][location[1]]

    def cpu_demand(self, rank: int, index: int) -> CpuDemand:
        """Return what a speaker's word asks of its processor."""
        return self.cpu_demands[rank][index]

    def message_transfer(self, rank: int, index: int) -> LinkTransfer:
        """Return what a send or a push of a speaker puts on the link."""
        place, seconds = (rank, index), self.seconds[rank][index]
        if not self.resources.cluster.levels:
            return LinkTransfer(place, (place,), seconds)
        word = self.rank_instructions[rank][index]
        assert isinstance(word, Send | Push), "nothing else is a message"
        return self._transfer(place, place, (rank, word.peer), (seconds, self._shared_link_s(place)))

    def collective_transfer(self, number: int, places: tuple[Location, ...]) -> LinkTransfer:
        """Return what a collective puts on the links of its members; ``places`` are those of their speakers."""
        rank, index = max(places, key=lambda place: self.seconds[place[0]][place[1]])
        seconds, crossing_s = self.seconds[rank][index], self._shared_link_s((rank, index))
        if not self.resources.cluster.levels:
            return LinkTransfer(places, places, seconds)
        members = self.partners.participants[number]
        uses = self.resources.collective_uses(members) if crossing_s else ()
        ranks = tuple([one for one, _ in members])
        return LinkTransfer(places, places, seconds, self.resources.link_index(ranks), crossing_s, uses)

    def server_reply(self, server: Location, slot: int) -> tuple[CpuDemand, LinkTransfer]:
        """Return what it takes a server to apply the push with a seat in its order, and its answer."""
        rank, index = server
        word = self.rank_instructions[rank][index]
        assert isinstance(word, ApplyPushes), "nothing else answers"
        unit, worker = word.units[slot % len(word.units)], word.workers[slot // len(word.units)]
        update_s, answer_s = self.costs.server_update_s(unit, rank, worker)
        if word.replies:  # while it puts in what is large, the worker takes it out: together they compute all the time
            update_s += self.costs.cpu_s(Send(weight(unit), worker), WHOLE, rank)
        hand = message_cpu_demand(Recv(grad(unit), worker), self.costs, rank, WHOLE, update_s)
        crossing_s = 0.0
        if self.resources.has_shared_nics:
            crossing_s = self.costs.shared_link_s(Send(weight(unit), worker), WHOLE, rank)
        transfer = self._transfer(("answer", *server, slot), server, (rank, worker), (answer_s, crossing_s))
        own_s = hand.seconds / self.resources.cluster.speed(rank)
        return CpuDemand(own_s, busy_fraction=hand.busy_fraction, memory_s=own_s), transfer

    def _shared_link_s(self, location: Location) -> float:
        return self.shared_link_s[location[0]][location[1]] if self.shared_link_s else 0.0

    def _transfer(
        self, key: WaitKey, location: Location, ends: tuple[int, int], times: tuple[float, float]
    ) -> LinkTransfer:
        seconds, crossing_s = times
        if not self.resources.cluster.levels:
            return LinkTransfer(key, (location,), seconds)
        uses = self.resources.message_uses(*ends) if crossing_s else ()
        return LinkTransfer(key, (location,), seconds, self.resources.link_index(ends), crossing_s, uses)


def message_cpu_demand(
    instruction: P2PInstruction, costs: CostModel, rank: int, fraction: Fraction = WHOLE, extra_s: float = 0.0
) -> CpuDemand:
    """Return what a message asks of a processor, with some seconds in which it does something else for it.

    Args:
        word: that says or hears the message.
        costs: of words.
        rank: whose word it is.
        part: of the value that is at hand.
        own_s: for how long it computes beside.
    """
    seconds, is_streamed = costs.cpu_s(instruction, fraction, rank), costs.is_streamed(instruction, rank)
    if not is_streamed or not seconds:
        return CpuDemand(seconds + extra_s, is_streamed)
    return CpuDemand(
        seconds + extra_s, is_streamed, (STREAMING_BUSY_FRACTION * seconds + extra_s) / (seconds + extra_s)
    )


def lane_of(instruction: Instruction) -> trace.Lane:
    """Return where the time goes that a word keeps its rank's processor busy."""
    match instruction:
        case Forward() | Recompute() | Backward() | Update() | ApplyPushes():
            return "compute"
        case Send() | Push() | Free() | SwapGradBuffers():
            return "link"
        case Recv() | Pull() | Commit() | Collective():
            return "wait"


def is_async(instruction: Instruction) -> bool:
    """Tell whether a rank does its next word while this one is on the link."""
    return isinstance(instruction, Send | Push) or (
        isinstance(instruction, Collective) and instruction.phase == "start"
    )
