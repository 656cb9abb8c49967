"""What can be seen along one row: nothing is used before it is there, or while it is under way.

These parts of laws 4, 6 and 7 need no other row, so that each row is read once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from counterpoint.errors import ProgramError
from counterpoint.program.instruction import (
    OF_UNITS,
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
from counterpoint.program.program import Program, Words
from counterpoint.program.text import format_instruction, format_unit
from counterpoint.program.units import Unit
from counterpoint.program.walk import show_places

_Held: TypeAlias = tuple[str, int, int | None]
"""A value of one block and microbatch: ``x`` or ``g``, or ``y`` or ``dx`` as long as nobody has summed it.

``Bi`` is what the input part of a backward leaves for the weight part.
"""
_Values: TypeAlias = tuple[_Held, ...]


@dataclass(frozen=True, slots=True)
class _Chain:
    """What the flow of values depends on besides the words.

    Args:
        last: the last block, whose output nobody reads and which has no gradient to wait for.
        sliced: the blocks whose outputs and input gradients are partial on every rank.
    """

    last: int
    sliced: Container[int]

    def flow(self, word: Instruction) -> tuple[_Values, _Values, _Values]:  # noqa: PLR0911 - one case each
        """Return what must be there for a word, what is gone after it, and what is there after it."""
        match word:
            case Forward(block, micro):
                needed = (("x", block, micro),) if block > 0 else ()
                if block in self.sliced:
                    return needed, (), (("y", block, micro),)
                return needed, (), (("x", block + 1, micro),) if block < self.last else ()
            case Recompute(block, micro):
                return (("x", block, micro),) if block > 0 else (), (), ()
            case Backward(block, micro):
                left: _Values = (("Bi", block, micro),)
                if not word.has_input:
                    return left, left, ()
                flow = self.backward(block, micro)
                return flow if word.has_weight else (*flow[:2], flow[2] + left)
            case Recv(value) if value.name in {"x", "g"}:
                return (), (), ((value.name, value.blocks[0], value.micro),)
            case Send(value) | Release(value) if value.name not in OF_UNITS:
                used = ((value.name, value.blocks[0], value.micro),)
                return used, used, ()
            case Collective(value=value, phase=phase) if value.name not in OF_UNITS:
                summed: _Values = ((value.name, value.blocks[0], value.micro),) if phase != "-" else ()
                return summed, summed, self.whole(value) if phase != "+" else ()
            case _:
                return (), (), ()

    def backward(self, block: int, micro: int) -> tuple[_Values, _Values, _Values]:
        used = ("x", block, micro), ("g", block, micro)
        needed: _Values = (("g", block, micro),)
        if block >= self.last:
            needed = (("x", block + 1, micro),) if block in self.sliced else ()
        if block == 0:
            return needed, used, ()
        return needed, used, (("dx", block, micro),) if block in self.sliced else (("g", block - 1, micro),)

    def whole(self, value: Value) -> _Values:
        """Return what the sum of a partial result is."""
        block = value.blocks[0]
        return (("x", block + 1, value.micro),) if value.name == "y" else (("g", block - 1, value.micro),)


def law_4_inputs_are_there(program: Program, rows: Sequence[Words], last: int, sliced: Collection[int] | None) -> None:
    """Prove that each word finds what it reads, and that every partial result is summed once over all its slices.

    A value is there from the word that makes it until it is sent, released or used up by its backward. The output
    of a sliced block and its input gradient come as partial results, which only their sum makes a value.

    Args:
        program: whose rows they are.
        rows: the flat rows.
        last: the last block of the model.
        sliced: the sliced blocks; None for those that any word sums.

    Raises:
        ProgramError: law 4; a value is not there, or a partial result is not summed as it must be.
    """
    if sliced is None:
        sums = (word.value for row in rows for word in row if isinstance(word, Collective))
        sliced = {value.blocks[0] for value in sums if value.name in {"y", "dx"}}
    chain = _Chain(last, frozenset(sliced))
    for rank, row in enumerate(rows):
        there: set[_Held] = set()
        for index, word in enumerate(row):
            needed, used, made = chain.flow(word)
            if needed and needed[0] not in there:
                raise _wrong(rows, (rank, index), 4, _absence(needed[0]))
            if type(word) is Collective and needed:
                _judge_partial_sum(rows, (rank, index), word, program.rows[rank].num_slices)
            there.difference_update(used)
            there.update(made)
        left = [held for held in there if held[0] in {"y", "dx"}]
        if left:
            name, block, micro = min(left)
            place = max(index for index, word in enumerate(row) if (name, block, micro) in chain.flow(word)[2])
            raise _wrong(rows, (rank, place), 4, f"nobody sums its partial result {name}{block}.{micro}")


def _absence(held: _Held) -> str:
    text = f"{held[0]}{held[1]}" + ("" if held[2] is None else f".{held[2]}")
    return f"{text} is not there; a word stands behind the one that makes what it reads, and before what uses it up"


def _judge_partial_sum(rows: Sequence[Words], place: tuple[int, int], word: Collective, num_slices: int) -> None:
    """Judge the words of partial results; that no two members hold the same slice follows from who ran what."""
    if word.verb != "sum" or word.value.name not in {"y", "dx"}:
        raise _wrong(rows, place, 4, "only partial results are combined like this, and only by their sum")
    if len(word.group) != num_slices:
        raise _wrong(rows, place, 4, f"it adds up {len(word.group)} partial results of {num_slices}")


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
                case Collective("share", Value("grad", unit), phase="" | "-"):
                    shared.add(unit)
                case Release(Value("grad", unit)):
                    held.discard(unit)
                    shared.discard(unit)
                case _:
                    pass


def _require_freed(rows: Sequence[Words], place: tuple[int, int], held: Collection[Unit], part: Fraction) -> None:
    if held:
        text = format_unit(min(held))
        raise _wrong(rows, place, 7, f"the whole gradient of unit {text} is held; the plan promises {part} of it")


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
            return Value("grad", unit), Value("weight", unit)
        case Swap(unit):
            return Value("grad", unit), Value("late", unit)
        case Send(value) | Push(value) | Release(value):
            return (value,)
        case Backward(block):
            return [value for value in started if value.name in {"grad", "weight"} and block in value.blocks]
        case Forward(block) | Recompute(block):
            return [value for value in started if value.name == "weight" and block in value.blocks]
        case _:
            return ()


def _wrong(rows: Sequence[Words], place: tuple[int, int], law: int, fact: str) -> ProgramError:
    rank, index = place
    text = format_instruction(rows[rank][index])
    return ProgramError(f"rank {rank}, {text}: {fact}\n{show_places(rows, {rank: index}, 'here')}", law)
