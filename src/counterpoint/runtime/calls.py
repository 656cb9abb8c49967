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

from counterpoint.program.early import Early
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Forward,
    Instruction,
    Pull,
    Push,
    Recompute,
    Recv,
    Release,
    Send,
    Serve,
    Swap,
    Update,
)
from counterpoint.program.program import moved
from counterpoint.program.runs import goes_on


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
    early: tuple[Collective, ...] = ()


@dataclass(frozen=True, slots=True)
class UpdateRun:
    """The updates of several units, by one optimizer step."""

    units: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class CollectiveRun:
    """Collectives of one verb, kind of value and group, side by side."""

    words: tuple[Collective, ...]


@dataclass(frozen=True, slots=True)
class ServeRun:
    """All that a server does in one step."""

    words: tuple[Serve, ...]


Call: TypeAlias = (
    ForwardRun
    | RecomputeRun
    | BackwardRun
    | UpdateRun
    | CollectiveRun
    | ServeRun
    | Commit
    | Swap
    | Send
    | Recv
    | Push
    | Pull
    | Release
)


@dataclass(frozen=True, slots=True)
class Script:
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

    words: Sequence[Instruction]
    answers_for: Sequence[tuple[int, ...]]
    domains: Sequence[Sequence[int]]
    early: Early = field(default_factory=dict)
    above: Mapping[tuple[int, int], Sequence[int]] = field(default_factory=dict)
    stride: int = 0


def later(call: Call, by: int) -> Call:
    """Return the call for the microbatch that comes ``by`` later."""
    match call:
        case ForwardRun() | RecomputeRun() | BackwardRun():
            return replace(call, micro=call.micro + by)
        case CollectiveRun(words):
            return CollectiveRun(tuple(cast("Collective", moved(word, by)) for word in words))
        case Send() | Recv() | Release():
            return cast("Send | Recv | Release", moved(call, by))
        case UpdateRun() | ServeRun() | Commit() | Swap() | Push() | Pull():
            return call


def fuse(words: Sequence[Instruction], early: Early = MappingProxyType({})) -> tuple[tuple[Call, int, int], ...]:
    """Return the calls of a row, each with the indices of its first and one past its last word.

    Args:
        words: the row.
        early: by the place of a backward the sums that may begin during it.
    """
    calls = []
    start = 0
    while start < len(words):
        stop = start + 1
        while stop < len(words) and goes_on(words[stop - 1], words[stop]):
            stop += 1
        call = _call(words[start:stop])
        if isinstance(call, BackwardRun) and stop - 1 in early:
            call = replace(call, early=early[stop - 1])
        calls.append((call, start, stop))
        start = stop
    return tuple(calls)


def _call(words: Sequence[Instruction]) -> Call:
    first = words[0]
    match first:
        case Forward():
            return ForwardRun(first.block, first.block + len(words) - 1, first.micro, first.version)
        case Recompute():
            return RecomputeRun(first.block, first.block + len(words) - 1, first.micro, first.version)
        case Backward():
            return BackwardRun(first.block - len(words) + 1, first.block, first.micro, first.version, first.part)
        case Update():
            return UpdateRun(tuple(word.unit for word in words if isinstance(word, Update)))
        case Collective():
            return CollectiveRun(tuple(word for word in words if isinstance(word, Collective)))
        case Serve():
            return ServeRun(tuple(word for word in words if isinstance(word, Serve)))
        case Commit() | Swap() | Send() | Recv() | Push() | Pull() | Release():
            return first


def boundaries(calls: Sequence[tuple[Call, int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the block ranges that the row runs as one function each: ``(first, one past the last)``.

    A function ends wherever a forward or a backward call begins or ends, so that autograd can be run apart.
    """
    covered: set[int] = set()
    cuts: set[int] = set()
    for call, _, _ in calls:
        if isinstance(call, ForwardRun | RecomputeRun | BackwardRun):
            covered.update(range(call.first, call.last + 1))
            cuts.update((call.first, call.last + 1))
    return tuple(_ranges(sorted(covered), cuts))


def _ranges(blocks: Sequence[int], cuts: set[int]) -> Iterator[tuple[int, int]]:
    start = None
    for at, block in enumerate(blocks):
        if start is None:
            start = block
        following = blocks[at + 1] if at + 1 < len(blocks) else None
        if block + 1 in cuts or following != block + 1:
            yield start, block + 1
            start = None


def forward_only(words: Sequence[Instruction], stride: int = 0) -> tuple[Instruction, ...]:
    """Return what a row does when nothing is learned: forwards, and what brings them inputs and weights.

    Args:
        words: a row.
        stride: in a stream, how many microbatches a batch has: then all forwards are on one batch, in its order, with
            the newest weights.
    """
    if stride:
        return tuple(sorted((_evaluating(word, stride) for word in words if _always_kept(word)), key=_micro_of))
    kept: list[Instruction] = []
    held: set[tuple[int, ...]] = set()
    for index, word in enumerate(words):
        if _always_kept(word):
            kept.append(word)
        elif isinstance(word, Collective) and word.verb == "all_gather" and _feeds_forward(words, index):
            kept.append(word)
            held.add(word.value.blocks)
        elif isinstance(word, Release) and word.value.name == "weight" and word.value.blocks in held:
            kept.append(word)
            held.discard(word.value.blocks)
    return tuple(kept)


def _evaluating(word: Instruction, stride: int) -> Instruction:
    placed = moved(word, _micro_of(word) % stride - _micro_of(word))
    return replace(placed, version=0) if isinstance(placed, Forward) else placed


def _micro_of(word: Instruction) -> int:
    if isinstance(word, Send | Recv | Collective):
        return word.value.micro or 0
    return word.micro if isinstance(word, Forward) else 0


def _always_kept(word: Instruction) -> bool:
    """Tell whether a word is about the way forward: a forward, an activation, or the sum of partial outputs."""
    if isinstance(word, Send | Recv | Collective):
        return word.value.name in {"x", "s", "y"}
    return isinstance(word, Forward)


def _feeds_forward(words: Sequence[Instruction], index: int) -> bool:
    """Tell whether the next compute word after a join is a forward."""
    for word in words[index + 1 :]:
        if isinstance(word, Forward):
            return True
        if isinstance(word, Backward):
            return False
    return False
