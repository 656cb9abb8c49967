"""How much a rank holds at most: weights, gradients, optimizer states, and what backward still needs."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction

from counterpoint.program.codes import find_code
from counterpoint.program.instruction import (
    OF_UNITS,
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
    Value,
    weight,
)
from counterpoint.program.program import Program, Words, versions_held
from counterpoint.program.tapes import Again, computed_again
from counterpoint.program.traffic import Sizes
from counterpoint.program.units import units_named

_Unit = tuple[int, ...]

ADAM_STATES = 2
"""How many values per parameter Adam keeps."""


@dataclass(slots=True)
class _Held:
    """What a rank holds of each unit, as parts of the whole whose bytes ``sizes`` has, and of each block, in bytes."""

    sizes: dict[_Unit, int]
    weights: dict[_Unit, Fraction] = field(default_factory=dict)
    kept: dict[_Unit, Fraction] = field(default_factory=dict)
    grads: dict[_Unit, Fraction] = field(default_factory=dict)
    shares: dict[_Unit, Fraction] = field(default_factory=dict)
    states: dict[_Unit, Fraction] = field(default_factory=dict)
    residuals: dict[_Unit, Fraction] = field(default_factory=dict)
    wires: dict[Collective | Send | Push, int] = field(default_factory=dict)
    aside: dict[_Unit, Fraction] = field(default_factory=dict)
    alive: dict[tuple[int, int], int] = field(default_factory=dict)
    versions: int = 1

    def fixed_bytes(self, num_states: int) -> Fraction:
        """Return the bytes of everything held but what is alive between forwards and backwards."""
        sums: defaultdict[int, int] = defaultdict(int)  # by denominator: adding fractions one by one is slow
        gradients = ((self.grads, 1), (self.shares, 1), (self.aside, 1), (self.residuals, 2))
        for parts, times in ((self.weights, self.versions), *gradients, (self.states, num_states)):
            for unit, part in parts.items():
                sums[part.denominator] += times * part.numerator * self.sizes[unit]
        wires = Fraction(sum(self.wires.values()))
        return sum((Fraction(total, denominator) for denominator, total in sums.items()), wires)


def peak_bytes(program: Program, size_of: Sizes, *, num_states: int = ADAM_STATES) -> tuple[int, ...]:
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
    return tuple(max(row) for row in held_bytes(program, size_of, num_states=num_states))


def held_bytes(program: Program, size_of: Sizes, *, num_states: int = ADAM_STATES) -> list[list[int]]:
    """Return for each rank the bytes that it holds before its first word, and then during each word of one step.

    Args:
        program: as for :func:`peak_bytes`; of a stream with one body.
        size_of: bytes of a whole value on one rank.
        num_states: how many values per parameter the optimizer keeps.
    """
    named = sorted({unit for _, word in program.words() for unit in units_named(word)})
    units = {unit: size_of(weight(unit)) for unit in named}
    known: dict[tuple[object, ...], list[int]] = {}
    found = []
    for row in program.unroll(1):
        outline = tuple(_outline(word) for word in row)
        if outline not in known:  # equal but for ranks and microbatches, so equal in bytes
            known[outline] = _row_bytes(row, units, size_of, num_states)
        found.append(known[outline])
    return found


def _outline(word: Instruction) -> tuple[object, ...]:  # noqa: PLR0911 - one case each
    match word:
        case Forward(block, version=version):
            return "F", block, version
        case Recompute(block, version=version):
            return "R", block, version
        case Backward(block, part=part, version=version):
            return "B", block, part, version
        case Collective(_, value, group, phase):
            return word.name, value.name, value.blocks, len(group), phase
        case Release(value):
            return "release", value.name, value.blocks
        case Update() | Swap():
            return (word,)
        case Serve(units):
            return word.verb, units
        case Send(value, code=code) | Recv(value, code=code) | Push(value, code=code) if value.name == "grad":
            return type(word), value.blocks, code
        case Send() | Recv() | Push() | Pull() | Commit():
            return ()


def _row_bytes(row: Words, units: dict[_Unit, int], size_of: Sizes, num_states: int) -> list[int]:
    """Return the bytes that are held before a row, and then during each of its words."""
    held = _begin(row, units, size_of)
    again = computed_again(row)
    fixed = held.fixed_bytes(num_states)
    found = [math.ceil(fixed)]
    for word in row:
        num_grads = len(held.grads)
        if isinstance(word, Forward | Recompute):
            held.alive[word.block, word.micro] = _kept_by(word, again, size_of)
        _hold(held, word, units, size_of)
        if len(held.grads) != num_grads or _is_of_units(word):
            fixed = held.fixed_bytes(num_states)
        in_hand = max(units[unit] for unit in word.units) if isinstance(word, Serve) else 0  # one at a time
        found.append(math.ceil(fixed) + sum(held.alive.values()) + in_hand)
        if isinstance(word, Backward) and word.has_weight:  # it holds what it reads and what it writes at once
            held.alive.pop((word.block, word.micro), None)
    return found


def _kept_by(word: Forward | Recompute, again: Again, size_of: Sizes) -> int:
    """Return the bytes that stay: what leaves the block, as large as its gradient, or if at all what enters it."""
    key = (word.block, word.micro)
    if isinstance(word, Recompute) or key not in again.places:
        return size_of(Value("g", (word.block,), word.micro))
    return size_of(Value("x", (word.block,), word.micro)) if word.block > 0 and key not in again.fed else 0


def _is_of_units(word: Instruction) -> bool:
    """Tell whether a word may change what is held of units; a backward does where it makes a gradient."""
    match word:
        case Forward() | Recompute() | Backward() | Commit():
            return False
        case Send(value) | Recv(value) | Collective(_, value):
            return value.name in OF_UNITS
        case Update() | Swap() | Serve() | Push() | Pull() | Release():
            return True


def _begin(row: Words, units: dict[_Unit, int], size_of: Sizes) -> _Held:  # noqa: C901 - one case each
    """Return what a rank holds before its first word: a weight that it gathers first is kept in part."""
    held = _Held(units, versions=versions_held(row))
    parts: dict[_Unit, Fraction] = {}
    for word in row:
        match word:
            case Collective("join", Value("weight", unit), group) if unit not in held.weights:
                held.weights[unit] = Fraction(1, len(group))
            case Collective("share", Value("grad", unit), group):
                parts[unit] = Fraction(1, len(group))
            case Collective("sum", Value("grad", unit), group, code=code) if code and word.phase != "-":
                kind = find_code(code).kind
                held.wires[word] = size_of(word.value, code) * (len(group) if kind.way == "gather" else 1)
                held.residuals[unit] = held.residuals.get(unit, Fraction(0)) + kind.keeps
            case Send(Value("grad", unit), code=code) | Push(Value("grad", unit), code=code) if code:
                held.wires[word] = size_of(word.value, code)
                held.residuals[unit] = held.residuals.get(unit, Fraction(0)) + 1
            case Forward(block):
                held.weights.update({unit: Fraction(1) for unit in units if block in unit and unit not in held.weights})
            case Update(unit):
                held.weights.setdefault(unit, Fraction(1))
                held.states[unit] = parts.get(unit, Fraction(1))
            case Serve(served):
                held.weights.update(dict.fromkeys(served, Fraction(1)))
                held.states.update(dict.fromkeys(served if word.updates else (), Fraction(1)))
            case Swap(unit):
                held.aside[unit] = Fraction(1)
            case Recompute() | Backward() | Collective() | Send() | Recv() | Push() | Pull() | Release() | Commit():
                pass
    held.kept = dict(held.weights)
    return held


def _hold(held: _Held, word: Instruction, units: dict[_Unit, int], size_of: Sizes) -> None:
    match word:
        case Backward(block):
            held.grads.update({unit: Fraction(1) for unit in units if block in unit})
        case Collective("share", Value("grad", unit), group, phase) if phase != "+":
            held.shares[unit] = Fraction(1, len(group))
            held.grads.pop(unit, None)
        case Collective("join", Value("weight", unit)):
            held.weights[unit] = Fraction(1)
        case Release(Value("weight", unit)):
            held.weights[unit] = held.kept[unit]
        case Release(value) if value.name == "grad":
            held.grads.pop(value.blocks, None)
        case Recv(Value("grad", unit)):
            held.grads[unit] = Fraction(1)
        case Update(unit) | Send(Value("grad", unit)) | Push(Value("grad", unit)):
            held.grads.pop(unit, None)
            held.shares.pop(unit, None)
        case Collective() | Send() | Recv() | Push() | Pull() | Release() | Serve() | Commit() | Swap():
            pass
        case Forward() | Recompute():
            pass
