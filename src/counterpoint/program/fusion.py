"""Which adjacent instructions are executed as one: one call of the model, one optimizer step, one message.

Any other instruction between two instructions ends the fused run, so that the order of the program is kept.
"""

from __future__ import annotations

from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Fetch,
    Forward,
    Instruction,
    Offload,
    Recompute,
    Update,
)


def fuses_with(previous: Instruction, instruction: Instruction) -> bool:
    """Return whether an instruction is executed together with the one right before it.

    Example:
        >>> fuses_with(Forward(0, 3), Forward(1, 3)), fuses_with(Forward(1, 3), Backward(1, 3))
        (True, False)
    """
    if isinstance(previous, Forward | Recompute) and type(instruction) is type(previous):
        return instruction.block == previous.block + 1 and (instruction.micro, instruction.version) == (
            previous.micro,
            previous.version,
        )
    if isinstance(previous, Backward) and isinstance(instruction, Backward):
        same_arguments = (instruction.micro, instruction.version, instruction.part) == (
            previous.micro,
            previous.version,
            previous.part,
        )
        return instruction.block == previous.block - 1 and same_arguments
    if isinstance(previous, Collective) and isinstance(instruction, Collective):
        same_arguments = (instruction.op, instruction.group, instruction.tensor.name) == (
            previous.op,
            previous.group,
            previous.tensor.name,
        )
        return same_arguments and instruction.phase == previous.phase == "" and instruction.tensor.micro is None
    if isinstance(previous, Fetch | Offload) and isinstance(instruction, Fetch | Offload):
        return type(instruction) is type(previous) and previous.tensor.name == instruction.tensor.name == "state"
    return isinstance(instruction, Update | ApplyPushes) and type(instruction) is type(previous)
