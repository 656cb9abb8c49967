"""Activation checkpointing in a program: which forwards save activations, and which are recomputed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from counterpoint.errors import ProgramError
from counterpoint.program.execution_order import format_locations
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Compute,
    Forward,
    Group,
    Instruction,
    Recompute,
    TensorRef,
)
from counterpoint.program.program import Instructions


@dataclass(frozen=True, slots=True)
class RecomputeSet:
    """The recomputations of a rank, as pairs of a block and a microbatch.

    In an asynchronous pipeline microbatches are counted within their batch.

    Args:
        recomputed: pairs whose forward saves only its inputs.
        input_recomputed: those of them whose inputs the previous recomputation produces, so that nothing is saved.
        microbatches_per_batch: in an asynchronous pipeline, the number of microbatches of a batch; else 0.
        partitioned: the inputs of which each member of a group keeps a part, from where it frees them to where all
            gather them.
    """

    recomputed: frozenset[tuple[int, int]] = frozenset()
    input_recomputed: frozenset[tuple[int, int]] = frozenset()
    microbatches_per_batch: int = 0
    partitioned: Mapping[TensorRef, Group] = field(default_factory=dict)

    def key(self, block: int, micro: int) -> tuple[int, int]:
        """Return the pair under which a block and a microbatch are listed."""
        return block, micro % self.microbatches_per_batch if self.microbatches_per_batch else micro


def find_recomputed(instructions: Sequence[Instruction], microbatches_per_batch: int = 0) -> RecomputeSet:
    """Return what a rank recomputes.

    The input of a block after a tensor-parallel one is saved in any case, because only a sum over all shards produces
    it.

    Args:
        instructions: the instructions of one rank.
        microbatches_per_batch: in an asynchronous pipeline, the number of microbatches of a batch.

    Example:
        >>> found = find_recomputed((Forward(0, 0), Forward(1, 0), Recompute(0, 0), Recompute(1, 0)))
        >>> sorted(found.recomputed), sorted(found.input_recomputed)
        ([(0, 0), (1, 0)], [(1, 0)])
    """
    keys = RecomputeSet(microbatches_per_batch=microbatches_per_batch)
    sums = (instruction.tensor for instruction in instructions if isinstance(instruction, Collective))
    summed = {value.blocks[0] for value in sums if value.name == "y"}
    recomputed: set[tuple[int, int]] = set()
    input_recomputed: set[tuple[int, int]] = set()
    previous: Instruction | None = None
    for instruction in instructions:
        if isinstance(instruction, Recompute):
            recomputed.add(keys.key(instruction.block, instruction.micro))
            if previous == replace(instruction, block=instruction.block - 1) and instruction.block - 1 not in summed:
                input_recomputed.add(keys.key(instruction.block, instruction.micro))
        previous = instruction
    partitioned = {
        one.tensor: one.group for one in instructions if isinstance(one, Collective) and one.tensor.name == "x"
    }
    return RecomputeSet(frozenset(recomputed), frozenset(input_recomputed), microbatches_per_batch, partitioned)


@dataclass(frozen=True, slots=True)
class RecomputePolicy:
    """Which blocks a plan declares to be recomputed.

    Args:
        blocks: the blocks.
        exempt: forwards that may nevertheless save activations: ``nothing``; a ``block`` whose backward is next; or a
            ``run`` of blocks whose forwards and then backwards follow each other directly on one microbatch.
    """

    blocks: frozenset[int]
    exempt: Literal["nothing", "block", "run"]

    def may_save_activations(self, computes: Sequence[Compute], index: int) -> bool:
        """Return whether the forward at an index of the rank's compute instructions may save activations."""
        first = computes[index]
        num_blocks = 1
        while self.exempt == "run" and computes[index + num_blocks : index + num_blocks + 1] == [
            _shift_block(first, num_blocks)
        ]:
            num_blocks += 1
        following = computes[index + num_blocks : index + 2 * num_blocks]
        expected_backwards = [(first.block + up, first.micro) for up in reversed(range(num_blocks))]
        backwards = [
            (instruction.block, instruction.micro)
            for instruction in following
            if isinstance(instruction, Backward) and instruction.computes_input_grad
        ]
        return self.exempt != "nothing" and backwards == expected_backwards


def _shift_block(instruction: Compute, by: int) -> Compute:
    return replace(instruction, block=instruction.block + by)


def peak_saved_activations(instructions: Instructions) -> int:
    """Return for how many pairs of block and microbatch saved activations are held at once, at most.

    Activations are saved from the forward, or from the recomputation, until the backward; if that is split, until its
    input half.
    """
    recomputed = find_recomputed(instructions).recomputed
    saved: set[tuple[int, int]] = set()
    peak = 0
    for instruction in instructions:
        match instruction:
            case Forward(block, micro) if (block, micro) not in recomputed:
                saved.add((block, micro))
            case Recompute(block, micro):
                saved.add((block, micro))
            case Backward(block, micro) if instruction.computes_input_grad:
                peak = max(peak, len(saved))
                saved.discard((block, micro))
            case _:
                pass
    return max(peak, len(saved))


def check_saved_activations(rank_instructions: Sequence[Instructions], bounds: Sequence[int]) -> None:
    """Check that no rank holds more saved activations at once than declared (rule 7).

    Args:
        rank_instructions: the unrolled instructions, per rank.
        bounds: per rank, the maximum number of pairs of block and microbatch.

    Raises:
        ProgramError: a forward saves activations that should be recomputed, or the recomputation comes too early.
    """
    for rank, (instructions, allowed) in enumerate(zip(rank_instructions, bounds, strict=True)):
        if (peak := peak_saved_activations(instructions)) <= allowed:
            continue
        raise ProgramError(
            f"rank {rank} holds saved activations for {peak} backwards at once; the plan declares that with "
            "recomputation "
            f"it is at most {allowed}\n{format_locations(rank_instructions, {rank: 0}, 'rank program')}",
            rule=7,
        )


def check_recompute_policy(rank_instructions: Sequence[Instructions], policy: RecomputePolicy) -> None:
    """Check that forwards of recomputed blocks save no activations unless they are exempt (rule 7).

    Raises:
        ProgramError: one does.
    """
    for rank, instructions in enumerate(rank_instructions):
        recomputed = find_recomputed(instructions).recomputed
        compute_indices = [index for index, instruction in enumerate(instructions) if isinstance(instruction, Compute)]
        computes = [instruction for instruction in instructions if isinstance(instruction, Compute)]
        for index, instruction in enumerate(computes):
            if (
                not isinstance(instruction, Forward)
                or instruction.block not in policy.blocks
                or (instruction.block, instruction.micro) in recomputed
            ):
                continue
            if not policy.may_save_activations(computes, index):
                raise ProgramError(
                    f"rank {rank} saves activations for the backward of block {instruction.block} on microbatch "
                    f"{instruction.micro}; "
                    "the plan declares that it is "
                    f"recomputed\n{format_locations(rank_instructions, {rank: compute_indices[index]}, 'here')}",
                    rule=7,
                )
