"""Which words that stand side by side are carried out as one: one call of the model, one optimizer step, one message.

What stands between two words of a run ends it, so that everything happens where the text says.
"""

from __future__ import annotations

from counterpoint.program.instruction import ApplyPushes, Backward, Collective, Forward, Instruction, Recompute, Update


def fuses_with(before: Instruction, word: Instruction) -> bool:
    """Tell whether a word belongs to the same call as the one right before it.

    Example:
        >>> goes_on(Forward(0, 3), Forward(1, 3)), goes_on(Forward(1, 3), Backward(1, 3))
        (True, False)
    """
    if isinstance(before, Forward | Recompute) and type(word) is type(before):
        return word.block == before.block + 1 and (word.micro, word.version) == (before.micro, before.version)
    if isinstance(before, Backward) and isinstance(word, Backward):
        same = (word.micro, word.version, word.part) == (before.micro, before.version, before.part)
        return word.block == before.block - 1 and same
    if isinstance(before, Collective) and isinstance(word, Collective):
        same = (word.op, word.group, word.tensor.name) == (before.op, before.group, before.tensor.name)
        return same and word.phase == before.phase == "" and word.tensor.micro is None
    return isinstance(word, Update | ApplyPushes) and type(word) is type(before)
