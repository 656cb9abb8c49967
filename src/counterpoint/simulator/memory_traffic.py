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
    UNIT_TENSORS,
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Forward,
    Free,
    Instruction,
    Pull,
    Push,
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    Update,
)
from counterpoint.program.program import Instructions

COPY_PASSES, ADD_PASSES = 3, 3
"""What is written is fetched into the cache before, so that to copy is as much as to add: two are read, one written."""

READ_PASSES = 1.5
"""To read one more beside others is half of what it is to add: what is written goes its way while the next is read."""


def memory_passes(instructions: Instructions, shares_memory: Callable[[Collective], bool]) -> list[float]:
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
    moves = _GradLocations(instructions, shares_memory)
    return [moves.visit(word) for word in instructions]


class _GradLocations:
    """Where the gradients of a row are, word by word."""

    def __init__(self, instructions: Instructions, shares_memory: Callable[[Collective], bool]) -> None:
        self.has_one_copy = shares_memory
        self.blocks_with_grad: set[int] = set()  # blocks with a gradient
        self.num_shards: dict[Unit, int] = {}  # of so many one has been kept
        self.freed = {
            word.tensor.blocks for word in instructions if isinstance(word, Free) and word.tensor.name == "weight"
        }

    def visit(self, instruction: Instruction) -> float:
        """Note a word, and return how often it goes over memory."""
        match instruction:
            case Backward(block, part=part) if part != "input":
                self.blocks_with_grad.add(block)
            case Update(unit):
                self.blocks_with_grad.difference_update(unit)
            case Send(value) | Push(value) if value.name in UNIT_TENSORS and value.name != "weight":
                self.blocks_with_grad.difference_update(value.blocks)
            case Recv(value) | Pull(value) if value.name in UNIT_TENSORS:
                return COPY_PASSES if value.name == "weight" else self.receive(value.blocks)
            case Collective(tensor=value) if (
                value.name in UNIT_TENSORS and instruction.phase != "start" and not self.has_one_copy(instruction)
            ):
                return self.collect(instruction)
            case Free(value) if value.name in UNIT_TENSORS and value.name != "weight":
                self.blocks_with_grad.difference_update(value.blocks)
                return COPY_PASSES / self.num_shards[value.blocks] if value.blocks in self.num_shards else 0.0
            case Forward() | Recompute() | Backward() | Send() | Recv() | Push() | Pull() | Collective() | Free():
                pass
            case Commit() | ApplyPushes() | SwapGradBuffers():
                pass
        return 0.0

    def receive(self, unit: Unit) -> float:
        """Take in a gradient: it is added, or becomes the one that there is."""
        passes = 0.0 if self.blocks_with_grad.isdisjoint(unit) else ADD_PASSES
        self.blocks_with_grad.update(unit)
        return passes

    def collect(self, instruction: Collective) -> float:
        """Make room for weights around those that were kept."""
        unit = instruction.tensor.blocks
        if instruction.op == "all_gather":
            return COPY_PASSES / len(instruction.group) if unit in self.freed else 0.0
        if instruction.op == "reduce_scatter":
            self.num_shards[unit] = len(instruction.group)
        return 0.0
