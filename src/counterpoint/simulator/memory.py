"""How much a rank holds at most: weights, gradients, optimizer states, and what backward still needs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import TypeAlias

from counterpoint.program.codes import find_code
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
    Value,
    weight,
)
from counterpoint.program.program import Program, Words, versions_held
from counterpoint.program.tapes import Again, computed_again
from counterpoint.program.traffic import Sizes
from counterpoint.program.units import units_named

_Unit: TypeAlias = tuple[int, ...]
_Users: TypeAlias = defaultdict[int, list[_Unit]]
"""The units that each block uses."""

WHOLE = Fraction(1)

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
    sums: defaultdict[int, int] = field(default_factory=partial(defaultdict, int))

    def count(self, num_states: int) -> None:
        """Add up what is held, by denominator: from then on it is only changed by :meth:`put` and :meth:`drop`."""
        gradients = ((self.grads, 1), (self.shares, 1), (self.aside, 1), (self.residuals, 2))
        for parts, times in ((self.weights, self.versions), *gradients, (self.states, num_states)):
            for unit, part in parts.items():
                self.sums[part.denominator] += times * part.numerator * self.sizes[unit]
        self.sums[1] += sum(self.wires.values())

    def put(self, parts: dict[_Unit, Fraction], unit: _Unit, part: Fraction, times: int = 1) -> None:
        """Hold so much of a unit, so many times."""
        if parts.get(unit) != part:
            self.drop(parts, unit, times)
            parts[unit] = part
            self.sums[part.denominator] += times * part.numerator * self.sizes[unit]

    def put_all(self, parts: dict[_Unit, Fraction], units: Iterable[_Unit]) -> None:
        """Hold the whole of some units."""
        for unit in units:
            self.put(parts, unit, WHOLE)

    def drop(self, parts: dict[_Unit, Fraction], unit: _Unit, times: int = 1) -> None:
        """Hold nothing of a unit, of which there may have been nothing."""
        part = parts.pop(unit, None)
        if part is not None:
            self.sums[part.denominator] -= times * part.numerator * self.sizes[unit]

    @property
    def fixed_bytes(self) -> int:
        """The bytes of everything held but what is alive between forwards and backwards, rounded up."""
        whole = math.lcm(*self.sums)
        return -(-sum(total * (whole // denominator) for denominator, total in self.sums.items()) // whole)


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
    users: _Users = defaultdict(list)
    for unit in units:
        for block in unit:
            users[block].append(unit)
    held = _begin(row, units, users, size_of)
    held.count(num_states)
    again, alive_bytes = computed_again(row), 0
    fixed = held.fixed_bytes
    found = [fixed]
    for word in row:
        key = (word.block, word.micro) if isinstance(word, Forward | Recompute | Backward) else None
        if key is not None and isinstance(word, Forward | Recompute):
            alive_bytes -= held.alive.pop(key, 0)
            held.alive[key] = _kept_by(word, again, size_of)
            alive_bytes += held.alive[key]
        if not isinstance(word, Forward | Recompute):
            _hold(held, word, users)
            fixed = held.fixed_bytes
        in_hand = max(units[unit] for unit in word.units) if isinstance(word, Serve) else 0  # one at a time
        found.append(fixed + alive_bytes + in_hand)
        if key is not None and isinstance(word, Backward) and word.has_weight:  # it holds what it reads and writes
            alive_bytes -= held.alive.pop(key, 0)
    return found


def _kept_by(word: Forward | Recompute, again: Again, size_of: Sizes) -> int:
    """Return the bytes that stay: what leaves the block, as large as its gradient, or if at all what enters it."""
    key = (word.block, word.micro)
    if isinstance(word, Recompute) or key not in again.places:
        return size_of(Value("g", (word.block,), word.micro))
    return size_of(Value("x", (word.block,), word.micro)) if word.block > 0 and key not in again.fed else 0


def _begin(row: Words, units: dict[_Unit, int], users: _Users, size_of: Sizes) -> _Held:  # noqa: C901 - one case each
    """Return what a rank holds before its first word: a weight that it gathers first is kept in part."""
    held = _Held(units, versions=versions_held(row))
    parts: dict[_Unit, Fraction] = {}
    for word in row:
        match word:
            case Collective("all_gather", Value("weight", unit), group) if unit not in held.weights:
                held.weights[unit] = Fraction(1, len(group))
            case Collective("reduce_scatter", Value("grad", unit), group):
                parts[unit] = Fraction(1, len(group))
            case Collective("all_reduce", Value("grad", unit), group, code=code) if code and word.phase != "wait":
                kind = find_code(code).kind
                held.wires[word] = size_of(word.value, code) * (len(group) if kind.way == "gather" else 1)
                held.residuals[unit] = held.residuals.get(unit, Fraction(0)) + kind.keeps
            case Send(Value("grad", unit), code=code) | Push(Value("grad", unit), code=code) if code:
                held.wires[word] = size_of(word.value, code)
                held.residuals[unit] = held.residuals.get(unit, Fraction(0)) + 1
            case Forward(block):
                held.weights.update({unit: WHOLE for unit in users[block] if unit not in held.weights})
            case Update(unit):
                held.weights.setdefault(unit, WHOLE)
                held.states[unit] = parts.get(unit, WHOLE)
            case Serve(served):
                held.weights.update(dict.fromkeys(served, WHOLE))
                held.states.update(dict.fromkeys(served if word.updates else (), WHOLE))
            case Swap(unit):
                held.aside[unit] = WHOLE
            case Recompute() | Backward() | Collective() | Send() | Recv() | Push() | Pull() | Release() | Commit():
                pass
    held.kept = dict(held.weights)
    return held


def _hold(held: _Held, word: Instruction, users: _Users) -> None:
    match word:
        case Backward(block):
            held.put_all(held.grads, users[block])
        case Collective("reduce_scatter", Value("grad", unit), group, phase) if phase != "start":
            held.put(held.shares, unit, Fraction(1, len(group)))
            held.drop(held.grads, unit)
        case Collective("all_gather", Value("weight", unit)):
            held.put(held.weights, unit, WHOLE, held.versions)
        case Release(Value("weight", unit)):
            held.put(held.weights, unit, held.kept[unit], held.versions)
        case Release(value) if value.name == "grad":
            held.drop(held.grads, value.blocks)
        case Recv(Value("grad", unit)):
            held.put(held.grads, unit, WHOLE)
        case Update(unit) | Send(Value("grad", unit)) | Push(Value("grad", unit)):
            held.drop(held.grads, unit)
            held.drop(held.shares, unit)
        case Collective() | Send() | Recv() | Push() | Pull() | Release() | Serve() | Commit() | Swap():
            pass
        case Forward() | Recompute():
            pass
