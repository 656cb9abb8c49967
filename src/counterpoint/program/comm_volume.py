"""Count the bytes that the instructions of a program send."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import Protocol

from counterpoint.program.compression import ring_volume_factor
from counterpoint.program.instruction import (
    ApplyPushes,
    Collective,
    Forward,
    Instruction,
    Push,
    Send,
    TensorRef,
    weight,
)
from counterpoint.program.program import Instructions, Program
from counterpoint.program.units import communicated_tensor, freed_weights


class SizeFn(Protocol):
    """Function that returns the size of tensors."""

    def __call__(self, tensor: TensorRef, codec: str = "", /) -> int:
        """Return the bytes of a whole tensor on one rank, encoded by a compression codec if one is given."""
        ...


def sent_bytes(program: Program, size_of: SizeFn) -> tuple[Fraction, ...]:
    """Return the bytes that each rank sends in one repetition of the body.

    Collectives count what a ring algorithm sends: ``2 (n-1)/n`` of the tensor for an all-reduce, ``(n-1)/n`` for a
    reduce-scatter or an all-gather; a broadcast counts ``n-1`` tensors at its root. Weights that are freed after use
    are gathered as the model reads them, and gradients are summed as ranks send them: both may be casts. A compressed
    all-reduce counts encoded bytes, ``n-1`` times if the codec gathers them; gathers and reduce-scatters with a codec
    count ``(n-1)/n`` of the encoded bytes. An all-gather of outputs counts those of the rank's own microbatches ``n-1``
    times.
    Commits send a few dozen bytes, which are not counted.

    Args:
        program: the program.
        size_of: bytes of a whole tensor on one rank.
    """
    return tuple(
        _rank_bytes(rank, rank_program.body, size_of) for rank, rank_program in enumerate(program.rank_programs)
    )


def _rank_bytes(rank: int, instructions: Instructions, size_of: SizeFn) -> Fraction:
    totals: defaultdict[int, int] = defaultdict(int)  # by denominator, because adding fractions one by one is slow
    for _, factor, size in _sends(rank, instructions, size_of):
        totals[factor.denominator] += factor.numerator * size
    return sum((Fraction(total, denominator) for denominator, total in totals.items()), Fraction(0))


def _sends(rank: int, instructions: Instructions, size_of: SizeFn) -> Iterator[tuple[Instruction, Fraction | int, int]]:
    """Yield every instruction with the factor and the number of bytes whose product it sends."""
    shard_fractions: dict[tuple[int, ...], Fraction] = {}
    freed = freed_weights(instructions)
    for instruction in instructions:
        match instruction:
            case Collective(phase="wait"):
                yield instruction, 0, 0
            case Collective("all_reduce", tensor, group, codec=codec) if codec:
                yield instruction, ring_volume_factor(codec, len(group)), size_of(tensor, codec)
            case Collective(tensor=TensorRef("out", (block,)), group=group):
                yield instruction, (len(group) - 1) * count_forwards(instructions, block), size_of(instruction.tensor)
            case Collective(op, tensor, group):
                factor = _collective_volume(op, len(group), is_root=rank == group[0])
                if tensor.name == "grad":
                    factor *= shard_fractions.get(tensor.blocks, 1) if op == "all_reduce" else 1
                    if op == "reduce_scatter":
                        shard_fractions[tensor.blocks] = Fraction(1, len(group))
                sent, codec = communicated_tensor(instruction, freed), instruction.codec
                yield instruction, factor, size_of(tensor, codec) if codec else size_of(sent)
            case Send(tensor, codec=codec) | Push(tensor, codec=codec):
                yield instruction, 1, size_of(tensor, codec)
            case ApplyPushes(units, workers) if instruction.replies:
                yield instruction, len(workers), sum(size_of(weight(unit)) for unit in units)
            case _:
                yield instruction, 0, 0


def count_forwards(instructions: Instructions, block: int) -> int:
    """Return on how many microbatches a rank runs a block."""
    return sum(isinstance(instruction, Forward) and instruction.block == block for instruction in instructions)


@cache
def _collective_volume(op: str, num_members: int, *, is_root: bool) -> Fraction:
    if op == "broadcast":
        return Fraction(num_members - 1 if is_root else 0)
    return (
        ring_volume_factor("", num_members)
        if op in {"all_reduce", "all_reduce_mean"}
        else Fraction(num_members - 1, num_members)
    )


def bytes_by_instruction(
    rank: int, instructions: Instructions, size_of: SizeFn
) -> Iterator[tuple[Instruction, Fraction | int]]:
    """Yield every instruction with the bytes that the rank sends because of it."""
    for instruction, factor, size in _sends(rank, instructions, size_of):
        yield instruction, factor * size
