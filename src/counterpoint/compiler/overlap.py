"""The overlap pass: communication starts as soon as its gradient is complete, and is waited for at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from counterpoint.program.instruction import Backward, Collective, Commit, Group, Instruction, Recv, TensorRef
from counterpoint.program.program import Instructions, Program
from counterpoint.program.rewrite import map_row


def overlap(program: Program) -> Program:
    """Split every sum or share of a gradient before the commit into a start and a wait, and move the start up.

    The start comes right after the last backward of its unit on the rank, or after the last message that adds to its
    gradient, but never before another collective that the same group called first: members whose units are complete in
    another order still call alike. The wait stays where the collective stood. Gradients that go through several
    collectives keep them as they are. Results cannot change, because nothing reads or writes the gradient in between.
    """
    return replace(program, rank_programs=tuple(map_row(row, _overlap_instructions) for row in program.rank_programs))


def _overlap_instructions(words: Instructions) -> list[Instruction]:
    commit = next((i for i, word in enumerate(words) if isinstance(word, Commit)), 0)
    gradients = [word for word in words[:commit] if isinstance(word, Collective) and word.tensor.name == "grad"]
    times = Counter(word.tensor for word in gradients)
    starts: dict[int, list[Instruction]] = {}
    waits: dict[int, Instruction] = {}
    called: dict[Group, int] = {}
    made: dict[int | TensorRef, int] = {}
    for index, word in enumerate(words[:commit]):
        if isinstance(word, Collective):
            place = index
            if word.tensor.name == "grad" and times[word.tensor] == 1:
                producer = max(
                    (made[maker] for maker in (*word.tensor.blocks, word.tensor) if maker in made), default=None
                )
                if producer is not None:
                    place = max(producer, called.get(word.group, -1))
                    starts.setdefault(place, []).append(replace(word, phase="start"))
                    waits[index] = replace(word, phase="wait")
            called[word.group] = place
        made |= dict.fromkeys(_grads_produced(word), index)
    moved: list[Instruction] = []
    for index, word in enumerate(words):
        moved.append(waits.get(index, word))
        moved += starts.get(index, [])
    return moved


def _grads_produced(word: Instruction) -> tuple[int | TensorRef, ...]:
    """Return the gradients that are not complete before a word: those of a block, or one that comes from elsewhere."""
    match word:
        case Backward(block):
            return (block,)
        case Recv(value) | Collective(_, value) if value.name == "grad":
            return (value,)
        case _:
            return ()
