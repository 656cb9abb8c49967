"""Costs read off a measured step, so that the simulator tells what the same program should have taken.

What then differs between the two timelines is not how fast the machine is but how ranks wait for each other.
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
    Forward,
    Free,
    Instruction,
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
"""What a cost is about: its kind, and the blocks or ranks it concerns; the same for all microbatches."""


def simulate_calibrated(compiled: CompiledPlan, measured: Trace, number: int = 0) -> Trace:
    """Return what the simulator makes of the program of a step with the costs that were measured in it."""
    return simulate_variant(compiled.variant_at(number), calibrate(compiled.model, measured))


@dataclass(frozen=True, slots=True)
class CalibratedCosts:
    """Seconds by what an instruction is about; a word that was not measured costs what its like cost on average.

    Args:
        seconds: of computing and of links.
    """

    seconds: Mapping[CostKey, float]

    def compute_s(self, instruction: Compute | Update, fraction: Fraction) -> float:
        """Return the median of what was measured; a part of a backward that was not takes half of a whole one."""
        key = cost_key(instruction)
        if (
            isinstance(instruction, Backward)
            and instruction.part
            and not any(kind == key[0] for kind, _ in self.seconds)
        ):
            return self.lookup(cost_key(replace(instruction, part=""))) / 2
        return self.lookup(key)

    def launch_overhead_s(self, instruction: Instruction) -> float:
        """Return nothing: a call was measured with what it costs to begin it."""
        return 0.0

    def grad_accumulate_s(self, block: int) -> float:
        """Return nothing: a backward was measured with what it adds its gradient to."""
        return 0.0

    def link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return the least that was measured: what took longer was waiting."""
        return self.lookup(cost_key(instruction))

    def shared_link_s(self, instruction: Send | Push | Collective | Commit, fraction: Fraction, rank: int) -> float:
        """Return nothing: what ranks shared is in what was measured."""
        return 0.0

    def cpu_s(
        self, instruction: CommInstruction, fraction: Fraction, rank: int, *, shares_memory: bool = False
    ) -> float:
        """Return nothing: what a word took was measured with all that it kept busy."""
        return 0.0

    def is_streamed(self, instruction: P2PInstruction, rank: int) -> bool:
        """Tell that none is: what both ends took was measured."""
        return False

    def memory_pass_s(self, instruction: CommInstruction | Free) -> float:
        """Return nothing: a word was measured with what it moved."""
        return 0.0

    def server_update_s(self, unit: Unit, server: int, worker: int) -> tuple[float, float]:
        """Return an answer's time; a server's own work cannot be told from its waiting, and counts as none."""
        return 0.0, self.lookup(("pull", weight(unit).blocks))

    def lookup(self, key: CostKey) -> float:
        """Return the seconds of a key, or the mean of its kind; 0 where nothing of the kind was measured."""
        if key in self.seconds:
            return self.seconds[key]
        return fmean([s for (kind, _), s in self.seconds.items() if kind == key[0]] or [0.0])


def calibrate(model: ModelSpec, measured: Trace) -> CalibratedCosts:
    """Return costs: medians for computing, the fastest rank's time for what ranks do together."""
    computing: defaultdict[CostKey, list[float]] = defaultdict(list)
    together: defaultdict[CostKey, list[float]] = defaultdict(list)
    split: defaultdict[tuple[int, str], float] = defaultdict(float)
    for event in measured.events:
        words = [parse_instruction(word) for word in event.text.split()]
        for key, seconds in split_by_work(words, event, model):
            computing[key].append(seconds)
        first = words[0]
        if isinstance(first, Collective) and event.lane == "link":
            continue  # it was under way beside computing; what it cost is what its wait took
        if isinstance(first, Collective) and first.phase:
            split[event.rank, format_instruction(first).rstrip("+-")] += event.seconds
        elif isinstance(first, Send | Recv | Push | Pull | Commit | Collective):
            together[cost_key(first)].append(event.seconds)
    for (_, text), seconds in split.items():
        together[cost_key(parse_instruction(text))].append(seconds)
    found = {key: median(times) for key, times in computing.items()}
    return CalibratedCosts(found | {key: min(times) for key, times in together.items()})


def split_by_work(
    instructions: Iterable[Instruction], event: TraceEvent, model: ModelSpec
) -> Iterator[tuple[CostKey, float]]:
    """Yield the parts of an event's time that its blocks and updates took, each by its share of the work."""
    computes = [word for word in instructions if isinstance(word, Compute | Update)]
    work = [relative_work(word, model) for word in computes]
    total = sum(work)
    for word, share in zip(computes, work, strict=True):
        yield cost_key(word), event.seconds * (share / total if total else 1 / len(work))


def relative_work(instruction: Compute | Update, model: ModelSpec) -> float:
    """Return how much of a call's time is a word's, in any unit that all words of one kind share."""
    match instruction:
        case Forward(block) | Recompute(block) | Backward(block):
            return float(model.blocks[block].cost)
        case Update(unit):
            return float(model.unit_bytes(unit))


def cost_key(instruction: Instruction) -> CostKey:  # noqa: PLR0911 - one case each
    """Return what the cost of an instruction depends on."""
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
