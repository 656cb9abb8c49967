"""Calibrate the simulator's costs by a traced step, to simulate the same program with measured costs.

The two timelines then differ only in how ranks wait for each other, not in the speed of the machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import fmean, median
from typing import TypeAlias

from counterpoint.compiler.compile import CompiledPlan
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Compute,
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
    TensorRef,
    Update,
    weight,
)
from counterpoint.program.text import format_instruction, parse_instruction
from counterpoint.program.trace import Trace, TraceEvent
from counterpoint.simulator.network import CommInstruction, P2PInstruction
from counterpoint.simulator.simulate import simulate_variant

CostKey: TypeAlias = tuple[str, tuple[int, ...]]
"""The kind of a cost, and the blocks or ranks it is for; the same for all microbatches."""


def simulate_calibrated(compiled: CompiledPlan, measured: Trace, number: int = 0) -> Trace:
    """Simulate the program of a step with the costs that were measured in it."""
    return simulate_variant(compiled.variant_at(number), calibrate(compiled.model, measured))


@dataclass(frozen=True, slots=True)
class CalibratedCosts:
    """Measured seconds by cost key; an instruction that was not measured costs the mean of its kind.

    Args:
        seconds: of computation and of communication.
    """

    seconds: Mapping[CostKey, float]

    def compute_s(self, instruction: Compute | Update, fraction: Fraction) -> float:
        """Return the measured median; a part of a backward that was not measured costs half of a whole one."""
        key = cost_key(instruction)
        if (
            isinstance(instruction, Backward)
            and instruction.part
            and not any(kind == key[0] for kind, _ in self.seconds)
        ):
            return self.lookup(cost_key(replace(instruction, part=""))) / 2
        return self.lookup(key)

    def launch_overhead_s(self, instruction: Instruction) -> float:
        """Return 0: included in the measured call."""
        return 0.0

    def grad_accumulate_s(self, block: int) -> float:
        """Return 0: included in the measured backward."""
        return 0.0

    def link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return the measured minimum: longer times include waiting."""
        return self.lookup(cost_key(instruction))

    def shared_link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return 0: contention is included in the measured time."""
        return 0.0

    def cpu_s(
        self, instruction: CommInstruction, fraction: Fraction, rank: int, *, shares_memory: bool = False
    ) -> float:
        """Return 0: included in the measured time."""
        return 0.0

    def is_streamed(self, instruction: P2PInstruction, rank: int) -> bool:
        """Return False: the time of both ends was measured."""
        return False

    def memory_pass_s(self, instruction: CommInstruction | Free) -> float:
        """Return 0: included in the measured time."""
        return 0.0

    def offload_s(self, instruction: Fetch | Offload, fraction: Fraction) -> float:
        """Return the measured time; that of an update includes what it waits for."""
        return self.lookup((type(instruction).__name__, instruction.tensor.blocks))

    def server_update_s(self, unit: Unit, server: int, worker: int) -> tuple[float, float]:
        """Return the time of a reply; a server's own work cannot be separated from its waiting and counts as 0."""
        return 0.0, self.lookup(("pull", weight(unit).blocks))

    def lookup(self, key: CostKey) -> float:
        """Return the seconds of a key, or the mean of its kind; 0 if nothing of the kind was measured."""
        if key in self.seconds:
            return self.seconds[key]
        return fmean([s for (kind, _), s in self.seconds.items() if kind == key[0]] or [0.0])


def calibrate(model: ModelSpec, measured: Trace) -> CalibratedCosts:
    """Return the costs of a traced step: medians for computation, the fastest rank's time for communication."""
    computation: defaultdict[CostKey, list[float]] = defaultdict(list)
    communication: defaultdict[CostKey, list[float]] = defaultdict(list)
    async_seconds: defaultdict[tuple[int, str], float] = defaultdict(float)
    for event in measured.events:
        if event.is_copy:
            continue
        instructions = [parse_instruction(text) for text in event.text.split()]
        for key, seconds in split_by_work(instructions, event, model):
            computation[key].append(seconds)
        first = instructions[0]
        if isinstance(first, Collective) and event.lane == "link":
            continue  # it overlapped with computation; its cost is the duration of its wait
        if isinstance(first, Collective) and first.phase:
            async_seconds[event.rank, format_instruction(first).rstrip("+-")] += event.seconds
        elif isinstance(first, Send | Recv | Push | Pull | Commit | Collective):
            communication[cost_key(first)].append(event.seconds)
    for (_, text), seconds in async_seconds.items():
        communication[cost_key(parse_instruction(text))].append(seconds)
    costs = {key: median(times) for key, times in computation.items()}
    return CalibratedCosts(costs | {key: min(times) for key, times in communication.items()})


def split_by_work(
    instructions: Iterable[Instruction], event: TraceEvent, model: ModelSpec
) -> Iterator[tuple[CostKey, float]]:
    """Yield the time of an event's blocks and updates, in proportion to their work."""
    compute_instructions = [instruction for instruction in instructions if isinstance(instruction, Compute | Update)]
    works = [relative_work(instruction, model) for instruction in compute_instructions]
    total = sum(works)
    for instruction, instruction_work in zip(compute_instructions, works, strict=True):
        yield cost_key(instruction), event.seconds * (instruction_work / total if total else 1 / len(works))


def relative_work(instruction: Compute | Update, model: ModelSpec) -> float:
    """Return the work of an instruction, in a unit common to all instructions of its kind."""
    match instruction:
        case Forward(block) | Recompute(block) | Backward(block):
            return float(model.blocks[block].cost)
        case Update(unit):
            return float(model.unit_bytes(unit))


def cost_key(instruction: Instruction) -> CostKey:  # noqa: PLR0911 - one case each
    """Return the cost key of an instruction."""
    match instruction:
        case Forward(block):
            return "forward", (block,)
        case Recompute(block):
            return "recomputation", (block,)
        case Backward(block, part=part):
            return f"backward {part}".rstrip(), (block,)
        case Update(unit):
            return "update", unit
        case Send(value) | Recv(value):
            return message_key(value)
        case Push(value):
            return "push", value.blocks
        case Pull(value):
            return "pull", value.blocks
        case Commit(group):
            return "commit", group
        case Collective(tensor=value):
            return f"{instruction.op_name} {value.name}", value.blocks
        case _:
            return "", ()


def message_key(value: TensorRef) -> CostKey:
    """Return the key of a message: sending and receiving it are one transfer."""
    return f"message {value.name}", value.blocks
