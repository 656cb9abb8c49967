"""The disk of a rank: it reads and writes one tensor after the other, while the rank computes.

``fetch`` lets the rank continue, and what uses the tensor waits until it is read. ``offload`` of an input lets the rank
continue as well, once the input before is written; ``offload`` of weights waits until they are written::

    computing   F1 | F2      | F3      |   ...   | B3     | R2 B2  | R1 B1
    disk           | x1      | x2      |         | x2     | x1     |

Optimizer state is not here: it is read and written in chunks during the updates, and the simulator adds both times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeGuard

from counterpoint.program.instruction import Collective, Fetch, Instruction, Offload, Recompute, Update
from counterpoint.program.program import Instructions

ReadKey: TypeAlias = tuple[object, ...]
"""The tensor that is read: the weights of a unit, or the input of a block for a microbatch."""


class DiskQueue:
    """What the disk of one rank still has to read and write, in the order in which it was asked to.

    Args:
        instructions: of the rank.
    """

    def __init__(self, instructions: Instructions) -> None:
        self.instructions = instructions
        self.free_s = 0.0  # when all that was asked for is done
        self.written_s = 0.0  # when the last input is written
        self.read_s: dict[ReadKey, float] = {}  # when what nothing has used yet is read

    def start(self, index: int, seconds: float, now: float) -> tuple[float, float, float]:
        """Start to read or to write.

        Args:
            index: of the instruction, a fetch or an offload.
            seconds: that the disk takes.
            now: when the rank comes to the instruction.

        Returns:
            When the disk begins and ends, and when the rank continues.
        """
        instruction = self.instructions[index]
        assert isinstance(instruction, Fetch | Offload), "only these use the disk"
        start = max(now, self.free_s)
        self.free_s = stop = start + seconds
        if isinstance(instruction, Fetch):
            self.read_s[instruction.tensor.name, *instruction.tensor.blocks, instruction.tensor.micro] = stop
            return start, stop, now
        if instruction.tensor.name == "weight":
            return start, stop, stop
        continues_s, self.written_s = max(now, self.written_s), stop
        return start, stop, continues_s

    def await_read(self, index: int, now: float) -> float:
        """Return when the tensor that an instruction uses is read; now if it uses none from disk."""
        instruction = self.instructions[index]
        if isinstance(instruction, Recompute):
            key: ReadKey = "x", instruction.block, instruction.micro
        elif isinstance(instruction, Update):
            key = "weight", *instruction.unit, None
        elif isinstance(instruction, Collective) and instruction.phase != "wait":
            key = instruction.tensor.name, *instruction.tensor.blocks, instruction.tensor.micro
        else:
            return now
        return max(now, self.read_s.pop(key, now))


def runs_beside_computing(instruction: Instruction) -> TypeGuard[Fetch | Offload]:
    """Return whether an instruction is of the disk, which works while the rank computes."""
    return (
        isinstance(instruction, Fetch | Offload)
        and instruction.place == "disk"
        and instruction.tensor.name in {"weight", "x"}
    )


def find_disk_queues(rank_instructions: Sequence[Instructions], ranks: Sequence[int]) -> dict[int, DiskQueue]:
    """Return the disks of those of some ranks that read or write while they compute."""
    return {
        rank: DiskQueue(rank_instructions[rank])
        for rank in ranks
        if any(map(runs_beside_computing, rank_instructions[rank]))
    }
