"""A row made ready to run: adjacent words fused into calls.

A run of forwards on one microbatch becomes one call of the model, a run of backwards one call of autograd, a run
of updates one optimizer step, a run of equal collectives one message. What stands between two words of a run
ends it, so that everything happens where the text says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, TypeAlias, cast

from counterpoint.program.fusion import fuses_with
from counterpoint.program.grad_overlap import OverlapMap
from counterpoint.program.instruction import (
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
from counterpoint.program.program import shift_microbatch


@dataclass(frozen=True, slots=True)
class ForwardRun:
    """Blocks ``first`` to ``last`` forward on one microbatch, with weights of some version."""

    first: int
    last: int
    micro: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class RecomputeRun:
    """Blocks ``first`` to ``last`` forward again on one microbatch, with the weights of their forward."""

    first: int
    last: int
    micro: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class BackwardRun:
    """Blocks ``last`` down to ``first`` backward on one microbatch, or one part of it, with weights of some version.

    Some sums may begin before it is over.
    """

    first: int
    last: int
    micro: int
    version: int = 0
    part: Literal["", "input", "weight"] = ""
    overlapping: tuple[Collective, ...] = ()


@dataclass(frozen=True, slots=True)
class UpdateRun:
    """The updates of several units, by one optimizer step."""

    units: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class CollectiveRun:
    """Collectives of one verb, kind of value and group, side by side."""

    instructions: tuple[Collective, ...]


@dataclass(frozen=True, slots=True)
class ApplyPushesRun:
    """All that a server does in one step."""

    instructions: tuple[ApplyPushes, ...]


RuntimeCall: TypeAlias = (
    ForwardRun
    | RecomputeRun
    | BackwardRun
    | UpdateRun
    | CollectiveRun
    | ApplyPushesRun
    | Commit
    | SwapGradBuffers
    | Send
    | Recv
    | Push
    | Pull
    | Free
)


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """What a rank does in one kind of step.

    Args:
        words: its row.
        answers_for: the units whose gradient norm this rank counts, so that each is counted once.
        domains: for each commit the microbatches that it decides on, whose samples share one mean.
        early: by the place of a backward the sums that may begin during it.
        above: in a stream, for a microbatch and a rank that its gradient comes from and that decides on others together
            with it, these.
        stride: in a stream, how many microbatches a batch has; 0 for a step that ends what it begins.
    """

    instructions: Sequence[Instruction]
    owned_units: Sequence[tuple[int, ...]]
    loss_scopes: Sequence[Sequence[int]]
    overlap: OverlapMap = field(default_factory=dict)
    upstream_scopes: Mapping[tuple[int, int], Sequence[int]] = field(default_factory=dict)
    microbatches_per_batch: int = 0


def shift_call(call: RuntimeCall, num_microbatches: int) -> RuntimeCall:
    """Return the call for the microbatch that comes ``by`` later."""
    match call:
        case ForwardRun() | RecomputeRun() | BackwardRun():
            return replace(call, micro=call.micro + num_microbatches)
        case CollectiveRun(words):
            return CollectiveRun(tuple(cast("Collective", shift_microbatch(word, num_microbatches)) for word in words))
        case Send() | Recv() | Free():
            return cast("Send | Recv | Release", shift_microbatch(call, num_microbatches))
        case UpdateRun() | ApplyPushesRun() | Commit() | SwapGradBuffers() | Push() | Pull():
            return call


def fuse(
    instructions: Sequence[Instruction], overlap: OverlapMap = MappingProxyType({})
) -> tuple[tuple[RuntimeCall, int, int], ...]:
    """Return the calls of a row, each with the indices of its first and one past its last word.

    Args:
        words: the row.
        early: by the place of a backward the sums that may begin during it.
    """
    calls = []
    start = 0
    while start < len(instructions):
        stop = start + 1
        while stop < len(instructions) and fuses_with(instructions[stop - 1], instructions[stop]):
            stop += 1
        call = _fuse_run(instructions[start:stop])
        if isinstance(call, BackwardRun) and stop - 1 in overlap:
            call = replace(call, early=overlap[stop - 1])
        calls.append((call, start, stop))
        start = stop
    return tuple(calls)


def _fuse_run(instructions: Sequence[Instruction]) -> RuntimeCall:
    first = instructions[0]
    match first:
        case Forward():
            return ForwardRun(first.block, first.block + len(instructions) - 1, first.micro, first.version)
        case Recompute():
            return RecomputeRun(first.block, first.block + len(instructions) - 1, first.micro, first.version)
        case Backward():
            return BackwardRun(first.block - len(instructions) + 1, first.block, first.micro, first.version, first.part)
        case Update():
            return UpdateRun(tuple(word.unit for word in instructions if isinstance(word, Update)))
        case Collective():
            return CollectiveRun(tuple(word for word in instructions if isinstance(word, Collective)))
        case ApplyPushes():
            return ApplyPushesRun(tuple(word for word in instructions if isinstance(word, ApplyPushes)))
        case Commit() | SwapGradBuffers() | Send() | Recv() | Push() | Pull() | Free():
            return first


def segment_boundaries(calls: Sequence[tuple[RuntimeCall, int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the block ranges that the row runs as one function each: ``(first, one past the last)``.

    A function ends wherever a forward or a backward call begins or ends, so that autograd can be run apart.
    """
    covered: set[int] = set()
    cuts: set[int] = set()
    for call, _, _ in calls:
        if isinstance(call, ForwardRun | RecomputeRun | BackwardRun):
            covered.update(range(call.first, call.last + 1))
            cuts.update((call.first, call.last + 1))
    return tuple(_segment_ranges(sorted(covered), cuts))


