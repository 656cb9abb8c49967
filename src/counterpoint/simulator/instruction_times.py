"""Time each instruction of a rank, on its processor and on its links, without contention."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from counterpoint.model.spec import Unit
from counterpoint.program.comm_volume import count_forwards
from counterpoint.program.fusion import fuses_with
from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Compute,
    Fetch,
    Forward,
    Free,
    Group,
    Instruction,
    Offload,
    Pull,
    Push,
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    Update,
)
from counterpoint.program.program import Instructions
from counterpoint.program.units import communicated_tensor, freed_weights, host_shareable_units
from counterpoint.simulator.contention import NO_DEMAND, CpuDemand, has_shared_nics
from counterpoint.simulator.cost_model import CostModel
from counterpoint.simulator.disk_queue import runs_beside_computing
from counterpoint.simulator.memory_traffic import memory_passes
from counterpoint.simulator.network import P2PInstruction
from counterpoint.simulator.sim_input import WHOLE, message_cpu_demand
from counterpoint.world.cluster import Cluster

ZERO = Fraction(0)

UNIFORM_CLUSTER = Cluster()
"""Equal ranks that share nothing."""


@dataclass(frozen=True, slots=True)
class InstructionTimes:
    """Times of the instructions of one rank.

    Args:
        seconds: of each instruction on its processor or its link.
        shared_link_s: of these, the seconds on links that ranks share; empty where they share none.
        cpu_demands: CPU time on the rank itself.
        lower_bound_s: lower bound of all together: each processor, disk and link does one thing at a time.
    """

    seconds: Sequence[float]
    shared_link_s: Sequence[float]
    cpu_demands: Sequence[CpuDemand]
    lower_bound_s: float


def time_instructions(
    instructions: Instructions, costs: CostModel, *, rank: int = 0, cluster: Cluster = UNIFORM_CLUSTER
) -> InstructionTimes:
    """Return the times of the instructions of a rank.

    A gradient that was reduce-scattered is all-reduced and applied to the shard only. Adjacent instructions that are
    fused into one call pay its launch overhead once. A block's gradient of a microbatch is added to that of earlier
    ones, until an update has used it.

    The CPU time of a collective that was started falls to the instruction that waits for it. A rank that updates
    nothing pays the fixed cost of a step with its commit.

    Args:
        instructions: the instructions of the rank, in order.
        costs: the cost model.
        rank: the rank that executes them.
        cluster: how fast the rank computes, and what it shares with others.
    """
    timer = _InstructionTimer(instructions, costs, rank, cluster)
    passes = memory_passes(instructions, timer.shares_memory)
    previous: Instruction | None = None
    times = []
    for instruction, num_passes in zip(instructions, passes, strict=True):
        times.append(timer.time(instruction, previous, num_passes))
        previous = instruction
    seconds, shared_link_s, demands = map(list, zip(*times, strict=True)) if times else ([], [], [])
    return InstructionTimes(
        seconds, shared_link_s if timer.has_shared_nics else [], demands, _lower_bound_s(instructions, times, cluster)
    )


def _lower_bound_s(instructions: Instructions, times: Sequence[_Duration], cluster: Cluster) -> float:
    """Return the largest sum over a processor, disk or link; with hosts a rank has a link inside and one out of it."""
    cpu_s = inside_host_s = shared_s = disk_s = 0.0
    for instruction, (seconds, shared_link_s, demand) in zip(instructions, times, strict=True):
        cpu_s += demand.seconds
        if isinstance(instruction, Compute | Update | Fetch | Offload):
            disk_s += seconds if runs_beside_computing(instruction) else 0.0
            continue
        if shared_link_s:
            shared_s += seconds
        else:
            inside_host_s += seconds
    return max(cpu_s, disk_s, shared_s, inside_host_s / 2 if cluster.levels else inside_host_s)


_Duration = tuple[float, float, CpuDemand]
"""Seconds of an instruction, of these those on shared links, and its CPU demand."""

_NO_TIME: _Duration = (0.0, 0.0, NO_DEMAND)


class _InstructionTimer:
    """Times instructions in order; those that are equal but for their microbatches are timed once."""

    def __init__(self, instructions: Instructions, costs: CostModel, rank: int, cluster: Cluster) -> None:
        self.instructions, self.costs, self.rank, self.cluster = instructions, costs, rank, cluster
        self.speed, self.has_shared_nics = cluster.speed(rank), has_shared_nics(cluster)
        self.has_updates = any(isinstance(instruction, Update) for instruction in instructions)
        self.shared_units, self.freed = host_shareable_units(instructions), freed_weights(instructions)
        self.is_on_one_host: dict[Group, bool] = {}
        self.grad_fractions: dict[Unit, Fraction] = {}  # of gradients that were reduce-scattered
        self.weight_fractions = {  # of the shards that are offloaded
            one.tensor.blocks: Fraction(1, len(one.group))
            for one in instructions
            if isinstance(one, Collective) and one.tensor.name == "weight"
        }
        self.blocks_with_grad: set[int] = set()
        self.cache: dict[Hashable, _Duration] = {}

    def shares_memory(self, instruction: Collective) -> bool:
        """Return whether the members of a collective share its tensor in memory."""
        group = instruction.group
        if self.shared_units.get(instruction.tensor.blocks) != group:
            return False
        if group not in self.is_on_one_host:
            self.is_on_one_host[group] = len(set(map(self.cluster.host, group))) == 1
        return self.is_on_one_host[group]

    def time(self, instruction: Instruction, previous: Instruction | None, passes: float) -> _Duration:
        """Return the duration of an instruction that makes ``passes`` passes over memory."""
        match instruction:
            case Forward() | Recompute() | Backward() | Update():
                return self.compute(instruction, is_launch=previous is None or not fuses_with(previous, instruction))
            case Collective():
                return self.collective(instruction, passes)
            case Send() | Push() | Recv() | Pull():
                codec = "" if isinstance(instruction, Pull) else instruction.codec
                key = (
                    type(instruction),
                    instruction.tensor.name,
                    instruction.tensor.blocks,
                    instruction.peer,
                    codec,
                    passes,
                )
                return self.cache[key] if key in self.cache else self.remember(key, self.message(instruction, passes))
            case Commit():
                extra_s = 0.0 if self.has_updates else self.costs.launch_overhead_s(instruction)
                return self.with_link_time(
                    instruction, WHOLE, CpuDemand(self.costs.cpu_s(instruction, WHOLE, self.rank) + extra_s)
                )
            case Free():
                extra_s = passes * self.costs.memory_pass_s(instruction)
                return (0.0, 0.0, CpuDemand(extra_s, memory_s=extra_s)) if passes else _NO_TIME
            case Fetch() | Offload():
                fractions = {"state": self.grad_fractions, "weight": self.weight_fractions}
                fraction = fractions.get(instruction.tensor.name, {}).get(instruction.tensor.blocks, WHOLE)
                seconds = self.costs.offload_s(instruction, fraction)
                return seconds, 0.0, NO_DEMAND if runs_beside_computing(instruction) else CpuDemand(seconds)
            case ApplyPushes() | SwapGradBuffers():
                return _NO_TIME

    def compute(self, instruction: Forward | Recompute | Backward | Update, *, is_launch: bool) -> _Duration:
        """Return the duration of an instruction that computes and starts a call or is fused into one."""
        fraction, accumulates, memory_s = WHOLE, False, 0.0
        if isinstance(instruction, Update):
            self.blocks_with_grad.difference_update(instruction.unit)
            fraction = self.grad_fractions.get(instruction.unit, WHOLE)
            key: Hashable = (Update, instruction.unit, fraction.denominator, fraction.numerator, is_launch)
        elif isinstance(instruction, Backward):
            if instruction.part != "input":
                accumulates = instruction.block in self.blocks_with_grad
                self.blocks_with_grad.add(instruction.block)
            key = (Backward, instruction.block, instruction.part, accumulates, is_launch)
        else:
            key = (type(instruction), instruction.block, is_launch)
        if key in self.cache:
            return self.cache[key]
        seconds = self.costs.compute_s(instruction, fraction)
        if isinstance(instruction, Update):
            memory_s = seconds - self.costs.compute_s(instruction, ZERO)
        seconds += self.costs.launch_overhead_s(instruction) if is_launch else 0.0
        if isinstance(instruction, Backward) and accumulates:
            seconds += self.costs.grad_accumulate_s(instruction.block)
        demand = CpuDemand(seconds / self.speed, memory_s=memory_s / self.speed)
        return self.remember(key, (demand.seconds, 0.0, demand))

    def collective(self, instruction: Collective, passes: float) -> _Duration:
        """Return the duration of a collective: its link time where it starts, its CPU time where it is awaited."""
        tensor, fraction = instruction.tensor, WHOLE
        if not instruction.codec:
            tensor = communicated_tensor(instruction, self.freed)
        if instruction.tensor.name == "grad":
            fraction = self.grad_fractions.get(tensor.blocks, WHOLE) if instruction.op == "all_reduce" else WHOLE
        elif tensor.name == "out":  # its size is that of one microbatch
            fraction = Fraction(len(instruction.group) * count_forwards(self.instructions, tensor.blocks[0]))
        if instruction.op == "reduce_scatter" and instruction.phase != "wait":
            self.grad_fractions[tensor.blocks] = Fraction(1, len(instruction.group))
        fraction_key = fraction.denominator, fraction.numerator
        key = (
            instruction.op,
            instruction.codec,
            tensor.name,
            tensor.blocks,
            instruction.group,
            instruction.phase,
            fraction_key,
            passes,
        )
        if key in self.cache:
            return self.cache[key]
        if tensor is not instruction.tensor:
            instruction = replace(instruction, tensor=tensor)
        demand = NO_DEMAND
        if instruction.phase != "start":
            shares_memory = self.shares_memory(instruction)
            cpu_s = self.costs.cpu_s(instruction, fraction, self.rank, shares_memory=shares_memory)
            latency_s = self.costs.cpu_s(instruction, ZERO, self.rank, shares_memory=shares_memory)
            copy_s = passes * self.costs.memory_pass_s(instruction)
            demand = CpuDemand(cpu_s + copy_s, memory_s=cpu_s - latency_s + copy_s)
        return self.remember(
            key,
            (0.0, 0.0, demand) if instruction.phase == "wait" else self.with_link_time(instruction, fraction, demand),
        )

    def message(self, instruction: P2PInstruction, passes: float) -> _Duration:
        """Return the duration of one end of a message."""
        demand = message_cpu_demand(
            instruction, self.costs, self.rank, extra_s=passes * self.costs.memory_pass_s(instruction)
        )
        return (
            self.with_link_time(instruction, WHOLE, demand)
            if isinstance(instruction, Send | Push)
            else (0.0, 0.0, demand)
        )

    def with_link_time(
        self, instruction: Send | Push | Collective | Commit, fraction: Fraction, demand: CpuDemand
    ) -> _Duration:
        """Return the duration of an instruction that occupies links."""
        shared_link_s = self.costs.shared_link_s(instruction, fraction, self.rank) if self.has_shared_nics else 0.0
        return self.costs.link_s(instruction, fraction, self.rank), shared_link_s, demand

    def remember(self, key: Hashable, duration: _Duration) -> _Duration:
        """Return a duration after caching it for equal instructions."""
        self.cache[key] = duration
        return duration
