"""What each word of a row takes, on its rank's processor and on its links, while nothing else is in its way."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from counterpoint.model.spec import Unit
from counterpoint.program.fusion import fuses_with
from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Compute,
    Forward,
    Free,
    Group,
    Instruction,
    Pull,
    Push,
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    Update,
)
from counterpoint.program.program import Instructions
from counterpoint.program.units import host_shareable_units
from counterpoint.simulator.contention import NO_DEMAND, CpuDemand, has_shared_nics
from counterpoint.simulator.cost_model import CostModel
from counterpoint.simulator.memory_traffic import memory_passes
from counterpoint.simulator.network import P2PInstruction
from counterpoint.simulator.sim_input import WHOLE, message_cpu_demand
from counterpoint.world.cluster import Cluster

ZERO = Fraction(0)

UNIFORM_CLUSTER = Cluster()
"""Ranks that are alike, none in the way of another."""


@dataclass(frozen=True, slots=True)
class InstructionTimes:
    """What each word of a row takes, by where.

    Args:
        seconds: on its processor or its link.
        crossings: of that on links that ranks share; empty where they share none.
        hands: on the rank's own processor.
        least_s: what all of it takes at least, whatever others do: each processor and each link does one at a time.
    """

    seconds: Sequence[float]
    shared_link_s: Sequence[float]
    cpu_demands: Sequence[CpuDemand]
    lower_bound_s: float


def time_instructions(
    instructions: Instructions, costs: CostModel, *, rank: int = 0, cluster: Cluster = UNIFORM_CLUSTER
) -> InstructionTimes:
    """Return what the words of a row take.

    A gradient that was shared out is summed and applied in part. Adjacent words that are one call begin it once. What a
    block's backward makes for a microbatch is added to what others before it have left, until an update has used it.

    What a rank waits for it takes when it is there: a started collective where it is waited for. A rank that updates
    nothing has what a step costs beside its calls with its commit.

    Args:
        row: whose words.
        costs: of words.
        rank: whose row it is.
        cluster: how fast the rank computes, and what it shares with others.
    """
    timer = _InstructionTimer(instructions, costs, rank, cluster)
    passes = memory_passes(instructions, timer.shares_memory)
    before: Instruction | None = None
    times = []
    for word, moved in zip(instructions, passes, strict=True):
        times.append(timer.time(word, before, moved))
        before = word
    seconds, crossings, hands = map(list, zip(*times, strict=True)) if times else ([], [], [])
    return InstructionTimes(
        seconds, crossings if timer.has_shared_nics else [], hands, _lower_bound_s(instructions, times, cluster)
    )


def _lower_bound_s(instructions: Instructions, times: Sequence[_Duration], cluster: Cluster) -> float:
    """Return what a rank needs for its words one by one, or for those on a link: on hosts it has two of them."""
    own_s = inside_s = across_s = 0.0
    for word, (seconds, crossing_s, hand) in zip(instructions, times, strict=True):
        own_s += hand.seconds
        if isinstance(word, Compute | Update):
            continue
        if crossing_s:
            across_s += seconds
        else:
            inside_s += seconds
    return max(own_s, across_s, inside_s / 2 if cluster.levels else inside_s)


_Duration = tuple[float, float, CpuDemand]
"""Seconds of a word, of these those on links that ranks share, and what it asks of its rank's processor."""

_NO_TIME: _Duration = (0.0, 0.0, NO_DEMAND)


