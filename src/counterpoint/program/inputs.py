"""Law 4, along each row: every word finds what it reads, and values come to those that read them, and to no others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from counterpoint.program.instruction import (
    BACKWARDS,
    FORWARDS,
    OF_UNITS,
    Backward,
    Collective,
    Forward,
    Instruction,
    Recompute,
    Recv,
    Release,
    Send,
    Value,
)
from counterpoint.program.program import Program, Words
from counterpoint.program.strands import Strand, links, named_strands, strand_of
from counterpoint.program.text import format_value
from counterpoint.program.walk import broken

_Held: TypeAlias = tuple[str, tuple[int, ...], int | None, int]
"""Something there for a microbatch: ``v`` for the values of a strand, ``d`` for what one of its readers adds to their
gradient (the last number is that block), ``y`` or ``dx`` of a block as long as nobody has summed it, ``Bi`` for what
the input part of a backward leaves for the weight part.
"""
_Strands: TypeAlias = "dict[int, list[tuple[int, ...]]]"


class _Flow(NamedTuple):
    """What must be there for a word, what is gone after it, what is there after it, and what is wrong with it."""

    needed: Collection[_Held] = ()
    used: Collection[_Held] = ()
    made: Collection[_Held] = ()
    wrong: str = ""


_NOTHING = _Flow()
_NO_PART = "only partial results are combined like this, and only by their sum"


class _Web:
    """What the flow of values depends on besides the words.

    Args:
        strands: those of the model.
        last: the last block, whose output nobody reads and which has no gradient to wait for.
        sliced: the blocks whose outputs and input gradients are partial on every rank.
        rows: the flat rows.
    """

    def __init__(self, strands: Iterable[Strand], last: int, sliced: Collection[int], rows: Sequence[Words]) -> None:
        self.last = last
        self.sliced = sliced
        self.runs = [frozenset(word.block for word in row if type(word) is Forward) for row in rows]
        self.made: _Strands = defaultdict(list)
        self.read: _Strands = defaultdict(list)
        self.answered: set[tuple[int, ...]] = set()  # those that a gradient comes back for
        for strand in strands:
            blocks = strand.blocks
            self.made[strand.maker].append(blocks)
            for reader in strand.readers:
                self.read[reader].append(blocks)
            if strand.gradient_bytes is not None:
                self.answered.add(blocks)
        self.output = (last, last + 1)
        self.made[last] = [self.output]

    def flow(self, rank: int, word: Instruction) -> _Flow:
        """Return what a word does on a rank."""
        match word:
            case Forward(block, micro):
                needed = [("v", blocks, micro, 0) for blocks in self.read[block]]
                return _Flow(needed, (), self.results(block, micro, is_summed=block not in self.sliced))
            case Recompute(block, micro):
                return _Flow([("v", blocks, micro, 0) for blocks in self.read[block]])
            case Backward(block, micro):
                left = (("Bi", (block,), micro, 0),)
                if not word.has_input:
                    return _Flow(left, left)
                flow = self.backward(rank, block, micro)
                return flow if word.has_weight else flow._replace(made=(*flow.made, *left))
            case Recv() | Send() | Release() | Collective() if word.value.name not in OF_UNITS:
                return self.exchange(rank, word)
            case _:
                return _NOTHING

    def exchange(self, rank: int, word: Recv | Send | Release | Collective) -> _Flow:
        """Return what a word does with values and gradients of microbatches."""
        value = word.value
        match word:
            case Recv():
                return self.receive(rank, word)
            case Send():
                return self.send(rank, value)
            case Release():
                here = self.parts(value)
                return _Flow(here, here)
            case Collective(phase=phase):
                if value.name in FORWARDS | BACKWARDS:
                    return _Flow(wrong=_NO_PART)
                summed = self.parts(value) if phase != "wait" else ()
                return _Flow(summed, summed, self.whole(value) if phase != "start" else ())

    def results(self, block: int, micro: int | None, *, is_summed: bool) -> Collection[_Held]:
        """Return what a forward makes, or the sum of its parts."""
        if not is_summed:
            return (("y", (block,), micro, 0),)
        return [("v", blocks, micro, 0) for blocks in self.made[block]]

    def gradients(self, block: int, micro: int | None, *, is_summed: bool) -> Collection[_Held]:
        """Return what a backward makes, or the sum of its parts: its addition to the gradients of what it has read."""
        if not is_summed:
            return (("dx", (block,), micro, 0),)
        return [("d", blocks, micro, block) for blocks in self.read[block] if blocks in self.answered]

    def backward(self, rank: int, block: int, micro: int) -> _Flow:
        """Return what a backward needs: additions of all readers; behind it, what it has made itself is forgotten."""
        own = [("v", blocks, micro, 0) for blocks in self.made[block]]
        needed = own if block >= self.last else self.additions(block, micro)
        runs = self.runs[rank]
        spent = [
            ("v", blocks, micro, 0)
            for blocks in self.read[block]
            if not any(reader in runs for reader in blocks[1 : blocks.index(block, 1)])
        ]
        made = self.gradients(block, micro, is_summed=block == 0 or block not in self.sliced)
        return _Flow(needed, (*own, *needed, *spent), made)

    def additions(self, block: int, micro: int) -> list[_Held]:
        """Return what all readers add to the gradients of what a block has made."""
        answered = (blocks for blocks in self.made[block] if blocks in self.answered)
        return [("d", blocks, micro, reader) for blocks in answered for reader in blocks[1:]]

    def whole(self, value: Value) -> Collection[_Held]:
        """Return what the sum of a partial result is."""
        make = self.results if value.name == "y" else self.gradients
        return make(value.blocks[0], value.micro, is_summed=True)

    def parts(self, value: Value) -> Collection[_Held]:
        """Return all that a value consists of."""
        if value.name not in FORWARDS | BACKWARDS:
            return ((value.name, value.blocks, value.micro, 0),)
        blocks = strand_of(value)
        if value.name in FORWARDS:
            return (("v", blocks, value.micro, 0),)
        return [("d", blocks, value.micro, reader) for reader in blocks[1:]]

    def receive(self, rank: int, word: Recv) -> _Flow:
        """Return what comes: values, to one who reads them; or a gradient, from one who does, to their maker."""
        value, blocks = word.value, strand_of(word.value)
        if value.name not in BACKWARDS:
            wrong = "" if self.runs[rank] & set(blocks[1:]) else "no block of this row reads it"
            return _Flow(made=(("v", blocks, value.micro, 0),), wrong=wrong)
        made = [("d", blocks, value.micro, reader) for reader in blocks[1:] if reader in self.runs[word.peer]]
        wrong = (
            "" if made and blocks[0] in self.runs[rank] else "it comes from a row that reads it to one that makes it"
        )
        return _Flow(made=made, wrong=wrong)

    def send(self, rank: int, value: Value) -> _Flow:
        """Return what goes: values that are here, or what all readers of a row add to the gradient of theirs."""
        if value.name not in BACKWARDS:
            here = self.parts(value)
            return _Flow(here, here if value.name != "s" else ())
        blocks = strand_of(value)
        readers = [reader for reader in blocks[1:] if reader in self.runs[rank]]
        added = [("d", blocks, value.micro, reader) for reader in readers or blocks[1:]]
        return _Flow(added, added)


def law_4_inputs_are_there(
    program: Program,
    rows: Sequence[Words],
    last: int,
    sliced: Collection[int] | None,
    strands: Iterable[Strand] | None = None,
) -> None:
    """Prove that each word finds what it reads, and that every partial result is summed once over all its slices.

    A value is there from the word that makes it until it is sent to its only reader, or used up by the backward of its
    first reader on a row, or of its maker. Its gradient is there when each of its readers has added to
    it, once. The output of a sliced block and its input gradient come as partial results, which only their sum makes
    values and gradients.

    Args:
        program: whose rows they are.
        rows: the flat rows.
        last: the last block of the model.
        sliced: the sliced blocks; None for those that any word sums.
        strands: of the model; None for those of a chain, and those that any word names.

    Raises:
        ProgramError: law 4; a value is not there, comes to one that does not read it, or a partial result is not
            summed as it must be.
    """
    if sliced is None:
        sums = (word.value for row in rows for word in row if isinstance(word, Collective))
        sliced = {value.blocks[0] for value in sums if value.name in {"y", "dx"}}
    if strands is None:
        sent = (word.value for row in rows for word in row if isinstance(word, Send | Recv))
        strands = [*links(last + 1), *(Strand(blocks[0], blocks[1:]) for blocks in sorted(named_strands(sent)))]
    web = _Web(strands, last, frozenset(sliced), rows)
    for rank, row in enumerate(rows):
        there: set[_Held] = set()
        for index, word in enumerate(row):
            needed, used, made, wrong = web.flow(rank, word)
            for held in needed:
                if held not in there:
                    raise broken(rows, (rank, index), 4, _absence(held))
            if wrong or (type(word) is Recv and not there.isdisjoint(made)):
                fact = wrong or "it is here already; what a row reads comes to it once"
                raise broken(rows, (rank, index), 4, fact)
            if type(word) is Collective and needed:
                _judge_partial_sum(rows, (rank, index), word, program.rows[rank].num_slices)
            there.difference_update(used)
            there.update(made)
        _judge_left_parts(rows, rank, there, web)


def _judge_left_parts(rows: Sequence[Words], rank: int, there: Collection[_Held], web: _Web) -> None:
    left = [held for held in there if held[0] in {"y", "dx"}]
    if left:
        name, (block,), micro, _ = held = min(left)
        place = max(index for index, word in enumerate(rows[rank]) if held in web.flow(rank, word).made)
        raise broken(rows, (rank, place), 4, f"nobody sums its partial result {name}{block}.{micro}")


def _absence(held: _Held) -> str:
    """Say what is missing, as the text of the program has it."""
    kind, blocks, micro, reader = held
    if kind in {"v", "d"} and micro is not None:
        strand = Strand(blocks[0], blocks[1:])
        text = format_value(strand.value(micro) if kind == "v" else strand.gradient(micro))
        text += f", as far as block {reader} adds to it," if kind == "d" and not strand.is_link else ""
    else:
        text = f"{kind}{blocks[0]}" + ("" if micro is None else f".{micro}")
    return f"{text} is not there; a word stands behind the one that makes what it reads, and before what uses it up"


def _judge_partial_sum(rows: Sequence[Words], place: tuple[int, int], word: Collective, num_slices: int) -> None:
    """Judge the words of partial results; that no two members hold the same slice follows from who ran what."""
    if word.verb != "all_reduce":
        raise broken(rows, place, 4, _NO_PART)
    if len(word.group) != num_slices:
        raise broken(rows, place, 4, f"it adds up {len(word.group)} partial results of {num_slices}")
