"""What can be seen along one row: nothing is used before it is there, or while it is under way.

These parts of laws 4, 6 and 7 need no other row, so that each row is read once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from counterpoint.errors import ProgramError
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Forward,
    Instruction,
    Push,
    Recv,
    Send,
    Update,
    Value,
)
from counterpoint.program.program import Words
from counterpoint.program.text import format_instruction
from counterpoint.program.walk import show_places

_Held: TypeAlias = tuple[str, int, int | None]
"""``x`` or ``g`` of a block and a microbatch: what its forward or backward reads; ``F``, ``B``: that it has run."""


def law_4_inputs_are_there(rows: Sequence[Words]) -> None:
    """Prove that each forward, backward, send and partial sum stands behind the word that makes what it reads.

    Raises:
        ProgramError: law 4; a block runs before the one that feeds it, or before its input was received.
    """
    last = max((word.block for row in rows for word in row if isinstance(word, Forward)), default=-1)
    for rank, row in enumerate(rows):
        partial = {made for word in row if isinstance(word, Collective) for made in _makes(word)}
        there: set[_Held] = set()
        for index, word in enumerate(row):
            for needed in _reads(word, last):
                if needed not in there:
                    raise ProgramError(
                        f"rank {rank}, {format_instruction(word)}: {needed[0]}{needed[1]}.{needed[2]} is not there "
                        "yet; a word stands behind the one that makes what it reads\n"
                        f"{show_places(rows, {rank: index}, 'here')}",
                        law=4,
                    )
            there.update(made for made in _makes(word) if made not in partial or isinstance(word, Collective))


def _reads(word: Instruction, last: int) -> Iterator[_Held]:
    match word:
        case Forward(block, micro) if block > 0:
            yield "x", block, micro
        case Backward(block, micro) if block < last:
            yield "g", block, micro
        case Send(value) if value.name in {"x", "g"}:
            yield value.name, value.blocks[0], value.micro
        case Collective(value=value, phase="" | "+") if value.name in {"y", "dx"}:
            yield "F" if value.name == "y" else "B", value.blocks[0], value.micro
        case _:
            return


def _makes(word: Instruction) -> Iterator[_Held]:
    match word:
        case Forward(block, micro):
            yield from (("F", block, micro), ("x", block + 1, micro))
        case Backward(block, micro):
            yield from (("B", block, micro), ("g", block - 1, micro))
        case Recv(value) if value.name in {"x", "g"}:
            yield value.name, value.blocks[0], value.micro
        case Collective(value=value, phase="" | "-") if value.name == "y":
            yield "x", value.blocks[0] + 1, value.micro
        case Collective(value=value, phase="" | "-") if value.name == "dx":
            yield "g", value.blocks[0] - 1, value.micro
        case _:
            return


def law_6_updates_follow_a_commit(rows: Sequence[Words]) -> None:
    """Prove that between the gradients and the updates or pushes of a row stands a commit.

    Raises:
        ProgramError: law 6; an update would be applied that nobody has agreed on.
    """
    for rank, row in enumerate(rows):
        agreed = False
        for index, word in enumerate(row):
            match word:
                case Commit():
                    agreed = True
                case Update() | Push() if not agreed:
                    raise _wrong(rows, (rank, index), 6, "no commit stands between the gradients and this word")
                case Backward() | Recv(Value("grad")) | Collective(_, Value("grad")):
                    agreed = False
                case _:
                    pass


def laws_6_and_7_what_is_started_is_awaited(rows: Sequence[Words]) -> None:
    """Prove that nothing is used while it is under way, and that nothing is under way at the end.

    Raises:
        ProgramError: law 6, a gradient is used between the start and the wait of its sum; or law 7, nobody waits.
    """
    for rank, row in enumerate(rows):
        started: dict[Value, int] = {}
        used: tuple[int, str] | None = None
        for index, word in enumerate(row):
            if isinstance(word, Collective):
                if word.phase == "-":
                    started.pop(word.value, None)
                elif word.value in started:
                    used = used or (index, "it is under way already")
                elif word.phase == "+":
                    started[word.value] = index
            elif started and any(value in started for value in _uses(word, started)):
                used = used or (index, "what it uses is still under way")
        if started:
            raise _wrong(rows, (rank, min(started.values())), 7, "nobody waits for it")
        if used:
            raise _wrong(rows, (rank, used[0]), 6, used[1])


def _uses(word: Instruction, started: Iterable[Value]) -> Iterable[Value]:
    match word:
        case Update(unit):
            return (Value("grad", unit),)
        case Send(value) | Push(value):
            return (value,)
        case Backward(block):
            return [value for value in started if value.name in {"grad", "weight"} and block in value.blocks]
        case Forward(block):
            return [value for value in started if value.name == "weight" and block in value.blocks]
        case _:
            return ()


def _wrong(rows: Sequence[Words], place: tuple[int, int], law: int, fact: str) -> ProgramError:
    rank, index = place
    text = format_instruction(rows[rank][index])
    return ProgramError(f"rank {rank}, {text}: {fact}\n{show_places(rows, {rank: index}, 'here')}", law)