class _InstructionTimer:
    """Goes along a row; words that are equal but for their microbatches are looked at once."""

    def __init__(self, instructions: Instructions, costs: CostModel, rank: int, cluster: Cluster) -> None:
        self.costs, self.rank, self.cluster = costs, rank, cluster
        self.speed, self.has_shared_nics = cluster.speed(rank), has_shared_nics(cluster)
        self.has_updates = any(isinstance(word, Update) for word in instructions)
        self.shared_units = host_shareable_units(instructions)
        self.is_on_one_host: dict[Group, bool] = {}
        self.grad_fractions: dict[Unit, Fraction] = {}  # of gradients that were shared out
        self.blocks_with_grad: set[int] = set()  # blocks of which there is a gradient
        self.cache: dict[Hashable, _Duration] = {}

    def shares_memory(self, instruction: Collective) -> bool:
        """Tell whether the members of a collective have its value in common memory."""
        group = instruction.group
        if self.shared_units.get(instruction.tensor.blocks) != group:
            return False
        if group not in self.is_on_one_host:
            self.is_on_one_host[group] = len(set(map(self.cluster.host, group))) == 1
        return self.is_on_one_host[group]

    def time(self, instruction: Instruction, before: Instruction | None, passes: float) -> _Duration:
        """Note a word that goes over its rank's memory so many times, and return what it takes."""
        match instruction:
            case Forward() | Recompute() | Backward() | Update():
                return self.compute(instruction, is_launch=before is None or not fuses_with(before, instruction))
            case Collective():
                return self.collective(instruction, passes)
            case Send() | Push() | Recv() | Pull():
                code = "" if isinstance(instruction, Pull) else instruction.codec
                key = (
                    type(instruction),
                    instruction.tensor.name,
                    instruction.tensor.blocks,
                    instruction.peer,
                    code,
                    passes,
                )
                return self.cache[key] if key in self.cache else self.remember(key, self.message(instruction, passes))
            case Commit():
                own_s = 0.0 if self.has_updates else self.costs.launch_overhead_s(instruction)
                return self.with_link_time(
                    instruction, WHOLE, CpuDemand(self.costs.cpu_s(instruction, WHOLE, self.rank) + own_s)
                )
            case Free():
                own_s = passes * self.costs.memory_pass_s(instruction)
                return (0.0, 0.0, CpuDemand(own_s, memory_s=own_s)) if passes else _NO_TIME
            case ApplyPushes() | SwapGradBuffers():
                return _NO_TIME

    def compute(self, instruction: Forward | Recompute | Backward | Update, *, is_launch: bool) -> _Duration:
        """Return what a word takes that computes, and that begins a call or goes on with one."""
        part, adds, over_s = WHOLE, False, 0.0
        if isinstance(instruction, Update):
            self.blocks_with_grad.difference_update(instruction.unit)
            part = self.grad_fractions.get(instruction.unit, WHOLE)
            key: Hashable = (Update, instruction.unit, part.denominator, part.numerator, is_launch)
        elif isinstance(instruction, Backward):
            if instruction.part != "input":
                adds = instruction.block in self.blocks_with_grad
                self.blocks_with_grad.add(instruction.block)
            key = (Backward, instruction.block, instruction.part, adds, is_launch)
        else:
            key = (type(instruction), instruction.block, is_launch)
        if key in self.cache:
            return self.cache[key]
        seconds = self.costs.compute_s(instruction, part)
        if isinstance(instruction, Update):
            over_s = seconds - self.costs.compute_s(instruction, ZERO)
        seconds += self.costs.launch_overhead_s(instruction) if is_launch else 0.0
        if isinstance(instruction, Backward) and adds:
            seconds += self.costs.grad_accumulate_s(instruction.block)
        hand = CpuDemand(seconds / self.speed, memory_s=over_s / self.speed)
        return self.remember(key, (hand.seconds, 0.0, hand))

    def collective(self, instruction: Collective, passes: float) -> _Duration:
        """Return what a collective takes: started, it is on the link, and in hand where it is waited for."""
        value, part = instruction.tensor, WHOLE
        if value.name == "grad":
            part = self.grad_fractions.get(value.blocks, WHOLE) if instruction.op == "all_reduce" else WHOLE
        if instruction.op == "reduce_scatter" and instruction.phase != "wait":
            self.grad_fractions[value.blocks] = Fraction(1, len(instruction.group))
        parted = part.denominator, part.numerator
        key = (
            instruction.op,
            instruction.codec,
            value.name,
            value.blocks,
            instruction.group,
            instruction.phase,
            parted,
            passes,
        )
        if key in self.cache:
            return self.cache[key]
        hand = NO_DEMAND
        if instruction.phase != "start":
            has_one_copy = self.shares_memory(instruction)
            own_s = self.costs.cpu_s(instruction, part, self.rank, shares_memory=has_one_copy)
            meet_s = self.costs.cpu_s(instruction, ZERO, self.rank, shares_memory=has_one_copy)
            moved_s = passes * self.costs.memory_pass_s(instruction)
            hand = CpuDemand(own_s + moved_s, memory_s=own_s - meet_s + moved_s)
        return self.remember(
            key, (0.0, 0.0, hand) if instruction.phase == "wait" else self.with_link_time(instruction, part, hand)
        )

    def message(self, instruction: P2PInstruction, passes: float) -> _Duration:
        """Return what a message takes where it is said, or heard."""
        hand = message_cpu_demand(
            instruction, self.costs, self.rank, extra_s=passes * self.costs.memory_pass_s(instruction)
        )
        return (
            self.with_link_time(instruction, WHOLE, hand) if isinstance(instruction, Send | Push) else (0.0, 0.0, hand)
        )

    def with_link_time(
        self, instruction: Send | Push | Collective | Commit, fraction: Fraction, demand: CpuDemand
    ) -> _Duration:
        """Return what a word takes that is on a link."""
        crossing_s = self.costs.shared_link_s(instruction, fraction, self.rank) if self.has_shared_nics else 0.0
        return self.costs.link_s(instruction, fraction, self.rank), crossing_s, demand

    def remember(self, key: Hashable, duration: _Duration) -> _Duration:
        """Return what a word takes, and remember it for those like it."""
        self.cache[key] = duration
        return duration
