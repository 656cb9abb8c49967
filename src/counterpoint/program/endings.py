"""What a program leaves behind: copies that are alike, and a stream that can go on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from counterpoint.errors import ProgramError
from counterpoint.program.instruction import Backward, Forward, Group, Instruction, Swap, Update
from counterpoint.program.ledger import Ledger
from counterpoint.program.program import Program, Words, moved
from counterpoint.program.text import format_unit
from counterpoint.program.units import Unit
from counterpoint.program.walk import show_places


def law_6_copies_end_alike(rows: Sequence[Words], ledger: Ledger) -> None:
    """Prove that where replicas have updated weights apart, a mean over all of them has made these alike again.

    Raises:
        ProgramError: law 6; copies end with weights of different replicas.
    """
    found: dict[Unit, tuple[int, frozenset[Group]]] = {}
    for (rank, unit), state in ledger.states.items():
        first, drift = found.setdefault(unit, (rank, state.drift))
        if drift != state.drift:
            raise ProgramError(
                f"ranks {first} and {rank} end with weights of unit {format_unit(unit)} that replicas have updated "
                "apart and that no mean over all of them has made alike\n"
                f"{show_places(rows, {rank: len(rows[rank]) - 1}, 'end')}",
                law=6,
            )


def law_7_a_body_leaves_what_it_found(program: Program) -> None:
    """Prove that one more body leaves behind what the last one left, one repetition later.

    Raises:
        ProgramError: law 7; the stream cannot go on.
    """
    stride = len(program.micros)
    for rank, row in enumerate(program.rows):
        once = _left_behind(row.prologue + row.body)
        second = tuple(moved(word, stride) for word in row.body)
        twice = _left_behind(row.prologue + row.body + second)
        if twice != Counter({moved(word, stride): count for word, count in once.items()}):
            raise ProgramError(
                f"rank {rank}: the body does not leave behind what it found, one repetition later, so the stream "
                "cannot go on\n" + show_places([row.body], {0: 0}, "body"),
                law=7,
            )


def _left_behind(words: Words) -> Counter[Instruction]:
    """Return the forwards without backward, each with the version that its backward would have to read.

    And the backwards whose gradients are set aside.
    """
    live: dict[tuple[int, int], int] = {}
    halfway: set[tuple[int, int]] = set()
    updates: Counter[int] = Counter()
    fresh: defaultdict[Unit, list[Instruction]] = defaultdict(list)
    aside: defaultdict[Unit, list[Instruction]] = defaultdict(list)
    swapped = {word.unit for word in words if isinstance(word, Swap)}
    for word in words:
        match word:
            case Forward(block, micro, version):
                live[block, micro] = updates[block] + version
            case Backward(block, micro, part="input"):
                halfway.add((block, micro))
            case Backward(block, micro):
                halfway.discard((block, micro))
                live.pop((block, micro), None)
                for unit in swapped:
                    fresh[unit] += [word] if block in unit else []
            case Update(unit):
                updates.update(unit)
                fresh.pop(unit, None)
            case Swap(unit):
                fresh[unit], aside[unit] = aside[unit], fresh[unit]
            case _:
                pass
    under_way = Counter[Instruction](word for kept in (fresh, aside) for found in kept.values() for word in found)
    for (block, micro), read in live.items():
        version = read - updates[block]
        is_halfway = (block, micro) in halfway
        under_way[Backward(block, micro, version, "input") if is_halfway else Forward(block, micro, version)] += 1
    return under_way