def _segment_ranges(blocks: Sequence[int], boundaries: set[int]) -> Iterator[tuple[int, int]]:
    start = None
    for at, block in enumerate(blocks):
        if start is None:
            start = block
        following = blocks[at + 1] if at + 1 < len(blocks) else None
        if block + 1 in boundaries or following != block + 1:
            yield start, block + 1
            start = None


def forward_only(instructions: Sequence[Instruction], microbatches_per_batch: int = 0) -> tuple[Instruction, ...]:
    """Return what a row does when nothing is learned: forwards, and what brings them inputs and weights.

    Args:
        words: a row.
        stride: in a stream, how many microbatches a batch has: then all forwards are on one batch, in its order, with
            the newest weights.
    """
    if microbatches_per_batch:
        return tuple(
            sorted(
                (_as_evaluation(word, microbatches_per_batch) for word in instructions if _is_forward_path(word)),
                key=_microbatch,
            )
        )
    kept: list[Instruction] = []
    held: set[tuple[int, ...]] = set()
    for index, word in enumerate(instructions):
        if _is_forward_path(word):
            kept.append(word)
        elif isinstance(word, Collective) and word.op == "all_gather" and _feeds_forward(instructions, index):
            kept.append(word)
            held.add(word.tensor.blocks)
        elif isinstance(word, Free) and word.tensor.name == "weight" and word.tensor.blocks in held:
            kept.append(word)
            held.discard(word.tensor.blocks)
    return tuple(kept)


def _as_evaluation(instruction: Instruction, microbatches_per_batch: int) -> Instruction:
    placed = shift_microbatch(instruction, _microbatch(instruction) % microbatches_per_batch - _microbatch(instruction))
    return replace(placed, version=0) if isinstance(placed, Forward) else placed


def _microbatch(instruction: Instruction) -> int:
    if isinstance(instruction, Send | Recv | Collective):
        return instruction.tensor.micro or 0
    return instruction.micro if isinstance(instruction, Forward) else 0


def _is_forward_path(instruction: Instruction) -> bool:
    """Tell whether a word is about the way forward: a forward, an activation, or the sum of partial outputs."""
    if isinstance(instruction, Send | Recv | Collective):
        return instruction.tensor.name in {"x", "s", "y"}
    return isinstance(instruction, Forward)


def _feeds_forward(instructions: Sequence[Instruction], index: int) -> bool:
    """Tell whether the next compute word after a join is a forward."""
    for word in instructions[index + 1 :]:
        if isinstance(word, Forward):
            return True
        if isinstance(word, Backward):
            return False
    return False
