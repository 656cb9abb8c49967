"""Units: which blocks use which parameters, which instructions name them, and which of them replicas can share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from counterpoint.program.compression import CHUNK_ELEMENTS, encodes_shards, exchanges_momentum
from counterpoint.program.instruction import (
    UNIT_TENSORS,
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Fetch,
    Forward,
    Free,
    Group,
    Instruction,
    Offload,
    Pull,
    Push,
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    TensorRef,
    Update,
)
from counterpoint.program.program import Instructions

Unit: TypeAlias = tuple[int, ...]
"""The blocks that use a set of parameters: ``(3,)`` for block 3 alone, ``(0, 4)`` for a tied weight."""
_WITHOUT_UNITS = {Forward, Recompute, Backward, Commit}


def units_by_block(rank_instructions: Sequence[Instructions]) -> defaultdict[int, list[Unit]]:
    """Return the units that each block uses, read off the instructions that name units."""
    units: set[Unit] = set()
    for instructions in rank_instructions:
        for instruction in instructions:
            if type(instruction) not in _WITHOUT_UNITS:
                units.update(named_units(instruction))
    users: defaultdict[int, list[Unit]] = defaultdict(list)
    for unit in sorted(units):
        for block in unit:
            users[block].append(unit)
    return users


def named_units(instruction: Instruction) -> tuple[Unit, ...]:
    """Return the units that an instruction updates, communicates, frees or offloads."""
    match instruction:
        case Update(unit) | SwapGradBuffers(unit):
            return (unit,)
        case ApplyPushes(units):
            return units
        case Push(value) | Pull(value) | Send(value) | Recv(value) | Free(value) | Collective(_, value):
            return (value.blocks,) if value.name in UNIT_TENSORS else ()
        case Fetch(value) | Offload(value):
            return (value.blocks,) if value.name in {"state", "weight"} else ()
        case Forward() | Recompute() | Backward() | Commit():
            return ()


def sharded_units(instructions: Instructions, units_of: Mapping[int, Sequence[Unit]]) -> Iterator[tuple[Unit, Group]]:
    """Yield each unit that a rank gathers before it reads it, with the group: between steps it holds a shard only."""
    seen: set[Unit] = set()
    for instruction in instructions:
        match instruction:
            case Collective("all_gather", TensorRef("weight", unit), group) if unit not in seen:
                seen.add(unit)
                yield unit, group
            case Forward(block):
                seen.update(units_of[block])
            case _:
                pass


def freed_weights(instructions: Iterable[Instruction]) -> frozenset[Unit]:
    """Return the units whose weights are freed after use, so that they are gathered for each use.

    Example:
        >>> from counterpoint.program.text import parse_instruction
        >>> freed_weights(map(parse_instruction, "all_gather(weight0)@0,1 F0.0 free(weight0) free(grad1)".split()))
        frozenset({(0,)})
    """
    return frozenset(
        instruction.tensor.blocks
        for instruction in instructions
        if isinstance(instruction, Free) and instruction.tensor.name == "weight"
    )


def communicated_tensor(instruction: Collective, freed: Collection[Unit]) -> TensorRef:
    """Return the tensor whose bytes a collective communicates: what the model reads of freed weights, or a sum's casts.

    Args:
        instruction: the collective, without a codec.
        freed: the units whose weights are freed after use.
    """
    tensor = instruction.tensor
    if instruction.op == "all_gather" and tensor.name == "weight" and tensor.blocks in freed:
        return TensorRef("gathered_weight", tensor.blocks)
    return TensorRef("reduced_grad", tensor.blocks) if tensor.name == "grad" else tensor


def shard_multiple(instructions: Iterable[Instruction]) -> int:
    """Return after which multiples of elements of a parameter shards may end, so that codecs can encode them.

    Example:
        >>> from counterpoint.program.text import parse_instruction
        >>> shard_multiple([parse_instruction("all_gather:int8(weight0)@0,1")])
        1024
        >>> shard_multiple([parse_instruction("all_reduce:int8(grad0)@0,1")])
        1
    """
    is_encoded = any(
        isinstance(one, Collective) and (encodes_shards(one.op, one.codec) or exchanges_momentum(one.codec))
        for one in instructions
    )
    return CHUNK_ELEMENTS if is_encoded else 1


def compresses_whole_grads(instruction: Instruction) -> bool:
    """Return whether an instruction sends a whole gradient in a codec, which may keep what it drops for the next one.

    Example:
        >>> from counterpoint.program.text import parse_instruction
        >>> [
        ...     compresses_whole_grads(parse_instruction(f"{op}:int8(grad0)@0,1"))
        ...     for op in ("all_reduce", "reduce_scatter")
        ... ]
        [True, False]
    """
    if isinstance(instruction, Collective) and encodes_shards(instruction.op, instruction.codec):
        return False
    return isinstance(instruction, Collective | Send | Push) and bool(instruction.codec)


def host_shareable_units(instructions: Iterable[Instruction]) -> dict[tuple[int, ...], Group]:
    """Return the units whose weights ranks of one host can share, so that there is one copy instead of one per rank.

    These are the units whose gradient is reduce-scattered once and whose weights are all-gathered once, within one
    group, and which are not freed: each rank updates its shard of the weights that all of them read. Collectives with
    a codec are not among them.

    Args:
        instructions: the instructions of one rank.

    Example:
        >>> from counterpoint.program.text import parse_instruction
        >>> text = "reduce_scatter(grad0)@0,1 U0 all_gather(weight0)@0,1 reduce_scatter(grad1)@0,1 free(grad1) U1"
        >>> host_shareable_units(map(parse_instruction, text.split()))
        {(0,): (0, 1)}
    """
    collectives_of: dict[tuple[int, ...], list[tuple[str, Group]]] = {}
    excluded: set[tuple[int, ...]] = set()
    for instruction in instructions:
        if isinstance(instruction, Free) or (isinstance(instruction, Collective) and instruction.codec):
            excluded.add(instruction.tensor.blocks)
        elif (
            isinstance(instruction, Collective)
            and instruction.tensor.name in UNIT_TENSORS
            and instruction.phase != "wait"
        ):
            collectives_of.setdefault(instruction.tensor.blocks, []).append((instruction.op, instruction.group))
    return {
        unit: collectives[0][1]
        for unit, collectives in collectives_of.items()
        if unit not in excluded
        and [op for op, _ in collectives] == ["reduce_scatter", "all_gather"]
        and collectives[0][1] == collectives[1][1]
    }
