"""Peak memory of a rank: parameters, gradients, optimizer states, and activations saved for the backward."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import TypeAlias

from counterpoint.program.comm_volume import SizeFn
from counterpoint.program.compression import find_codec
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
    TensorRef,
    Update,
    weight,
)
from counterpoint.program.program import Instructions, Program, weight_versions_needed
from counterpoint.program.recompute_sets import RecomputeSet, find_recomputed
from counterpoint.program.units import named_units

_Unit: TypeAlias = tuple[int, ...]
_Users: TypeAlias = defaultdict[int, list[_Unit]]
"""The units that each block uses."""

WHOLE = Fraction(1)

ADAM_STATES = 2
"""Values per parameter that Adam keeps."""


@dataclass(slots=True)
class _RankMemory:
    """Contents of a rank's memory: of each unit as a fraction of ``unit_bytes``, of saved activations in bytes."""

    unit_bytes: dict[_Unit, int]
    weights: dict[_Unit, Fraction] = field(default_factory=dict)
    resident_weights: dict[_Unit, Fraction] = field(default_factory=dict)
    grads: dict[_Unit, Fraction] = field(default_factory=dict)
    grad_shards: dict[_Unit, Fraction] = field(default_factory=dict)
    optimizer_states: dict[_Unit, Fraction] = field(default_factory=dict)
    residuals: dict[_Unit, Fraction] = field(default_factory=dict)
    codec_buffers: dict[Collective | Send | Push, int] = field(default_factory=dict)
    delayed_grads: dict[_Unit, Fraction] = field(default_factory=dict)
    saved_bytes: dict[tuple[int, int], int] = field(default_factory=dict)
    num_weight_versions: int = 1
    totals: defaultdict[int, int] = field(default_factory=partial(defaultdict, int))

    def tally(self, num_states: int) -> None:
        """Sum up what is held, by denominator; afterwards only :meth:`hold` and :meth:`free` may change it."""
        gradients = ((self.grads, 1), (self.grad_shards, 1), (self.delayed_grads, 1), (self.residuals, 2))
        for fractions, times in (
            (self.weights, self.num_weight_versions),
            *gradients,
            (self.optimizer_states, num_states),
        ):
            for unit, fraction in fractions.items():
                self.totals[fraction.denominator] += times * fraction.numerator * self.unit_bytes[unit]
        self.totals[1] += sum(self.codec_buffers.values())

    def hold(self, fractions: dict[_Unit, Fraction], unit: _Unit, fraction: Fraction, times: int = 1) -> None:
        """Hold ``times`` copies of a fraction of a unit, instead of what was held of it."""
        if fractions.get(unit) != fraction:
            self.free(fractions, unit, times)
            fractions[unit] = fraction
            self.totals[fraction.denominator] += times * fraction.numerator * self.unit_bytes[unit]

    def free(self, fractions: dict[_Unit, Fraction], unit: _Unit, times: int = 1) -> None:
        """Free what is held of a unit, if anything."""
        fraction = fractions.pop(unit, None)
        if fraction is not None:
            self.totals[fraction.denominator] -= times * fraction.numerator * self.unit_bytes[unit]

    @property
    def resident_bytes(self) -> int:
        """Bytes of everything but saved activations, rounded up."""
        common_denominator = math.lcm(*self.totals)
        return -(
            -sum(total * (common_denominator // denominator) for denominator, total in self.totals.items())
            // common_denominator
        )


def peak_memory_bytes(program: Program, size_of: SizeFn, *, num_states: int = ADAM_STATES) -> tuple[int, ...]:
    """Return the peak memory of each rank in one step.

    A forward saves the outputs of the operators in its block until the backward; a forward that is recomputed saves
    only the block's input. The gradient of a unit exists from its first backward, or its arrival on a server, to its
    update or departure, as a shard once it has been reduce-scattered and freed; a delayed gradient is a second one. An
    asynchronous server holds one gradient at a time. Parameters exist in as many versions as the rank program reads; an
    optimizer keeps ``num_states`` values per parameter that its rank updates. A compression codec with error feedback
    keeps two residuals, the present one and the one of the next step, and buffers for what it sends and gathers.
    Temporary memory of operators inside a block is not in the program and not counted.

    Args:
        program: a verified program.
        size_of: bytes of a whole tensor on one rank.
        num_states: values per parameter that the optimizer keeps.
    """
    return tuple(max(timeline) for timeline in memory_timeline(program, size_of, num_states=num_states))


def memory_timeline(program: Program, size_of: SizeFn, *, num_states: int = ADAM_STATES) -> list[list[int]]:
    """Return for each rank the bytes before its first instruction, and then during each instruction of one step.

    Args:
        program: as for :func:`peak_memory_bytes`; an asynchronous pipeline runs its body once.
        size_of: bytes of a whole tensor on one rank.
        num_states: values per parameter that the optimizer keeps.
    """
    named = sorted({unit for _, instruction in program.instructions() for unit in named_units(instruction)})
    units = {unit: size_of(weight(unit)) for unit in named}
    cache: dict[tuple[object, ...], list[int]] = {}
    timelines = []
    for instructions in program.unroll(1):
        signature = tuple(_signature(instruction) for instruction in instructions)
        if signature not in cache:  # equal but for ranks and microbatches, so equal in bytes
            cache[signature] = _bytes_per_instruction(instructions, units, size_of, num_states)
        timelines.append(cache[signature])
    return timelines


def _signature(instruction: Instruction) -> tuple[object, ...]:  # noqa: PLR0911 - one case each
    match instruction:
        case Forward(block, version=version):
            return "F", block, version
        case Recompute(block, version=version):
            return "R", block, version
        case Backward(block, part=part, version=version):
            return "B", block, part, version
        case Collective(_, tensor, group, phase):
            return instruction.op_name, tensor.name, tensor.blocks, len(group), phase
        case Free(tensor):
            return "free", tensor.name, tensor.blocks
        case Update() | SwapGradBuffers():
            return (instruction,)
        case ApplyPushes(units):
            return instruction.op, units
        case Send(tensor, codec=codec) | Recv(tensor, codec=codec) | Push(tensor, codec=codec) if tensor.name == "grad":
            return type(instruction), tensor.blocks, codec
        case Send() | Recv() | Push() | Pull() | Commit():
            return ()


def _bytes_per_instruction(
    instructions: Instructions, units: dict[_Unit, int], size_of: SizeFn, num_states: int
) -> list[int]:
    """Return the bytes before the first instruction of a rank, and then during each of them."""
    users: _Users = defaultdict(list)
    for unit in units:
        for block in unit:
            users[block].append(unit)
    memory = _initial_memory(instructions, units, users, size_of)
    memory.tally(num_states)
    recompute_set, saved_bytes = find_recomputed(instructions), 0
    resident_bytes = memory.resident_bytes
    timeline = [resident_bytes]
    for instruction in instructions:
        key = (
            (instruction.block, instruction.micro) if isinstance(instruction, Forward | Recompute | Backward) else None
        )
        if key is not None and isinstance(instruction, Forward | Recompute):
            saved_bytes -= memory.saved_bytes.pop(key, 0)
            memory.saved_bytes[key] = _saved_bytes(instruction, recompute_set, size_of)
            saved_bytes += memory.saved_bytes[key]
        if not isinstance(instruction, Forward | Recompute):
            _update_memory(memory, instruction, users)
            resident_bytes = memory.resident_bytes
        incoming_bytes = max(units[unit] for unit in instruction.units) if isinstance(instruction, ApplyPushes) else 0
        timeline.append(resident_bytes + saved_bytes + incoming_bytes)
        # the backward itself still holds what it reads
        if key is not None and isinstance(instruction, Backward) and instruction.computes_weight_grad:
            saved_bytes -= memory.saved_bytes.pop(key, 0)
    return timeline


def _saved_bytes(instruction: Forward | Recompute, recompute_set: RecomputeSet, size_of: SizeFn) -> int:
    """Return the bytes that a forward saves: all outputs of its block, or only the input if it is recomputed."""
    key = (instruction.block, instruction.micro)
    if isinstance(instruction, Recompute) or key not in recompute_set.recomputed:
        return size_of(TensorRef("g", (instruction.block,), instruction.micro))
    return (
        size_of(TensorRef("x", (instruction.block,), instruction.micro))
        if instruction.block > 0 and key not in recompute_set.input_recomputed
        else 0
    )


def _initial_memory(instructions: Instructions, units: dict[_Unit, int], users: _Users, size_of: SizeFn) -> _RankMemory:  # noqa: C901 - one case each
    """Return what a rank holds before its first instruction: the shard of parameters that it gathers first."""
    memory = _RankMemory(units, num_weight_versions=weight_versions_needed(instructions))
    shards: dict[_Unit, Fraction] = {}
    for instruction in instructions:
        match instruction:
            case Collective("all_gather", TensorRef("weight", unit), group) if unit not in memory.weights:
                memory.weights[unit] = Fraction(1, len(group))
            case Collective("reduce_scatter", TensorRef("grad", unit), group):
                shards[unit] = Fraction(1, len(group))
            case Collective("all_reduce", TensorRef("grad", unit), group, codec=codec) if (
                codec and instruction.phase != "wait"
            ):
                spec = find_codec(codec).spec
                memory.codec_buffers[instruction] = size_of(instruction.tensor, codec) * (
                    len(group) if spec.reduction == "gather" else 1
                )
                memory.residuals[unit] = memory.residuals.get(unit, Fraction(0)) + spec.has_error_feedback
            case Send(TensorRef("grad", unit), codec=codec) | Push(TensorRef("grad", unit), codec=codec) if codec:
                memory.codec_buffers[instruction] = size_of(instruction.tensor, codec)
                memory.residuals[unit] = memory.residuals.get(unit, Fraction(0)) + 1
            case Forward(block):
                memory.weights.update({unit: WHOLE for unit in users[block] if unit not in memory.weights})
            case Update(unit):
                memory.weights.setdefault(unit, WHOLE)
                memory.optimizer_states[unit] = shards.get(unit, WHOLE)
            case ApplyPushes(served):
                memory.weights.update(dict.fromkeys(served, WHOLE))
                memory.optimizer_states.update(dict.fromkeys(served if instruction.applies_gradients else (), WHOLE))
            case SwapGradBuffers(unit):
                memory.delayed_grads[unit] = WHOLE
            case Recompute() | Backward() | Collective() | Send() | Recv() | Push() | Pull() | Free() | Commit():
                pass
    memory.resident_weights = dict(memory.weights)
    return memory


def _update_memory(memory: _RankMemory, instruction: Instruction, users: _Users) -> None:  # noqa: C901 - one case each
    match instruction:
        case Backward(block):
            for unit in users[block]:
                memory.hold(memory.grads, unit, WHOLE)
        case Collective("reduce_scatter", TensorRef("grad", unit), group, phase) if phase != "start":
            memory.hold(memory.grad_shards, unit, Fraction(1, len(group)))
            memory.free(memory.grads, unit)
        case Collective("all_gather", TensorRef("weight", unit)):
            memory.hold(memory.weights, unit, WHOLE, memory.num_weight_versions)
        case Free(TensorRef("weight", unit)):
            memory.hold(memory.weights, unit, memory.resident_weights[unit], memory.num_weight_versions)
        case Free(tensor) if tensor.name == "grad":
            memory.free(memory.grads, tensor.blocks)
        case Recv(TensorRef("grad", unit)):
            memory.hold(memory.grads, unit, WHOLE)
        case Update(unit) | Send(TensorRef("grad", unit)) | Push(TensorRef("grad", unit)):
            memory.free(memory.grads, unit)
            memory.free(memory.grad_shards, unit)
        case Collective() | Send() | Recv() | Push() | Pull() | Free() | ApplyPushes() | Commit() | SwapGradBuffers():
            pass
        case Forward() | Recompute():
            pass
