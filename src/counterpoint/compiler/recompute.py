"""The recomputation pass: forwards keep only what they read, and are computed again right before their backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

from counterpoint.program.instruction import (
    ACTIVATION_GRADS,
    Backward,
    Collective,
    Forward,
    Instruction,
    Recompute,
    Recv,
    Send,
    TensorRef,
)
from counterpoint.program.program import Instructions, Program
from counterpoint.program.rewrite import map_row
from counterpoint.strategies.recomputation import Recomputation

_BackwardChain = list[int]
"""The places of backwards of one microbatch, each of the block below the one before."""


def recompute(program: Program, policy: Recomputation, blocks: Collection[int]) -> Program:
    """Put the recomputation of each block before its backward.

    What is recomputed first stands before the receive of the gradient, so that it begins before the gradient arrives.
    Where weights are gathered for a backward, its block is recomputed with these, right before it. A recomputation
    reads what the forward has read, in the same version, and nothing is sent for it.

    Args:
        program: whose forwards keep all that their backwards need.
        asked: how much at once, and what is left out.
        blocks: which blocks.
    """
    again = partial(_insert_recomputation, policy=policy, blocks=blocks)
    return replace(program, rank_programs=tuple(map_row(row, again) for row in program.rank_programs))


def _insert_recomputation(words: Instructions, policy: Recomputation, blocks: Collection[int]) -> list[Instruction]:
    extra: defaultdict[int, list[Recompute]] = defaultdict(list)
    for turn in _backward_chains(words):
        chosen = [at for at in turn if _backward(words, at).block in blocks]
        if policy.exempts_next_backward and _follows_its_forward(words, turn[0]):
            chosen = [] if policy.whole_stage else [at for at in chosen if at != turn[0]]
        begin = _grad_receive_index(words, turn[0])
        for at in reversed(chosen):
            word = _backward(words, at)
            early = (policy.whole_stage or at == turn[0]) and not _is_gathered_for(words, at)
            extra[begin if early else at].append(Recompute(word.block, word.micro, word.version))
    return [new for at, word in enumerate(words) for new in (*extra[at], word)]


def _backward_chains(words: Instructions) -> Iterator[_BackwardChain]:
    """Yield the runs of backwards that make gradients of inputs: down a chunk's blocks, on one microbatch."""
    turn: _BackwardChain = []
    for at, word in enumerate(words):
        if not isinstance(word, Forward | Backward):
            continue
        goes_on = bool(turn) and replace(_backward(words, turn[-1]), block=_backward(words, turn[-1]).block - 1) == word
        if turn and not goes_on:
            yield turn
            turn = []
        if isinstance(word, Backward) and word.computes_input_grad:
            turn.append(at)
    if turn:
        yield turn


def _backward(words: Instructions, at: int) -> Backward:
    word = words[at]
    assert isinstance(word, Backward), "a place of a backward"
    return word


def _follows_its_forward(words: Instructions, at: int) -> bool:
    """Tell whether the last thing computed before a backward is its forward."""
    word = _backward(words, at)
    earlier = (words[place] for place in range(at - 1, -1, -1))
    before = next((one for one in earlier if isinstance(one, Forward | Backward)), None)
    return isinstance(before, Forward) and (before.block, before.micro) == (word.block, word.micro)


def _grad_receive_index(words: Instructions, at: int) -> int:
    """Return the place of the first receive of a backward's gradients if only messages stand between, or of itself."""
    word, begin = _backward(words, at), at
    for place in range(at - 1, -1, -1):
        match words[place]:
            case Recv(value) if value.name in ACTIVATION_GRADS and (value.blocks[0], value.micro) == (
                word.block,
                word.micro,
            ):
                begin = place
            case Send() | Recv():
                continue
            case _:
                break
    return begin


def _is_gathered_for(words: Sequence[Instruction], at: int) -> bool:
    """Tell whether weights are gathered between a backward and what is computed before it."""
    for place in range(at - 1, -1, -1):
        match words[place]:
            case Forward() | Backward():
                return False
            case Collective("all_gather", TensorRef("weight")):
                return True
            case _:
                pass
    return False
