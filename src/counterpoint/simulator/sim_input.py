"""Input of the event simulator: instructions, which of them communicate with each other, and what each costs."""

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
    Fetch,
    Forward,
    Free,
    Instruction,
    Offload,
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
"""What an instruction may wait for: the location of a send, the locations of a collective, or a server's reply."""


STREAMING_BUSY_FRACTION = 0.5
"""CPU fraction of each end of a message larger than the pipe: one end writes a piece while the other waits."""

WHOLE = Fraction(1)


@dataclass(frozen=True, slots=True)
class LinkTransfer:
    """A message or a collective on the links of its members.

    Args:
        key: identifies it.
        members: locations of the instructions that it belongs to, whose ranks' links it occupies.
        seconds: duration without contention.
        link_index: which link of each rank it occupies, see :data:`counterpoint.simulator.contention.LinkId`.
        shared_link_s: of these seconds, those on links that other ranks share.
        uses: these shared links.
    """

    key: WaitKey
    members: tuple[Location, ...]
    seconds: float
    link_index: int = 0
    shared_link_s: float = 0.0
    uses: tuple[ResourceUse, ...] = ()

    @property
    def links(self) -> list[LinkId]:
        """The links that only this transfer uses while it lasts."""
        return [(rank, self.link_index) for rank, _ in self.members]


@dataclass(frozen=True, slots=True)
class SimInput:
    """Instructions of all ranks with everything that the event simulator needs to know of them.

    Args:
        rank_instructions: the unrolled instructions of each rank.
        matches: which instructions communicate with each other.
        representative: for each rank the representative of its class.
        seconds: for each representative the seconds of each instruction, on the processor or on the link.
        shared_link_s: likewise, of these the seconds on links that ranks share; empty where they share none.
        cpu_demands: likewise, the CPU time on the rank itself.
        costs: for what a server does with each push.
        resources: what ranks share.
    """

    rank_instructions: Sequence[Instructions]
    matches: CommMatches
    representative: Sequence[int]
    seconds: Mapping[int, Sequence[float]]
    shared_link_s: Mapping[int, Sequence[float]]
    cpu_demands: Mapping[int, Sequence[CpuDemand]]
    costs: CostModel
    resources: SharedResources

    def instruction(self, location: Location) -> Instruction:
        """Return the instruction at a location."""
        return self.rank_instructions[location[0]][location[1]]

    def cpu_demand(self, rank: int, index: int) -> CpuDemand:
        """Return the CPU demand of an instruction of a representative."""
        return self.cpu_demands[rank][index]

    def message_transfer(self, rank: int, index: int) -> LinkTransfer:
        """Return the transfer of a send or a push of a representative."""
        location, seconds = (rank, index), self.seconds[rank][index]
        if not self.resources.cluster.levels:
            return LinkTransfer(location, (location,), seconds)
        instruction = self.rank_instructions[rank][index]
        assert isinstance(instruction, Send | Push), "only sends and pushes are messages"
        return self._transfer(location, location, (rank, instruction.peer), (seconds, self._shared_link_s(location)))

    def collective_transfer(self, collective_id: int, locations: tuple[Location, ...]) -> LinkTransfer:
        """Return the transfer of a collective; ``locations`` are those of its representatives."""
        rank, index = max(locations, key=lambda location: self.seconds[location[0]][location[1]])
        seconds, shared_link_s = self.seconds[rank][index], self._shared_link_s((rank, index))
        if not self.resources.cluster.levels:
            return LinkTransfer(locations, locations, seconds)
        members = self.matches.participants[collective_id]
        uses = self.resources.collective_uses(members) if shared_link_s else ()
        ranks = tuple([member_rank for member_rank, _ in members])
        return LinkTransfer(locations, locations, seconds, self.resources.link_index(ranks), shared_link_s, uses)

    def server_reply(self, server: Location, slot: int) -> tuple[CpuDemand, LinkTransfer]:
        """Return the CPU demand of applying the push in a slot of a server, and the transfer of the reply."""
        rank, index = server
        instruction = self.rank_instructions[rank][index]
        assert isinstance(instruction, ApplyPushes), "only servers reply"
        unit, worker = (
            instruction.units[slot % len(instruction.units)],
            instruction.workers[slot // len(instruction.units)],
        )
        update_s, reply_s = self.costs.server_update_s(unit, rank, worker)
        if instruction.replies:  # the worker reads a large reply while the server writes it
            update_s += self.costs.cpu_s(Send(weight(unit), worker), WHOLE, rank)
        demand = message_cpu_demand(Recv(grad(unit), worker), self.costs, rank, WHOLE, update_s)
        shared_link_s = 0.0
        if self.resources.has_shared_nics:
            shared_link_s = self.costs.shared_link_s(Send(weight(unit), worker), WHOLE, rank)
        transfer = self._transfer(("reply", *server, slot), server, (rank, worker), (reply_s, shared_link_s))
        seconds = demand.seconds / self.resources.cluster.speed(rank)
        return CpuDemand(seconds, busy_fraction=demand.busy_fraction, memory_s=seconds), transfer

    def _shared_link_s(self, location: Location) -> float:
        return self.shared_link_s[location[0]][location[1]] if self.shared_link_s else 0.0

    def _transfer(
        self, key: WaitKey, location: Location, ends: tuple[int, int], times: tuple[float, float]
    ) -> LinkTransfer:
        seconds, shared_link_s = times
        if not self.resources.cluster.levels:
            return LinkTransfer(key, (location,), seconds)
        uses = self.resources.message_uses(*ends) if shared_link_s else ()
        return LinkTransfer(key, (location,), seconds, self.resources.link_index(ends), shared_link_s, uses)


def message_cpu_demand(
    instruction: P2PInstruction, costs: CostModel, rank: int, fraction: Fraction = WHOLE, extra_s: float = 0.0
) -> CpuDemand:
    """Return the CPU demand of one end of a message.

    Args:
        instruction: that sends or receives it.
        costs: the cost model.
        rank: the rank that executes it.
        fraction: of the tensor that is communicated.
        extra_s: seconds of computing in addition to the message itself.
    """
    seconds, is_streamed = costs.cpu_s(instruction, fraction, rank), costs.is_streamed(instruction, rank)
    if not is_streamed or not seconds:
        return CpuDemand(seconds + extra_s, is_streamed)
    return CpuDemand(
        seconds + extra_s, is_streamed, (STREAMING_BUSY_FRACTION * seconds + extra_s) / (seconds + extra_s)
    )


def lane_of(instruction: Instruction) -> trace.Lane:
    """Return the lane of the trace that the CPU time of an instruction belongs to."""
    match instruction:
        case Forward() | Recompute() | Backward() | Update() | ApplyPushes():
            return "compute"
        case Send() | Push() | Free() | SwapGradBuffers() | Fetch() | Offload():
            return "link"
        case Recv() | Pull() | Commit() | Collective():
            return "wait"


def is_async(instruction: Instruction) -> bool:
    """Return whether a rank continues with its next instruction while this one is on the link."""
    return isinstance(instruction, Send | Push) or (
        isinstance(instruction, Collective) and instruction.phase == "start"
    )
