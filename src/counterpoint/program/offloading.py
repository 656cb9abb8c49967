"""Offloaded optimizer state: which units have some, and through how much memory it is read and written.

What is offloaded of activations is a value of the dataflow, which :mod:`counterpoint.program.verify.dataflow` follows.

State is kept in chunks. While a rank updates one chunk, the next one is read and the one before written, each in a
buffer of its own::

    fetch(state0)<disk   read 0 | read 1  | read 2   | read 3   |
    U0                          | update 0| update 1 | update 2 | update 3 |
    offload(state0)>disk                  | write 0  | write 1  | write 2  | write 3
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from counterpoint.program.execution_order import rule_violation
from counterpoint.program.instruction import Fetch, Instruction, Offload, Update
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


def check_offloads(rank_instructions: Sequence[Instructions]) -> None:
    """Check that offloaded states are fetched before each update, and offloaded again to the same place (rule 7).

    Args:
        rank_instructions: the unrolled instructions, per rank.

    Raises:
        ProgramError: a state is used where it is not, is moved twice, or stays in memory.
    """
    for rank, instructions in enumerate(rank_instructions):
        offloaded = offloaded_units(instructions)
        fetched: dict[Unit, tuple[int, str]] = {}
        for index, instruction in enumerate(instructions if offloaded else ()):
            if fact := _move(instruction, index, offloaded, fetched):
                raise rule_violation(rank_instructions, (rank, index), 7, fact)
        if fetched:
            index, place = min(fetched.values())
            fact = f"this state is not offloaded again, and stays in memory; it came from {place}"
            raise rule_violation(rank_instructions, (rank, index), 7, fact)


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
