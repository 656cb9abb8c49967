"""The recomputation pass: forwards save only their inputs, and are recomputed right before their backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

from counterpoint.model.spec import ModelSpec
from counterpoint.program.fusion import fuses_with
from counterpoint.program.instruction import (
    ACTIVATION_GRADS,
    Backward,
    Collective,
    Compute,
    Forward,
    Instruction,
    Recompute,
    Recv,
    Send,
    TensorRef,
)
from counterpoint.program.program import Instructions, Program
from counterpoint.program.recompute_sets import find_recomputed
from counterpoint.program.rewrite import map_parts
from counterpoint.strategies.recomputation import Recomputation

_BackwardChain = list[int]
"""Indices of the backwards of one microbatch, each of the block below the previous one."""


def recompute(program: Program, policy: Recomputation, blocks: Collection[int]) -> Program:
    """Insert the recomputation of each block before its backward.

    The first recomputation of a chain is placed before the receive of the gradient, so that it overlaps with the
    communication. If weights are gathered for a backward, the recomputation of its block comes after the gathering. A
    recomputation reads what the forward read, in the same weight version, and needs no communication.

    Args:
        program: a program whose forwards save all activations.
        policy: how much is recomputed at once, and what is exempt.
        blocks: the blocks to recompute.
    """
    rewrite = partial(_insert_recomputation, policy=policy, blocks=blocks)
    return replace(
        program, rank_programs=tuple(map_parts(rank_program, rewrite) for rank_program in program.rank_programs)
    )


def move_kept_inputs(
    body: Instructions,
    model: ModelSpec,
    moves: Callable[[TensorRef], tuple[Instruction, Instruction]],
    *,
    blocks: Collection[int],
    is_early: bool = False,
) -> Instructions:
    """Return a rank's instructions in which the inputs that blocks are recomputed from are elsewhere until then.

    What the previous recomputation produces is not kept at all, and what later blocks read over skip connections stays.
    Adjacent forwards that are recomputed together stay adjacent: their input goes after the last one.

    Args:
        body: with recomputation.
        model: with the blocks of the program.
        moves: from an input to what lets it go after the forward that reads it, and what lets it come back.
        blocks: whose inputs are moved, if they are recomputed.
        is_early: whether it comes back before the computation that precedes the recomputation.
    """
    found = find_recomputed(body)
    inputs = {
        key: TensorRef("x", (key[0],), key[1])
        for key in found.recomputed - found.input_recomputed
        if key[0] in blocks and model.find_edge((key[0] - 1, key[0])) is not None
    }
    result: list[Instruction] = []
    read: TensorRef | None = None  # the input that the last forward, or the run of forwards that it ends, has read
    for previous, instruction in zip((None, *body), body, strict=False):
        key = (instruction.block, instruction.micro) if isinstance(instruction, Forward | Recompute) else None
        continues = key in found.input_recomputed and previous is not None and fuses_with(previous, instruction)
        if read is not None and not continues:
            result.append(moves(read)[0])
            read = None
        if isinstance(instruction, Recompute) and key in inputs:
            let_go, come_back = moves(inputs[key])
            result.insert(_before_computation(result, let_go) if is_early else len(result), come_back)
        result.append(instruction)
        if isinstance(instruction, Forward) and key in inputs:
            read = inputs[key]
    return (*result, *(moves(read)[:1] if read is not None else ()))


def _before_computation(instructions: Sequence[Instruction], barrier: Instruction) -> int:
    """Return the index of the last run of computations that is executed as one, or of what follows a barrier."""
    for index in range(len(instructions) - 1, -1, -1):
        if instructions[index] == barrier:
            return index + 1
        if isinstance(instructions[index], Compute):
            while index > 0 and fuses_with(instructions[index - 1], instructions[index]):
                index -= 1
            return index
    return len(instructions)


def _insert_recomputation(
    instructions: Instructions, policy: Recomputation, blocks: Collection[int]
) -> list[Instruction]:
    inserted: defaultdict[int, list[Recompute]] = defaultdict(list)
    for chain in _backward_chains(instructions):
        recomputed = [index for index in chain if _backward(instructions, index).block in blocks]
        if policy.exempts_next_backward and _follows_its_forward(instructions, chain[0]):
            recomputed = [] if policy.whole_stage else [index for index in recomputed if index != chain[0]]
        first_index = _grad_receive_index(instructions, chain[0])
        for index in reversed(recomputed):
            instruction = _backward(instructions, index)
            starts_early = (policy.whole_stage or index == chain[0]) and not _is_gathered_for(instructions, index)
            inserted[first_index if starts_early else index].append(
                Recompute(instruction.block, instruction.micro, instruction.version)
            )
    return [result for index, instruction in enumerate(instructions) for result in (*inserted[index], instruction)]


def _backward_chains(instructions: Instructions) -> Iterator[_BackwardChain]:
    """Yield the chains of backwards that compute input gradients: down the blocks of a chunk, on one microbatch."""
    chain: _BackwardChain = []
    for index, instruction in enumerate(instructions):
        if not isinstance(instruction, Forward | Backward):
            continue
        continues = (
            bool(chain)
            and replace(_backward(instructions, chain[-1]), block=_backward(instructions, chain[-1]).block - 1)
            == instruction
        )
        if chain and not continues:
            yield chain
            chain = []
        if isinstance(instruction, Backward) and instruction.computes_input_grad:
            chain.append(index)
    if chain:
        yield chain


def _backward(instructions: Instructions, index: int) -> Backward:
    instruction = instructions[index]
    assert isinstance(instruction, Backward), "the index of a backward"
    return instruction


def _follows_its_forward(instructions: Instructions, index: int) -> bool:
    """Return whether the last computation before a backward is its forward."""
    instruction = _backward(instructions, index)
    preceding = (instructions[earlier_index] for earlier_index in range(index - 1, -1, -1))
    previous = next((computed for computed in preceding if isinstance(computed, Forward | Backward)), None)
    return isinstance(previous, Forward) and (previous.block, previous.micro) == (instruction.block, instruction.micro)


def _grad_receive_index(instructions: Instructions, index: int) -> int:
    """Return the index of the first receive of a backward's gradients if only messages follow it, else its own."""
    instruction, first_index = _backward(instructions, index), index
    for earlier_index in range(index - 1, -1, -1):
        match instructions[earlier_index]:
            case Recv(tensor) if tensor.name in ACTIVATION_GRADS and (tensor.blocks[0], tensor.micro) == (
                instruction.block,
                instruction.micro,
            ):
                first_index = earlier_index
            case Send() | Recv():
                continue
            case _:
                break
    return first_index


def _is_gathered_for(instructions: Sequence[Instruction], index: int) -> bool:
    """Return whether weights are gathered between a backward and the previous computation."""
    for earlier_index in range(index - 1, -1, -1):
        match instructions[earlier_index]:
            case Forward() | Backward():
                return False
            case Collective("all_gather", TensorRef("weight")):
                return True
            case _:
                pass
    return False
