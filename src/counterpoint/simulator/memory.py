"""Peak memory of a rank: parameters, gradients, optimizer states, and activations saved for the backward."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TypeAlias, TypeGuard

from counterpoint.program.comm_volume import SizeFn
from counterpoint.program.compression import encodes_shards, exchanges_momentum, find_codec
from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Fetch,
    Forward,
    Free,
    HeldAs,
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
from counterpoint.program.offloading import (
    NUM_OFFLOAD_BUFFERS,
    OFFLOAD_CHUNK_BYTES,
    offloaded_units,
    offloaded_weights,
)
from counterpoint.program.program import Instructions, Program, weight_versions_needed
from counterpoint.program.recompute_sets import RecomputeSet, find_recomputed
from counterpoint.program.units import freed_weights, named_units

_Unit: TypeAlias = tuple[int, ...]
_Users: TypeAlias = defaultdict[int, list[_Unit]]
"""The units that each block uses."""

WHOLE = Fraction(1)
OFFLOAD_BUFFER_BYTES = NUM_OFFLOAD_BUFFERS * OFFLOAD_CHUNK_BYTES
"""The most bytes of states that a rank has in memory while it updates, if they are offloaded."""


class _UnitSizes:
    """Bytes of what a rank may hold of a unit, each asked for once."""

    def __init__(self, size_of: SizeFn) -> None:
        self.size_of = size_of
        self.known: dict[tuple[HeldAs, _Unit], int] = {}

    def __call__(self, name: HeldAs, unit: _Unit) -> int:
        """Return the bytes of the whole unit."""
        if (name, unit) not in self.known:
            self.known[name, unit] = self.size_of(TensorRef(name, unit))
        return self.known[name, unit]


@dataclass(slots=True)
class _Held:
    """What a rank holds of units: of each a fraction of its tensor of this name, ``times`` times."""

    name: HeldAs
    times: int = 1
    fractions: dict[_Unit, Fraction] = field(default_factory=dict)


class _RankMemory:
    """Contents of a rank's memory: tensors of units, and saved activations in bytes."""

    def __init__(self, unit_bytes: _UnitSizes, instructions: Instructions) -> None:
        self.unit_bytes, self.freed = unit_bytes, freed_weights(instructions)
        self.copied_after_backward = set(_copied_after_backward(instructions))
        self.copied_during_backward = set(_copied_during_backward(instructions))
        num_weight_versions = weight_versions_needed(instructions)
        self.weights = _Held("weight", num_weight_versions)
        self.gathered = _Held("gathered_weight", num_weight_versions)  # beside the shard that is always there
        self.grads, self.grad_shards, self.delayed_grads = _Held("grad"), _Held("grad"), _Held("grad")
        self.residuals = _Held("grad", 2)
        self.optimizer_states = _Held("state")
        self.state_fractions: dict[_Unit, Fraction] = {}  # of the states that are offloaded, also while they are
        self.fetched: set[_Unit] = set()
        self.shard_fractions: dict[_Unit, Fraction] = {}  # of the weights that are offloaded
        self.codec_buffers: dict[Collective | Send | Push, int] = {}
        self.saved_bytes: dict[tuple[int, int], int] = {}
        self.written: tuple[int, int] | None = None  # the input that is being written to disk, from memory
        self.totals: defaultdict[int, int] = defaultdict(int)

    def cast_bytes(self, units: Iterable[_Unit]) -> int:
        """Return the bytes of the casts that a forward makes of weights, but for those that were gathered as casts."""
        return sum(self.unit_bytes("gathered_cast" if unit in self.freed else "cast", unit) for unit in units)

    def tally(self) -> None:
        """Sum up what is held, by denominator; afterwards only :meth:`hold` and :meth:`free` may change it."""
        for held in (self.weights, self.delayed_grads, self.residuals, self.optimizer_states):
            for unit, fraction in held.fractions.items():
                self.count(held, unit, fraction)
        self.totals[1] += sum(self.codec_buffers.values())

    def count(self, held: _Held, unit: _Unit, fraction: Fraction, sign: int = 1) -> None:
        """Add a fraction of a unit to the sum, or take it away."""
        size = self.unit_bytes(held.name, unit)
        self.totals[fraction.denominator] += sign * held.times * fraction.numerator * size

    def hold(self, held: _Held, unit: _Unit, fraction: Fraction) -> None:
        """Hold a fraction of a unit, instead of what was held of it."""
        if held.fractions.get(unit) != fraction:
            self.free(held, unit)
            held.fractions[unit] = fraction
            self.count(held, unit, fraction)

    def shard_bytes(self, unit: _Unit) -> int:
        """Return the bytes of the rank's shard of weights that are offloaded; 0 of others."""
        return math.ceil(self.unit_bytes("weight", unit) * self.shard_fractions.get(unit, 0))

    def free(self, held: _Held, unit: _Unit) -> None:
        """Free what is held of a unit, if anything."""
        fraction = held.fractions.pop(unit, None)
        if fraction is not None:
            self.count(held, unit, fraction, -1)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of the buffers that offloaded states are read into and written from."""
        sizes = (self.unit_bytes("state", unit) * self.state_fractions[unit] for unit in self.fetched)
        return min(math.ceil(sum(sizes)), OFFLOAD_BUFFER_BYTES)

    @property
    def resident_bytes(self) -> int:
        """Bytes of everything but saved activations, rounded up."""
        common_denominator = math.lcm(*self.totals)
        return -(
            -sum(total * (common_denominator // denominator) for denominator, total in self.totals.items())
            // common_denominator
        )


def peak_memory_bytes(program: Program, size_of: SizeFn) -> tuple[int, ...]:
    """Return the peak memory of each rank in one step.

    A forward saves the outputs of the operators in its block until the backward; a forward that is recomputed saves
    only the block's input, or a part of it that other ranks have the rest of. The gradient of a unit exists from its
    first backward, or its arrival on a server, to its update or departure, as a shard once it has been reduce-scattered
    and freed; a delayed gradient is a second one. An asynchronous server holds one gradient at a time. Parameters exist
    in as many versions as the rank program reads; an optimizer keeps states of the parameters that its rank updates.
    Weights that are freed after use are gathered beside the shard of them. Casts of weights live from the forward of
    each microbatch to its backward, as activations do, and the gradients of casts exist twice while they are copied to
    the flat gradient that is communicated. A compression codec with error feedback keeps two residuals, the present one
    and the one of the next step, and buffers for what it sends and gathers. Gathers and reduce-scatters with a codec
    have buffers until they are complete. States that are offloaded take the memory of their buffers, until they are
    written again. A shard of weights that is offloaded is in memory from its fetch to the gather, where it is copied,
    or until it is offloaded again, and twice during its update. Temporary memory of operators inside a block is not in
    the program and not counted.

    Args:
        program: a verified program.
        size_of: bytes of a whole tensor on one rank.
    """
    return tuple(max(timeline) for timeline in memory_timeline(program, size_of))


def memory_timeline(program: Program, size_of: SizeFn) -> list[list[int]]:
    """Return for each rank the bytes before its first instruction, and then during each instruction of one step.

    Args:
        program: as for :func:`peak_memory_bytes`; an asynchronous pipeline runs its body once.
        size_of: bytes of a whole tensor on one rank.
    """
    units = sorted({unit for _, instruction in program.instructions() for unit in named_units(instruction)})
    cache: dict[tuple[object, ...], list[int]] = {}
    timelines = []
    for instructions in program.unroll(1):
        signature = tuple(_signature(instruction) for instruction in instructions)
        if signature not in cache:  # equal but for ranks and microbatches, so equal in bytes
            cache[signature] = _bytes_per_instruction(instructions, units, size_of)
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
        case Free(tensor) | Fetch(tensor) | Offload(tensor):
            place = "" if isinstance(instruction, Free) else instruction.place
            return type(instruction), tensor.name, tensor.blocks, place
        case Update() | SwapGradBuffers():
            return (instruction,)
        case ApplyPushes(units):
            return instruction.op, units
        case Send(tensor, codec=codec) | Recv(tensor, codec=codec) | Push(tensor, codec=codec) if tensor.name == "grad":
            return type(instruction), tensor.blocks, codec
        case Send() | Recv() | Push() | Pull() | Commit():
            return ()


def _bytes_per_instruction(instructions: Instructions, units: Sequence[_Unit], size_of: SizeFn) -> list[int]:
    """Return the bytes before the first instruction of a rank, and then during each of them."""
    users: _Users = defaultdict(list)
    for unit in units:
        for block in unit:
            users[block].append(unit)
    memory = _initial_memory(instructions, users, size_of)
    memory.tally()
    encoded: dict[TensorRef, int] = {}
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
            if isinstance(instruction, Recompute) or key not in recompute_set.recomputed:
                memory.saved_bytes[key] += memory.cast_bytes(users[instruction.block])
            saved_bytes += memory.saved_bytes[key]
        for reader, num_bytes in _input_bytes(instruction, recompute_set, size_of, memory):
            saved_bytes += num_bytes - memory.saved_bytes.get(reader, 0)
            memory.saved_bytes[reader] = num_bytes
        if not isinstance(instruction, Forward | Recompute):
            _update_memory(memory, instruction, users)
            resident_bytes = memory.resident_bytes
        temporary_bytes = _temporary_bytes(instruction, memory, users) + _encoded_bytes(instruction, encoded, size_of)
        timeline.append(resident_bytes + saved_bytes + memory.fetched_bytes + temporary_bytes)
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


def _input_bytes(
    instruction: Instruction, recompute_set: RecomputeSet, size_of: SizeFn, memory: _RankMemory
) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield the block and microbatch whose input goes or comes back, with the bytes of it that a rank holds then."""
    if not isinstance(instruction, Free | Collective | Fetch | Offload):
        return
    tensor, group = instruction.tensor, recompute_set.partitioned.get(instruction.tensor)
    if tensor.name != "x" or tensor.micro is None or (isinstance(instruction, Free) and group is None):
        return
    key = tensor.blocks[0], tensor.micro
    if isinstance(instruction, Fetch | Offload):
        if memory.written is not None:
            yield memory.written, 0
        memory.written = key if isinstance(instruction, Offload) else None
    match instruction:
        case Free():
            yield key, -(-size_of(tensor) // len(group or ()))
        case Collective() | Fetch():
            yield key, size_of(tensor)
        case Offload():
            pass  # it is in memory until it is written


def _temporary_bytes(instruction: Instruction, memory: _RankMemory, users: _Users) -> int:
    """Return the bytes that exist only during an instruction: a pushed gradient, gradients that are copied."""
    if isinstance(instruction, ApplyPushes):
        return max(memory.unit_bytes("grad", unit) for unit in instruction.units)
    if isinstance(instruction, Update):
        return memory.shard_bytes(instruction.unit)
    if _takes_shard(instruction):
        return memory.shard_bytes(instruction.tensor.blocks)
    if not isinstance(instruction, Backward) or not instruction.computes_weight_grad:
        return 0
    used = users[instruction.block]
    during, after = (
        sum(memory.unit_bytes("copied_grad", unit) for unit in used if unit in copied)
        for copied in (memory.copied_during_backward, memory.copied_after_backward)
    )
    return during + max(after - memory.cast_bytes(used), 0)  # at the end of a backward, its casts are freed


def _encoded_bytes(instruction: Instruction, started: dict[TensorRef, int], size_of: SizeFn) -> int:
    """Return the bytes, during an instruction, of what gathers and reduce-scatters with a codec send and receive.

    Args:
        instruction: the next one.
        started: bytes of the collectives that have started, by tensor; updated.
        size_of: bytes of a whole tensor on one rank.
    """
    if not isinstance(instruction, Collective) or not encodes_shards(instruction.op, instruction.codec):
        return sum(started.values())
    num_buffers = 1 if instruction.op == "all_gather" else 2
    if instruction.phase != "wait":
        started[instruction.tensor] = num_buffers * size_of(instruction.tensor, instruction.codec)
    during = sum(started.values())
    if instruction.phase != "start":
        started.pop(instruction.tensor, None)
    return during


def _takes_shard(instruction: Instruction) -> TypeGuard[Collective]:
    """Return whether a gather copies the rank's shard of weights, which is then given up if it is offloaded."""
    if not isinstance(instruction, Collective) or instruction.phase == "wait":
        return False
    return (instruction.op, instruction.tensor.name) == ("all_gather", "weight")


def _copied_after_backward(instructions: Instructions) -> Iterator[_Unit]:
    """Yield the units whose gradients are communicated after a backward, when they are complete."""
    for instruction in instructions:
        if not isinstance(instruction, Send | Push | Collective) or instruction.tensor.name != "grad":
            continue
        if not (isinstance(instruction, Collective) and instruction.phase):
            yield instruction.tensor.blocks


def _copied_during_backward(instructions: Instructions) -> Iterator[_Unit]:
    """Yield the units whose reduction starts during the last one of several backwards: it has the sum of the others."""
    num_backwards: Counter[int] = Counter()  # since the last reduction
    for instruction in instructions:
        if isinstance(instruction, Backward) and instruction.computes_weight_grad:
            num_backwards[instruction.block] += 1
        elif isinstance(instruction, Collective) and instruction.phase == "start" and instruction.tensor.name == "grad":
            unit = instruction.tensor.blocks
            if any(num_backwards[block] > 1 for block in unit):
                yield unit
            num_backwards -= Counter({block: num_backwards[block] for block in unit})


def _initial_memory(instructions: Instructions, users: _Users, size_of: SizeFn) -> _RankMemory:  # noqa: C901, PLR0912 - one case each
    """Return what a rank holds before its first instruction: the shard of parameters that it gathers first."""
    memory = _RankMemory(_UnitSizes(size_of), instructions)
    weights, residuals, states = (
        held.fractions for held in (memory.weights, memory.residuals, memory.optimizer_states)
    )
    shards: dict[_Unit, Fraction] = {}
    offloaded = offloaded_units(instructions)
    for instruction in instructions:
        match instruction:
            case Collective("all_gather", TensorRef("weight", unit), group) if unit not in weights:
                weights[unit] = Fraction(1, len(group))
            case Collective("reduce_scatter", TensorRef("grad", unit), group):
                shards[unit] = Fraction(1, len(group))
            case Collective("all_reduce", TensorRef("grad", unit), group, codec=codec) if (
                codec and instruction.phase != "wait"
            ):
                spec = find_codec(codec).spec
                memory.codec_buffers[instruction] = size_of(instruction.tensor, codec) * (
                    len(group) if spec.reduction == "gather" else 1
                )
                residuals[unit] = residuals.get(unit, Fraction(0)) + spec.has_error_feedback
                if exchanges_momentum(codec):  # the residual of the rank's part of the sum
                    residuals[unit] += Fraction(1, len(group))
            case Send(TensorRef("grad", unit), codec=codec) | Push(TensorRef("grad", unit), codec=codec) if codec:
                memory.codec_buffers[instruction] = size_of(instruction.tensor, codec)
                residuals[unit] = residuals.get(unit, Fraction(0)) + 1
            case Forward(block):
                weights.update({unit: WHOLE for unit in users[block] if unit not in weights})
            case Update(unit):
                weights.setdefault(unit, WHOLE)
                own_states = memory.state_fractions if unit in offloaded else states
                own_states[unit] = shards.get(unit, WHOLE)
            case ApplyPushes(served):
                weights.update(dict.fromkeys(served, WHOLE))
                states.update(dict.fromkeys(served if instruction.applies_gradients else (), WHOLE))
            case SwapGradBuffers(unit):
                memory.delayed_grads.fractions[unit] = WHOLE
            case Recompute() | Backward() | Collective() | Send() | Recv() | Push() | Pull() | Free() | Commit():
                pass
            case Fetch() | Offload():
                pass
    memory.shard_fractions = {unit: weights.pop(unit) for unit in offloaded_weights(instructions)}
    return memory


def _update_memory(memory: _RankMemory, instruction: Instruction, users: _Users) -> None:  # noqa: C901, PLR0912 - one case each
    match instruction:
        case Backward(block):
            for unit in users[block]:
                memory.hold(memory.grads, unit, WHOLE)
        case Collective("reduce_scatter", TensorRef("grad", unit), group, phase) if phase != "start":
            memory.hold(memory.grad_shards, unit, Fraction(1, len(group)))
            memory.free(memory.grads, unit)
        case Collective("all_gather", TensorRef("weight", unit)):
            if unit in memory.shard_fractions:
                memory.free(memory.weights, unit)
            memory.hold(memory.gathered if unit in memory.freed else memory.weights, unit, WHOLE)
        case Free(TensorRef("weight", unit)):
            memory.free(memory.gathered, unit)
        case Free(tensor) if tensor.name == "grad":
            memory.free(memory.grads, tensor.blocks)
        case Recv(TensorRef("grad", unit)):
            memory.hold(memory.grads, unit, WHOLE)
        case Update(unit) | Send(TensorRef("grad", unit)) | Push(TensorRef("grad", unit)):
            memory.free(memory.grads, unit)
            memory.free(memory.grad_shards, unit)
        case Collective() | Send() | Recv() | Push() | Pull() | Free() | ApplyPushes() | Commit() | SwapGradBuffers():
            pass
        case Fetch(TensorRef("weight", unit)):
            memory.hold(memory.weights, unit, memory.shard_fractions[unit])
        case Offload(TensorRef("weight", unit)):
            memory.free(memory.weights, unit)
        case Fetch(tensor, place):
            memory.fetched.update([tensor.blocks] if (tensor.name, place) == ("state", "disk") else ())
        case Offload(tensor):
            memory.fetched.difference_update([tensor.blocks] if tensor.name == "state" else ())
        case Forward() | Recompute():
            pass
