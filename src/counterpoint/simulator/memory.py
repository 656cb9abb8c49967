"""How much a rank holds at most: weights, gradients, optimizer states, and what backward still needs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
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
"""How many values per parameter Adam keeps."""


@dataclass(slots=True)
class _RankMemory:
    """What a rank holds of each unit, as parts of the whole whose bytes ``sizes`` has, and of each block, in bytes."""

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
        """Add up what is held, by denominator: from then on it is only changed by :meth:`put` and :meth:`drop`."""
        gradients = ((self.grads, 1), (self.grad_shards, 1), (self.delayed_grads, 1), (self.residuals, 2))
        for parts, times in ((self.weights, self.num_weight_versions), *gradients, (self.optimizer_states, num_states)):
            for unit, part in parts.items():
                self.totals[part.denominator] += times * part.numerator * self.unit_bytes[unit]
        self.totals[1] += sum(self.codec_buffers.values())

    def hold(self, parts: dict[_Unit, Fraction], unit: _Unit, fraction: Fraction, times: int = 1) -> None:
        """Hold so much of a unit, so many times."""
        if parts.get(unit) != fraction:
            self.free(parts, unit, times)
            parts[unit] = fraction
            self.totals[fraction.denominator] += times * fraction.numerator * self.unit_bytes[unit]

    def hold_all(self, parts: dict[_Unit, Fraction], units: Iterable[_Unit]) -> None:
        """Hold the whole of some units."""
        for unit in units:
            self.hold(parts, unit, WHOLE)

    def free(self, parts: dict[_Unit, Fraction], unit: _Unit, times: int = 1) -> None:
        """Hold nothing of a unit, of which there may have been nothing."""
        part = parts.pop(unit, None)
        if part is not None:
            self.totals[part.denominator] -= times * part.numerator * self.unit_bytes[unit]

    @property
    def resident_bytes(self) -> int:
        """The bytes of everything held but what is alive between forwards and backwards, rounded up."""
        whole = math.lcm(*self.totals)
        return -(-sum(total * (whole // denominator) for denominator, total in self.totals.items()) // whole)


def peak_memory_bytes(program: Program, size_of: SizeFn, *, num_states: int = ADAM_STATES) -> tuple[int, ...]:
    """Return the bytes that each rank holds at most in one step.

    A forward keeps what leaves its block until its backward, one that is computed again only what it reads until then;
    the gradient of a unit is there from its first backward, or its arrival on a server, to its update or departure, in
    part once it has been shared out and released, and a second one is there where one is set aside; a server that does
    not wait holds one gradient at a time; weights are there in as many versions as the row reads; an optimizer keeps
    ``num_states`` values per parameter (two for Adam) of what its rank updates. A code keeps what it has not sent
    twice: as it is, and as it will be if the step is applied; and it has room for what it sends, and for what is
    gathered from others. What an operator inside a block needs for its backward is not in the program and not counted.

    Args:
        program: a program that keeps the laws.
        size_of: bytes of a whole value on one rank.
        num_states: how many values per parameter the optimizer keeps.
    """
    return tuple(max(row) for row in memory_timeline(program, size_of, num_states=num_states))


def memory_timeline(program: Program, size_of: SizeFn, *, num_states: int = ADAM_STATES) -> list[list[int]]:
    """Return for each rank the bytes that it holds before its first word, and then during each word of one step.

    Args:
        program: as for :func:`peak_memory_bytes`; of a stream with one body.
        size_of: bytes of a whole value on one rank.
        num_states: how many values per parameter the optimizer keeps.
    """
    named = sorted({unit for _, word in program.instructions() for unit in named_units(word)})
    units = {unit: size_of(weight(unit)) for unit in named}
    known: dict[tuple[object, ...], list[int]] = {}
    found = []
    for row in program.unroll(1):
        outline = tuple(_signature(word) for word in row)
        if outline not in known:  # equal but for ranks and microbatches, so equal in bytes
            known[outline] = _bytes_per_instruction(row, units, size_of, num_states)
        found.append(known[outline])
    return found


def _signature(instruction: Instruction) -> tuple[object, ...]:  # noqa: PLR0911 - one case each
    match instruction:
        case Forward(block, version=version):
            return "F", block, version
        case Recompute(block, version=version):
            return "R", block, version
        case Backward(block, part=part, version=version):
            return "B", block, part, version
        case Collective(_, value, group, phase):
            return instruction.op_name, value.name, value.blocks, len(group), phase
        case Free(value):
            return "release", value.name, value.blocks
        case Update() | SwapGradBuffers():
            return (instruction,)
        case ApplyPushes(units):
            return instruction.op, units
        case Send(value, codec=code) | Recv(value, codec=code) | Push(value, codec=code) if value.name == "grad":
            return type(instruction), value.blocks, code
        case Send() | Recv() | Push() | Pull() | Commit():
            return ()


def _bytes_per_instruction(
    instructions: Instructions, units: dict[_Unit, int], size_of: SizeFn, num_states: int
) -> list[int]:
    """Return the bytes that are held before a row, and then during each of its words."""
    users: _Users = defaultdict(list)
    for unit in units:
        for block in unit:
            users[block].append(unit)
    held = _initial_memory(instructions, units, users, size_of)
    held.tally(num_states)
    again, alive_bytes = find_recomputed(instructions), 0
    fixed = held.resident_bytes
    found = [fixed]
    for word in instructions:
        key = (word.block, word.micro) if isinstance(word, Forward | Recompute | Backward) else None
        if key is not None and isinstance(word, Forward | Recompute):
            alive_bytes -= held.saved_bytes.pop(key, 0)
            held.saved_bytes[key] = _saved_bytes(word, again, size_of)
            alive_bytes += held.saved_bytes[key]
        if not isinstance(word, Forward | Recompute):
            _update_memory(held, word, users)
            fixed = held.resident_bytes
        in_hand = max(units[unit] for unit in word.units) if isinstance(word, ApplyPushes) else 0  # one at a time
        found.append(fixed + alive_bytes + in_hand)
        if (
            key is not None and isinstance(word, Backward) and word.computes_weight_grad
        ):  # it holds what it reads and writes
            alive_bytes -= held.saved_bytes.pop(key, 0)
    return found


def _saved_bytes(instruction: Forward | Recompute, again: RecomputeSet, size_of: SizeFn) -> int:
    """Return the bytes that stay: what leaves the block, as large as its gradient, or if at all what enters it."""
    key = (instruction.block, instruction.micro)
    if isinstance(instruction, Recompute) or key not in again.recomputed:
        return size_of(TensorRef("g", (instruction.block,), instruction.micro))
    return (
        size_of(TensorRef("x", (instruction.block,), instruction.micro))
        if instruction.block > 0 and key not in again.input_recomputed
        else 0
    )


def _initial_memory(instructions: Instructions, units: dict[_Unit, int], users: _Users, size_of: SizeFn) -> _RankMemory:  # noqa: C901 - one case each
    """Return what a rank holds before its first word: a weight that it gathers first is kept in part."""
    held = _RankMemory(units, num_weight_versions=weight_versions_needed(instructions))
    parts: dict[_Unit, Fraction] = {}
    for word in instructions:
        match word:
            case Collective("all_gather", TensorRef("weight", unit), group) if unit not in held.weights:
                held.weights[unit] = Fraction(1, len(group))
            case Collective("reduce_scatter", TensorRef("grad", unit), group):
                parts[unit] = Fraction(1, len(group))
            case Collective("all_reduce", TensorRef("grad", unit), group, codec=code) if code and word.phase != "wait":
                kind = find_codec(code).spec
                held.codec_buffers[word] = size_of(word.tensor, code) * (
                    len(group) if kind.reduction == "gather" else 1
                )
                held.residuals[unit] = held.residuals.get(unit, Fraction(0)) + kind.has_error_feedback
            case Send(TensorRef("grad", unit), codec=code) | Push(TensorRef("grad", unit), codec=code) if code:
                held.codec_buffers[word] = size_of(word.tensor, code)
                held.residuals[unit] = held.residuals.get(unit, Fraction(0)) + 1
            case Forward(block):
                held.weights.update({unit: WHOLE for unit in users[block] if unit not in held.weights})
            case Update(unit):
                held.weights.setdefault(unit, WHOLE)
                held.optimizer_states[unit] = parts.get(unit, WHOLE)
            case ApplyPushes(served):
                held.weights.update(dict.fromkeys(served, WHOLE))
                held.optimizer_states.update(dict.fromkeys(served if word.applies_gradients else (), WHOLE))
            case SwapGradBuffers(unit):
                held.delayed_grads[unit] = WHOLE
            case Recompute() | Backward() | Collective() | Send() | Recv() | Push() | Pull() | Free() | Commit():
                pass
    held.resident_weights = dict(held.weights)
    return held


def _update_memory(held: _RankMemory, instruction: Instruction, users: _Users) -> None:
    match instruction:
        case Backward(block):
            held.hold_all(held.grads, users[block])
        case Collective("reduce_scatter", TensorRef("grad", unit), group, phase) if phase != "start":
            held.hold(held.grad_shards, unit, Fraction(1, len(group)))
            held.free(held.grads, unit)
        case Collective("all_gather", TensorRef("weight", unit)):
            held.hold(held.weights, unit, WHOLE, held.num_weight_versions)
        case Free(TensorRef("weight", unit)):
            held.hold(held.weights, unit, held.resident_weights[unit], held.num_weight_versions)
        case Free(value) if value.name == "grad":
            held.free(held.grads, value.blocks)
        case Recv(TensorRef("grad", unit)):
            held.hold(held.grads, unit, WHOLE)
        case Update(unit) | Send(TensorRef("grad", unit)) | Push(TensorRef("grad", unit)):
            held.free(held.grads, unit)
            held.free(held.grad_shards, unit)
        case Collective() | Send() | Recv() | Push() | Pull() | Free() | ApplyPushes() | Commit() | SwapGradBuffers():
            pass
        case Forward() | Recompute():
            pass
