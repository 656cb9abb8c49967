"""What each rank keeps from step to step under a plan, so that plans can be compared by what has to move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from counterpoint.compiler.compile import Compiled
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.instruction import Collective, Forward, Serve, Update, Value
from counterpoint.program.program import Row, Words
from counterpoint.program.units import first_gathered

Span: TypeAlias = tuple[Fraction, Fraction]
"""A part of something that begins at 0 and ends at 1."""

WHOLE: Span = (Fraction(0), Fraction(1))
NUM_STATES = 2
"""Values that an optimizer keeps per parameter: two for Adam."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank keeps of each parameter, by its name.

    Args:
        weights: the part of the weight.
        states: the part of which it keeps the optimizer's states.
        sizes: the bytes of each whole parameter.
    """

    weights: Mapping[str, Span]
    states: Mapping[str, Span]
    sizes: Mapping[str, int]


def holdings(compiled: Compiled) -> list[Holding]:
    """Return what each rank keeps from one step to the next.

    A rank keeps the weights that it reads or updates, in part where it gathers them first, and the states of what it
    updates, in part where its gradient was shared out. Parts are by position in what is shared out together.
    """
    model = compiled.model
    units, sizes = model.units, {param.name: param.num_bytes for param in model.params}
    rows = compiled.turns[-1].program.rows
    return [_held(rank, row, model, units, sizes) for rank, row in enumerate(rows)]


def missing_bytes(needs: Holding, has: Holding | None) -> int:
    """Return the bytes of weights and states that a rank needs and does not have; None for one that has nothing."""
    had = has if has is not None else Holding({}, {}, {})
    weights = _missing(needs.weights, had.weights, needs.sizes)
    return round(weights + NUM_STATES * _missing(needs.states, had.states, needs.sizes))


def _missing(needs: Mapping[str, Span], has: Mapping[str, Span], sizes: Mapping[str, int]) -> Fraction:
    total = Fraction(0)
    for name, (low, high) in needs.items():
        first, last = has.get(name, (low, low))
        total += sizes[name] * (high - low - max(Fraction(0), min(high, last) - max(low, first)))
    return total


def _held(
    rank: int, row: Row, model: ModelSpec, units: Mapping[Unit, tuple[str, ...]], sizes: Mapping[str, int]
) -> Holding:
    users = {block: [unit for unit in units if block in unit] for block in range(model.num_blocks)}
    slices = {name for block in model.blocks if block.split is not None for name, _ in block.split.slices}
    own = (Fraction(row.slice_index, row.num_slices), Fraction(1, row.num_slices))
    weights: dict[str, Span] = {}
    states: dict[str, Span] = {}
    for unit, part in _kept_weights(rank, row.body, users):
        weights.update(_spans(units[unit], part, sizes))
    for unit, part in _kept_states(rank, row.body):
        states.update(_spans(units[unit], part, sizes))
    return Holding(_sliced(weights, slices, own), _sliced(states, slices, own), sizes)


def _kept_weights(rank: int, row: Words, users: Mapping[int, list[Unit]]) -> Iterator[tuple[Unit, Span]]:
    gathered = {unit: _place(rank, group) for unit, group in first_gathered(row, users)}
    for word in row:
        match word:
            case Forward(block):
                yield from ((unit, gathered.get(unit, WHOLE)) for unit in users[block])
            case Update(unit):  # also on a server, which has no forwards
                yield unit, gathered.get(unit, WHOLE)
            case Serve(served):
                yield from ((unit, WHOLE) for unit in served)
            case _:
                pass


def _kept_states(rank: int, row: Words) -> Iterator[tuple[Unit, Span]]:
    shared: dict[Unit, Span] = {}
    for word in row:
        match word:
            case Collective("reduce_scatter", Value("grad", unit), group):
                shared[unit] = _place(rank, group)
            case Update(unit):
                yield unit, shared.get(unit, WHOLE)
            case Serve(served) if word.updates:
                yield from ((unit, WHOLE) for unit in served)
            case _:
                pass


def _place(rank: int, group: tuple[int, ...]) -> Span:
    place = group.index(rank)
    return Fraction(place, len(group)), Fraction(place + 1, len(group))


def _spans(names: tuple[str, ...], part: Span, sizes: Mapping[str, int]) -> Iterator[tuple[str, Span]]:
    """Yield for each parameter of a unit, which lie one behind the other, its part of a part of them all."""
    total = sum(sizes[name] for name in names)
    low, high = (edge * total for edge in part)
    start = 0
    for name in names:
        first, last = max(low, Fraction(start)), min(high, Fraction(start + sizes[name]))
        if last > first:
            yield name, ((first - start) / sizes[name], (last - start) / sizes[name])
        start += sizes[name]


def _sliced(spans: Mapping[str, Span], slices: set[str], own: Span) -> dict[str, Span]:
    """Return parts of slices as parts of whole parameters; ``own`` is where the slice begins, and its length."""
    begin, length = own
    return {
        name: (begin + low * length, begin + high * length) if name in slices else (low, high)
        for name, (low, high) in spans.items()
    }
