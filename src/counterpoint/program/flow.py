"""What can be seen along one row: nothing is used before it is agreed on, or while it is under way.

These parts of laws 6 and 7 need no other row, so that each row is read once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction

from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Forward,
    Instruction,
    Push,
    Recompute,
    Recv,
    Release,
    Send,
    Swap,
    Update,
    Value,
)
from counterpoint.program.program import Words
from counterpoint.program.text import format_unit
from counterpoint.program.units import Unit
from counterpoint.program.walk import broken


def law_6_updates_follow_a_commit(rows: Sequence[Words]) -> None:
    """Prove that between the gradients and the updates or pushes of a row stands a commit; weights have no code.

    Raises:
        ProgramError: law 6; an update would be applied that nobody has agreed on, or weights would be changed on their
            way.
    """
    for rank, row in enumerate(rows):
        agreed = False
        for index, word in enumerate(row):
            match word:
                case Commit():
                    agreed = True
                case Send(value, code=code) | Recv(value, code=code) | Push(value, code=code) if (
                    code and value.name != "grad"
                ):
                    raise broken(rows, (rank, index), 6, "only gradients have a code")
                case Update() | Push() if not agreed:
                    raise broken(rows, (rank, index), 6, "no commit stands between the gradients and this word")
                case Backward() | Recv(Value("grad")) | Collective(_, Value("grad")) | Swap():
                    agreed = False
                case _:
                    pass


def law_7_gradients_are_freed(rows: Sequence[Words], units: Iterable[Unit], kept: Sequence[Fraction]) -> None:
    """Prove that ranks which keep only parts of gradients free the whole ones: each as soon as it is shared out.

    Args:
        rows: the flat rows.
        units: of the model.
        kept: per rank, the part of each gradient that may be held from one forward to the next.

    Raises:
        ProgramError: law 7; a gradient that was shared out, or not even that, is held on whole.
    """
    users: defaultdict[int, list[Unit]] = defaultdict(list)
    for unit in units:
        for block in unit:
            users[block].append(unit)
    for rank, (row, part) in enumerate(zip(rows, kept, strict=True)):
        if part == 1:
            continue
        held: set[Unit] = set()
        shared: set[Unit] = set()
        for index, word in enumerate(row):
            match word:
                case Backward(block) if word.has_weight:
                    _require_freed(rows, (rank, index), shared, part)
                    held.update(users[block])
                case Forward() | Commit():
                    _require_freed(rows, (rank, index), held, part)
                case Collective("reduce_scatter", Value("grad", unit), phase="" | "wait"):
                    shared.add(unit)
                case Release(Value("grad", unit)):
                    held.discard(unit)
                    shared.discard(unit)
                case _:
                    pass


def _require_freed(rows: Sequence[Words], place: tuple[int, int], held: Collection[Unit], part: Fraction) -> None:
    if held:
        text = format_unit(min(held))
        raise broken(rows, place, 7, f"the whole gradient of unit {text} is held; the plan promises {part} of it")


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
                if word.phase == "wait":
                    started.pop(word.value, None)
                elif word.value in started:
                    used = used or (index, "it is under way already")
                elif word.phase == "start":
                    started[word.value] = index
            elif started and any(value in started for value in _uses(word, started)):
                used = used or (index, "what it uses is still under way")
        if started:
            raise broken(rows, (rank, min(started.values())), 7, "nobody waits for it")
        if used:
            raise broken(rows, (rank, used[0]), 6, used[1])


def _uses(word: Instruction, started: Iterable[Value]) -> Iterable[Value]:
    match word:
        case Update(unit):
            return Value("grad", unit), Value("weight", unit)
        case Swap(unit):
            return Value("grad", unit), Value("delayed_grad", unit)
        case Send(value) | Push(value) | Release(value):
            return (value,)
        case Backward(block):
            return [value for value in started if value.name in {"grad", "weight"} and block in value.blocks]
        case Forward(block) | Recompute(block):
            return [value for value in started if value.name == "weight" and block in value.blocks]
        case _:
            return ()
