"""How often a rank goes over its own memory to bring parameters and gradients to where they are sent from, and back.

What is sent or summed is flat, one gradient after the other. Those of matrices, which are nearly all of it, are written
there by the products that make them, and the others are not counted. What comes from others is copied to where it is
used, or added to what is there. Replicas that have one copy of their weights have their gradients made where all see
them, and move none.
"""

from __future__ import annotations

from collections.abc import Callable

from counterpoint.model.spec import Unit
from counterpoint.program.instruction import (
    OF_UNITS,
    Backward,
    Collective,
    Commit,
    Forward,
    Instruction,
    Pull,
    Push,
    Recompute,
    Recv,
    Release,
    Send,
    Serve,
    Swap,
    Update,
)
from counterpoint.program.program import Words

COPY_PASSES, ADD_PASSES = 3, 3
"""What is written is fetched into the cache before, so that to copy is as much as to add: two are read, one written."""

READ_PASSES = 1.5
"""To read one more beside others is half of what it is to add: what is written goes its way while the next is read."""


def row_moves(row: Words, has_one_copy: Callable[[Collective], bool]) -> list[float]:
    """Return for each word of a row how often it goes over as much memory as what it is about takes.

    Args:
        row: whose words.
        has_one_copy: whether the members of a collective have its value in common memory.

    Example:
        >>> from counterpoint.program.text import parse_instruction
        >>> words = tuple(map(parse_instruction, "F0.0 B0.0 reduce_scatter(grad0)@0,1 free(grad0) U0".split()))
        >>> row_moves(words, lambda word: False)
        [0.0, 0.0, 0.0, 1.5, 0.0]
    """
    moves = _Moves(row, has_one_copy)
    return [moves.take(word) for word in row]


class _Moves:
    """Where the gradients of a row are, word by word."""

    def __init__(self, row: Words, has_one_copy: Callable[[Collective], bool]) -> None:
        self.has_one_copy = has_one_copy
        self.begun: set[int] = set()  # blocks with a gradient
        self.parts: dict[Unit, int] = {}  # of so many one has been kept
        self.returned = {word.value.blocks for word in row if isinstance(word, Release) and word.value.name == "weight"}

    def take(self, word: Instruction) -> float:
        """Note a word, and return how often it goes over memory."""
        match word:
            case Backward(block, part=part) if part != "input":
                self.begun.add(block)
            case Update(unit):
                self.begun.difference_update(unit)
            case Send(value) | Push(value) if value.name in OF_UNITS and value.name != "weight":
                self.begun.difference_update(value.blocks)
            case Recv(value) | Pull(value) if value.name in OF_UNITS:
                return COPY_PASSES if value.name == "weight" else self.receive(value.blocks)
            case Collective(value=value) if (
                value.name in OF_UNITS and word.phase != "start" and not self.has_one_copy(word)
            ):
                return self.collect(word)
            case Release(value) if value.name in OF_UNITS and value.name != "weight":
                self.begun.difference_update(value.blocks)
                return COPY_PASSES / self.parts[value.blocks] if value.blocks in self.parts else 0.0
            case Forward() | Recompute() | Backward() | Send() | Recv() | Push() | Pull() | Collective() | Release():
                pass
            case Commit() | Serve() | Swap():
                pass
        return 0.0

    def receive(self, unit: Unit) -> float:
        """Take in a gradient: it is added, or becomes the one that there is."""
        passes = 0.0 if self.begun.isdisjoint(unit) else ADD_PASSES
        self.begun.update(unit)
        return passes

    def collect(self, word: Collective) -> float:
        """Make room for weights around those that were kept."""
        unit = word.value.blocks
        if word.verb == "all_gather":
            return COPY_PASSES / len(word.group) if unit in self.returned else 0.0
        if word.verb == "reduce_scatter":
            self.parts[unit] = len(word.group)
        return 0.0
