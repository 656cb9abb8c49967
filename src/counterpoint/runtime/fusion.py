"""Lower a rank program to calls: adjacent instructions that can run as one are fused.

A run of forwards on one microbatch becomes one call of the model, a run of backwards one call of autograd, a run of
updates one optimizer step, a run of equal collectives one batch of them::

    F0.0 F1.0  send(x2.0)  B1.0 B0.0  all_reduce(grad0) all_reduce(grad1)  U0 U1
    ForwardRun    Send     BackwardRun        CollectiveRun              UpdateRun

Any other instruction between two members ends a run, so that everything happens in the order of the program's text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias, cast

from counterpoint.program.fusion import fuses_with
from counterpoint.program.grad_overlap import OverlapMap
from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Fetch,
    Forward,
    Free,
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
from counterpoint.program.program import shift_microbatch

GRADIENTS = frozenset({"grad", "delayed_grad"})
"""Names of tensors that are gradients of a unit."""


@dataclass(frozen=True, slots=True)
class ForwardRun:
    """Forward of blocks ``first`` to ``last`` on one microbatch, with one version of the weights."""

    first: int
    last: int
    micro: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class RecomputeRun:
    """Recomputation of blocks ``first`` to ``last`` on one microbatch, with the weights of their forward."""

    first: int
    last: int
    micro: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class BackwardRun:
    """Backward of blocks ``last`` down to ``first`` on one microbatch, or its input or weight part.

    Reductions in ``overlapping`` may start before it has finished. ``accumulates`` says that a later backward adds to
    all gradients of this one before anything else uses them.
    """

    first: int
    last: int
    micro: int
    version: int = 0
    part: Literal["", "input", "weight"] = ""
    overlapping: tuple[Collective, ...] = ()
    accumulates: bool = False


@dataclass(frozen=True, slots=True)
class UpdateRun:
    """Updates of several units in one optimizer step."""

    units: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class FetchRun:
    """Reads of the offloaded states of several units, which start together."""

    units: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class OffloadRun:
    """Waits until the states of several units are offloaded."""

    units: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class CollectiveRun:
    """Collectives of one operation, kind of tensor and group, which may run concurrently."""

    instructions: tuple[Collective, ...]


@dataclass(frozen=True, slots=True)
class ApplyPushesRun:
    """All pushes that a server applies in one step."""

    instructions: tuple[ApplyPushes, ...]


RuntimeCall: TypeAlias = (
    ForwardRun
    | RecomputeRun
    | BackwardRun
    | UpdateRun
    | FetchRun
    | OffloadRun
    | CollectiveRun
    | ApplyPushesRun
    | Commit
    | SwapGradBuffers
    | Send
    | Recv
    | Push
    | Pull
    | Free
    | Fetch
    | Offload
)


class FusedCall(NamedTuple):
    """A call, and which instructions of the program it runs.

    Args:
        call: what the interpreter executes.
        start: index of its first instruction.
        stop: one past its last.
    """

    call: RuntimeCall
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """What a rank runs in one step variant.

    Args:
        instructions: the rank's program.
        owned_units: the units whose gradient norm this rank contributes, so that each is counted once.
        loss_scopes: for each commit the microbatches that it decides on; the loss is a mean over their samples.
        overlap: the reductions that may start during a backward, by the backward's index.
        upstream_scopes: in an asynchronous pipeline, by microbatch and sender of its gradient, the sender's loss scope
            if it differs from this rank's.
        microbatches_per_batch: in an asynchronous pipeline; 0 for a synchronous step.
    """

    instructions: Sequence[Instruction]
    owned_units: Sequence[tuple[int, ...]]
    loss_scopes: Sequence[Sequence[int]]
    overlap: OverlapMap = field(default_factory=dict)
    upstream_scopes: Mapping[tuple[int, int], Sequence[int]] = field(default_factory=dict)
    microbatches_per_batch: int = 0


def shift_call(call: RuntimeCall, num_microbatches: int) -> RuntimeCall:
    """Return the same call for the microbatch ``num_microbatches`` later."""
    match call:
        case ForwardRun() | RecomputeRun() | BackwardRun():
            return replace(call, micro=call.micro + num_microbatches)
        case CollectiveRun(instructions):
            return CollectiveRun(
                tuple(
                    cast("Collective", shift_microbatch(instruction, num_microbatches)) for instruction in instructions
                )
            )
        case Send() | Recv() | Free() | Fetch() | Offload():
            return cast("Send | Recv | Free | Fetch | Offload", shift_microbatch(call, num_microbatches))
        case UpdateRun() | ApplyPushesRun() | Commit() | SwapGradBuffers() | Push() | Pull():
            return call
        case FetchRun() | OffloadRun():
            return call


def fuse(instructions: Sequence[Instruction], overlap: OverlapMap = MappingProxyType({})) -> tuple[FusedCall, ...]:
    """Return the calls that run the instructions, adjacent ones as one call where they can be.

    Args:
        instructions: the rank's program.
        overlap: the reductions that may start during a backward, by the backward's index.
    """
    calls = []
    start, accumulating = 0, find_accumulating(instructions)
    while start < len(instructions):
        stop = start + 1
        while stop < len(instructions) and fuses_with(instructions[stop - 1], instructions[stop]):
            stop += 1
        call = _fuse_run(instructions[start:stop])
        if isinstance(call, BackwardRun) and stop - 1 in overlap:
            call = replace(call, overlapping=overlap[stop - 1])
        if isinstance(call, BackwardRun) and accumulating.issuperset(range(start, stop)):
            call = replace(call, accumulates=True)
        calls.append(FusedCall(call, start, stop))
        start = stop
    return tuple(calls)


def find_accumulating(instructions: Sequence[Instruction]) -> set[int]:
    """Return the indices of the backwards to whose gradients a later one adds before anything else uses them.

    Args:
        instructions: the rank's program.
    """
    found, continued = set(), set[int]()  # blocks that a later backward adds to
    for index in reversed(range(len(instructions))):
        match instructions[index]:
            case Backward(block, part=part):
                if block in continued:
                    found.add(index)
                if part != "input":
                    continued.add(block)
            case Update(unit) | SwapGradBuffers(unit):
                continued.difference_update(unit)
            case Commit() | ApplyPushes():
                continued.clear()
            case (
                Send(tensor)
                | Recv(tensor)
                | Push(tensor)
                | Pull(tensor)
                | Free(tensor)
                | Fetch(tensor)
                | Offload(tensor)
            ):
                continued.difference_update(tensor.blocks if tensor.name in GRADIENTS else ())
            case Collective(tensor=tensor):
                continued.difference_update(tensor.blocks if tensor.name in GRADIENTS else ())
            case Forward() | Recompute():
                pass
    return found


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
            return UpdateRun(tuple(instruction.unit for instruction in instructions if isinstance(instruction, Update)))
        case Collective():
            return CollectiveRun(
                tuple(instruction for instruction in instructions if isinstance(instruction, Collective))
            )
        case ApplyPushes():
            return ApplyPushesRun(
                tuple(instruction for instruction in instructions if isinstance(instruction, ApplyPushes))
            )
        case Fetch() | Offload() if first.tensor.name == "state":
            units = tuple(one.tensor.blocks for one in instructions if isinstance(one, Fetch | Offload))
            return FetchRun(units) if isinstance(first, Fetch) else OffloadRun(units)
        case Commit() | SwapGradBuffers() | Send() | Recv() | Push() | Pull() | Free() | Fetch() | Offload():
            return first


def segment_boundaries(calls: Sequence[FusedCall]) -> tuple[tuple[int, int], ...]:
    """Return the block ranges that run as one function each: ``(first, one past the last)``.

    A range ends wherever a forward or a backward call begins or ends, so that autograd can run each separately.
    """
    covered: set[int] = set()
    boundaries: set[int] = set()
    for call, _, _ in calls:
        if isinstance(call, ForwardRun | RecomputeRun | BackwardRun):
            covered.update(range(call.first, call.last + 1))
            boundaries.update((call.first, call.last + 1))
    return tuple(_segment_ranges(sorted(covered), boundaries))


def _segment_ranges(blocks: Sequence[int], boundaries: set[int]) -> Iterator[tuple[int, int]]:
    start = None
    for index, block in enumerate(blocks):
        if start is None:
            start = block
        next_block = blocks[index + 1] if index + 1 < len(blocks) else None
        if block + 1 in boundaries or next_block != block + 1:
            yield start, block + 1
            start = None


def forward_only(instructions: Sequence[Instruction], microbatches_per_batch: int = 0) -> tuple[Instruction, ...]:
    """Return the instructions of an evaluation: forwards, and what provides their inputs and weights.

    Args:
        instructions: the rank's program.
        microbatches_per_batch: in an asynchronous pipeline; all forwards are then on one batch, in its order, with the
            newest weights.
    """
    if microbatches_per_batch:
        return tuple(
            sorted(
                (
                    _as_evaluation(instruction, microbatches_per_batch)
                    for instruction in instructions
                    if _is_forward_path(instruction)
                ),
                key=_microbatch,
            )
        )
    selected: list[Instruction] = []
    gathered: set[tuple[int, ...]] = set()
    for index, instruction in enumerate(instructions):
        if _is_forward_path(instruction):
            selected.append(instruction)
        elif (
            isinstance(instruction, Collective)
            and (instruction.op, instruction.tensor.name) == ("all_gather", "weight")
            and _feeds_forward(instructions, _end_of(instructions, index, instruction), instruction.tensor)
        ):
            selected.append(instruction)
            gathered.add(instruction.tensor.blocks)
        elif isinstance(instruction, Fetch) and _feeds_gather(instructions, index, instruction.tensor):
            selected.append(instruction)
        elif (
            isinstance(instruction, Free)
            and instruction.tensor.name == "weight"
            and instruction.tensor.blocks in gathered
        ):
            selected.append(instruction)
            gathered.discard(instruction.tensor.blocks)
    return tuple(selected)


def _as_evaluation(instruction: Instruction, microbatches_per_batch: int) -> Instruction:
    shifted = shift_microbatch(
        instruction, _microbatch(instruction) % microbatches_per_batch - _microbatch(instruction)
    )
    return replace(shifted, version=0) if isinstance(shifted, Forward) else shifted


def _microbatch(instruction: Instruction) -> int:
    if isinstance(instruction, Send | Recv | Collective):
        return instruction.tensor.micro or 0
    return instruction.micro if isinstance(instruction, Forward) else 0


def _is_forward_path(instruction: Instruction) -> bool:
    """Return whether an instruction is a forward, or moves an activation, skip value, partial output or outputs."""
    if isinstance(instruction, Collective):
        return instruction.tensor.name in {"y", "out"}
    if isinstance(instruction, Send | Recv):
        return instruction.tensor.name in {"x", "s"}
    return isinstance(instruction, Forward)


def _end_of(instructions: Sequence[Instruction], index: int, collective: Collective) -> int:
    """Return the index of the wait for a collective that is started there, else the same index."""
    wait = replace(collective, phase="wait")
    return instructions.index(wait, index) if collective.phase == "start" else index


def _feeds_gather(instructions: Sequence[Instruction], index: int, weight: TensorRef) -> bool:
    """Return whether weights that are fetched are gathered for a forward, instead of a backward or an update."""
    for place, instruction in enumerate(instructions[index + 1 :], index + 1):
        if isinstance(instruction, Collective) and instruction.tensor == weight:
            return _feeds_forward(instructions, _end_of(instructions, place, instruction), weight)
        if isinstance(instruction, Update | Offload):
            return False
    return False


def _feeds_forward(instructions: Sequence[Instruction], index: int, weight: TensorRef) -> bool:
    """Return whether a forward after an all-gather reads the weights before they are freed."""
    for instruction in instructions[index + 1 :]:
        if isinstance(instruction, Forward) and instruction.block in weight.blocks:
            return True
        if isinstance(instruction, Free) and instruction.tensor == weight:
            return False
    return False
