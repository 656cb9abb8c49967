"""Offloaded optimizer state and weights: which units have some, and through how much memory they are read and written.

What is offloaded of activations is a value of the dataflow, which :mod:`counterpoint.program.verify.dataflow` follows.

State is kept in chunks. While a rank updates one chunk, the next one is read and the one before written, each in a
buffer of its own::

    fetch(state0)<disk   read 0 | read 1  | read 2   | read 3   |
    U0                          | update 0| update 1 | update 2 | update 3 |
    offload(state0)>disk                  | write 0  | write 1  | write 2  | write 3

A rank's shard of the weights of a unit is read whole, for a gather or for an update, and written after the update::

    fetch(weight0)<disk all_gather(weight0)@0,1 F0.0 free(weight0)     the file keeps the shard
    fetch(weight0)<disk U0 offload(weight0)>disk                       it gets the updated one
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from counterpoint.program.execution_order import rule_violation
from counterpoint.program.instruction import (
    Collective,
    Fetch,
    Free,
    Instruction,
    Offload,
    OffloadPlace,
    TensorRef,
    Update,
)
from counterpoint.program.program import Instructions
from counterpoint.program.text import format_unit
from counterpoint.program.units import Unit

OFFLOAD_CHUNK_BYTES = 32 << 20
"""The most bytes of state that are read or written as one."""

NUM_OFFLOAD_BUFFERS = 3
"""Chunks in memory at a time: one that is read, one that is updated, one that is written."""


def offloaded_units(instructions: Iterable[Instruction]) -> frozenset[Unit]:
    """Return the units whose state a rank offloads.

    Example:
        >>> from counterpoint.program.text import parse_instruction
        >>> offloaded_units(map(parse_instruction, "fetch(state0)<disk U0 offload(state0)>disk U1".split()))
        frozenset({(0,)})
    """
    moves = (one for one in instructions if isinstance(one, Fetch | Offload))
    return frozenset(one.tensor.blocks for one in moves if one.tensor.name == "state")


def offloaded_weights(instructions: Iterable[Instruction]) -> dict[Unit, OffloadPlace]:
    """Return where a rank's shards of weights are offloaded to, by unit.

    Example:
        >>> from counterpoint.program.text import parse_instruction
        >>> text = "fetch(weight0)<disk all_gather(weight0)@0,1 F0.0 free(weight0) all_gather(weight1)@0,1"
        >>> offloaded_weights(map(parse_instruction, text.split()))
        {(0,): 'disk'}
    """
    moves = [one for one in instructions if isinstance(one, Fetch | Offload) and one.tensor.name == "weight"]
    return {one.tensor.blocks: one.place for one in reversed(moves)}  # of each unit the first one


def check_offloads(rank_instructions: Sequence[Instructions]) -> None:
    """Check that states and weights are fetched before each use, and offloaded again to the same place (rule 7).

    Args:
        rank_instructions: the unrolled instructions, per rank.

    Raises:
        ProgramError: a state or weights are used where they are not, are moved twice, or stay in memory.
    """
    for rank, instructions in enumerate(rank_instructions):
        states, weights = offloaded_units(instructions), _OffloadedWeights(offloaded_weights(instructions))
        fetched: dict[Unit, tuple[int, str]] = {}
        for index, instruction in enumerate(instructions if states or weights.places else ()):
            if fact := _move(instruction, index, states, fetched) or weights.move(instruction, index):
                raise rule_violation(rank_instructions, (rank, index), 7, fact)
        if fetched:
            index, place = min(fetched.values())
            fact = f"this state is not offloaded again, and stays in memory; it came from {place}"
            raise rule_violation(rank_instructions, (rank, index), 7, fact)
        if weights.fetched:
            fact = "these weights are neither gathered nor offloaded again, and stay in memory"
            raise rule_violation(rank_instructions, (rank, min(weights.fetched.values())), 7, fact)


def _move(
    instruction: Instruction, index: int, offloaded: frozenset[Unit], fetched: dict[Unit, tuple[int, str]]
) -> str:
    """Move a state or use it; return what is wrong, or ""."""
    match instruction:
        case Fetch(tensor) | Offload(tensor) if tensor.name != "state":
            pass
        case Fetch(tensor, place):
            if tensor.blocks in fetched:
                return "this state is fetched already"
            fetched[tensor.blocks] = index, place
        case Offload(tensor, place):
            if tensor.blocks not in fetched:
                return "this state has not been fetched"
            if fetched.pop(tensor.blocks)[1] != place:
                return "this state was fetched from another place"
        case Update(unit) if unit in offloaded and unit not in fetched:
            return f"the state of unit {format_unit(unit)} is offloaded, and has not been fetched"
        case _:
            pass
    return ""


@dataclass(slots=True)
class _OffloadedWeights:
    """Where a rank's shards of weights are, while its instructions are followed.

    Args:
        places: where those are that it offloads.
        fetched: the units whose shard is in memory, and by which instruction.
        updated: those of them that differ from what was offloaded.
        gathered: the units whose weights are whole in memory.
    """

    places: dict[Unit, OffloadPlace]
    fetched: dict[Unit, int] = field(default_factory=dict)
    updated: set[Unit] = field(default_factory=set)
    gathered: set[Unit] = field(default_factory=set)

    def move(self, instruction: Instruction, index: int) -> str:
        """Move a shard or use it; return what is wrong, or ""."""
        match instruction:
            case Fetch(TensorRef("weight", unit), place):
                return self.fetch(unit, place, index)
            case Offload(TensorRef("weight", unit), place):
                if unit not in self.fetched:
                    return "these weights have not been fetched"
                del self.fetched[unit]
                self.updated.discard(unit)
                return "" if place == self.places[unit] else "these weights were fetched from another place"
            case Collective("all_gather", TensorRef("weight", unit), phase="" | "start") if unit in self.places:
                return self.gather(unit)
            case Free(TensorRef("weight", unit)):
                self.gathered.discard(unit)
            case Update(unit) if unit in self.places:
                self.updated.add(unit)
                return "" if unit in self.fetched else self._missing(unit)
            case _:
                pass
        return ""

    def fetch(self, unit: Unit, place: OffloadPlace, index: int) -> str:
        """Have the shard of a unit in memory, unless it is there; return what is wrong, or ""."""
        if place != self.places[unit]:
            return "these weights are in another place"
        if unit in self.fetched or unit in self.gathered:
            return "these weights are in memory already"
        self.fetched[unit] = index
        return ""

    def gather(self, unit: Unit) -> str:
        """Use the shard of a unit for a gather, which gives it up; return what is wrong, or ""."""
        if unit not in self.fetched:
            return self._missing(unit)
        if unit in self.updated:
            return "these weights were updated, and have not been offloaded since"
        del self.fetched[unit]
        self.gathered.add(unit)
        return ""

    def _missing(self, unit: Unit) -> str:
        return f"weight{format_unit(unit)} is offloaded, and has not been fetched"
