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

from counterpoint.compiler.compile import Compiled
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Compute,
    Forward,
    Instruction,
    Pull,
    Push,
    Recompute,
    Recv,
    Release,
    Send,
    Update,
    Value,
    weight,
)
from counterpoint.program.text import format_instruction, parse_instruction
from counterpoint.program.trace import Event, Trace
from counterpoint.simulator.network import Message, Talk
from counterpoint.simulator.simulate import simulate_turn

Key: TypeAlias = tuple[str, tuple[int, ...]]
"""What a cost is about: its kind, and the blocks or ranks it concerns; the same for all microbatches."""


def simulated_beside(compiled: Compiled, measured: Trace, number: int = 0) -> Trace:
    """Return what the simulator makes of the program of a step with the costs that were measured in it."""
    return simulate_turn(compiled.turn_at(number), fit(compiled.model, measured))


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """Seconds by what an instruction is about; a word that was not measured costs what its like cost on average.

    Args:
        seconds: of computing and of links.
    """

    seconds: Mapping[Key, float]

    def compute_s(self, word: Compute | Update, part: Fraction) -> float:
        """Return the median of what was measured; a part of a backward that was not takes half of a whole one."""
        key = key_of(word)
        if isinstance(word, Backward) and word.part and not any(kind == key[0] for kind, _ in self.seconds):
            return self.like(key_of(replace(word, part=""))) / 2
        return self.like(key)

    def call_s(self, word: Instruction) -> float:
        """Return nothing: a call was measured with what it costs to begin it."""
        return 0.0

    def add_s(self, block: int) -> float:
        """Return nothing: a backward was measured with what it adds its gradient to."""
        return 0.0

    def link_s(self, word: Send | Push | Collective | Commit, part: Fraction, rank: int) -> float:
        """Return the least that was measured: what took longer was waiting."""
        return self.like(key_of(word))

    def crossing_s(self, word: Send | Push | Collective | Commit, part: Fraction, rank: int) -> float:
        """Return nothing: what ranks shared is in what was measured."""
        return 0.0

    def hand_s(self, word: Talk, part: Fraction, rank: int, *, has_one_copy: bool = False) -> float:
        """Return nothing: what a word took was measured with all that it kept busy."""
        return 0.0

    def is_streamed(self, word: Message, rank: int) -> bool:
        """Tell that none is: what both ends took was measured."""
        return False

    def pass_s(self, word: Talk | Release) -> float:
        """Return nothing: a word was measured with what it moved."""
        return 0.0

    def serve_s(self, unit: Unit, server: int, worker: int) -> tuple[float, float]:
        """Return an answer's time; a server's own work cannot be told from its waiting, and counts as none."""
        return 0.0, self.like(("pull", weight(unit).blocks))

    def like(self, key: Key) -> float:
        """Return the seconds of a key, or the mean of its kind; 0 where nothing of the kind was measured."""
        if key in self.seconds:
            return self.seconds[key]
        return fmean([s for (kind, _), s in self.seconds.items() if kind == key[0]] or [0.0])


def fit(model: ModelSpec, measured: Trace) -> FittedCosts:
    """Return costs: medians for computing, the fastest rank's time for what ranks do together."""
    computing: defaultdict[Key, list[float]] = defaultdict(list)
    together: defaultdict[Key, list[float]] = defaultdict(list)
    split: defaultdict[tuple[int, str], float] = defaultdict(float)
    for event in measured.events:
        words = [parse_instruction(word) for word in event.words.split()]
        for key, seconds in computed(words, event, model):
            computing[key].append(seconds)
        first = words[0]
        if isinstance(first, Collective) and event.lane == "link":
            continue  # it was under way beside computing; what it cost is what its wait took
        if isinstance(first, Collective) and first.phase:
            split[event.rank, format_instruction(first).rstrip("+-")] += event.seconds
        elif isinstance(first, Send | Recv | Push | Pull | Commit | Collective):
            together[key_of(first)].append(event.seconds)
    for (_, text), seconds in split.items():
        together[key_of(parse_instruction(text))].append(seconds)
    found = {key: median(times) for key, times in computing.items()}
    return FittedCosts(found | {key: min(times) for key, times in together.items()})


def computed(words: Iterable[Instruction], event: Event, model: ModelSpec) -> Iterator[tuple[Key, float]]:
    """Yield the parts of an event's time that its blocks and updates took, each by its share of the work."""
    computes = [word for word in words if isinstance(word, Compute | Update)]
    work = [work_of(word, model) for word in computes]
    total = sum(work)
    for word, share in zip(computes, work, strict=True):
        yield key_of(word), event.seconds * (share / total if total else 1 / len(work))


def work_of(word: Compute | Update, model: ModelSpec) -> float:
    """Return how much of a call's time is a word's, in any unit that all words of one kind share."""
    match word:
        case Forward(block) | Recompute(block) | Backward(block):
            return float(model.blocks[block].cost)
        case Update(unit):
            return float(model.unit_bytes(unit))


def key_of(word: Instruction) -> Key:  # noqa: PLR0911 - one case each
    """Return what the cost of an instruction depends on."""
    match word:
        case Forward(block):
            return "forward", (block,)
        case Recompute(block):
            return "recomputation", (block,)
        case Backward(block, part=part):
            return f"backward {part}".rstrip(), (block,)
        case Update(unit):
            return "update", unit
        case Send(value) | Recv(value):
            return message(value)
        case Push(value):
            return "push", value.blocks
        case Pull(value):
            return "pull", value.blocks
        case Commit(group):
            return "commit", group
        case Collective(value=value):
            return f"{word.name} {value.name}", value.blocks
        case _:
            return "", ()


def message(value: Value) -> Key:
    """Return the key of a message: sending and receiving it are one transfer."""
    return f"message {value.name}", value.blocks
