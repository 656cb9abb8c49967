"""Count how often a rank reads and writes its own memory to move parameters and gradients.

Gradients are sent and reduced from flat buffers. The gradients of matrices, which are nearly all bytes, are written
there directly by the matrix products that compute them, and the rest is not counted. Received values are copied to
where they are used, or added to what is already there. Replicas on one host that share their parameters in memory
compute their gradients where all of them can read them, and copy nothing.

The unit is a pass: reading or writing as many bytes as the instruction's tensor has.
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
    Fetch,
    Forward,
    Free,
    Instruction,
    Offload,
    Pull,
    Push,
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    Update,
)
from counterpoint.program.program import Instructions
from counterpoint.program.units import freed_weights

COPY_PASSES, ADD_PASSES = 3, 3
"""A write first fetches the cache line, so that a copy costs as much as an addition: two reads and one write."""

READ_PASSES = 1.5
"""Reading one more operand is half as expensive as adding it: the write proceeds during the next read."""

ENCODE_PASSES = {"int8": 8 * COPY_PASSES, "int4": 11 * COPY_PASSES}
DECODE_PASSES = {"int8": 5 * COPY_PASSES, "int4": 8 * COPY_PASSES}
"""Encoding and decoding with torch's operations, in times of a copy, measured on 2^22 float32 numbers on one core."""


def memory_passes(instructions: Instructions, shares_memory: Callable[[Collective], bool]) -> list[float]:
    """Return for each instruction how many passes over its tensor it makes in the rank's memory.

    Args:
        instructions: the instructions of one rank, in order.
        shares_memory: whether the members of a collective share its tensor in memory.

    Example:
        >>> from counterpoint.program.text import parse_instruction
        >>> text = "F0.0 B0.0 reduce_scatter(grad0)@0,1 free(grad0) U0"
        >>> memory_passes(tuple(map(parse_instruction, text.split())), lambda collective: False)
        [0.0, 0.0, 0.0, 1.5, 0.0]
    """
    locations = _GradLocations(instructions, shares_memory)
    return [locations.visit(instruction) for instruction in instructions]


class _GradLocations:
    """Which gradients a rank holds, and which of them it has reduced to a shard, after each instruction."""

    def __init__(self, instructions: Instructions, shares_memory: Callable[[Collective], bool]) -> None:
        self.shares_memory = shares_memory
        self.blocks_with_grad: set[int] = set()
        self.num_shards: dict[Unit, int] = {}  # of a gradient that was reduce-scattered
        self.freed = freed_weights(instructions)

    def visit(self, instruction: Instruction) -> float:
        """Record an instruction and return its passes."""
        match instruction:
            case Backward(block, part=part) if part != "input":
                self.blocks_with_grad.add(block)
            case Update(unit):
                self.blocks_with_grad.difference_update(unit)
            case Send(tensor) | Push(tensor) if tensor.name in UNIT_TENSORS and tensor.name != "weight":
                self.blocks_with_grad.difference_update(tensor.blocks)
            case Recv(tensor) | Pull(tensor) if tensor.name in UNIT_TENSORS:
                return COPY_PASSES if tensor.name == "weight" else self.receive(tensor.blocks)
            case Collective(tensor=tensor) if (
                tensor.name in UNIT_TENSORS and instruction.phase != "start" and not self.shares_memory(instruction)
            ):
                return self.collect(instruction)
            case Free(tensor) if tensor.name in UNIT_TENSORS and tensor.name != "weight":
                self.blocks_with_grad.difference_update(tensor.blocks)
                return COPY_PASSES / self.num_shards[tensor.blocks] if tensor.blocks in self.num_shards else 0.0
            case Forward() | Recompute() | Backward() | Send() | Recv() | Push() | Pull() | Collective() | Free():
                pass
            case Commit() | ApplyPushes() | SwapGradBuffers() | Fetch() | Offload():
                pass
        return 0.0

    def receive(self, unit: Unit) -> float:
        """Return the passes of a received gradient: it is added to an existing one, or becomes the gradient."""
        passes = 0.0 if self.blocks_with_grad.isdisjoint(unit) else ADD_PASSES
        self.blocks_with_grad.update(unit)
        return passes

    def collect(self, instruction: Collective) -> float:
        """Return the passes of a collective: gathered parameters are copied next to the resident shard."""
        unit = instruction.tensor.blocks
        if instruction.op == "all_gather":
            return COPY_PASSES / len(instruction.group) if unit in self.freed else 0.0
        if instruction.op == "reduce_scatter":
            self.num_shards[unit] = len(instruction.group)
        return 0.0
