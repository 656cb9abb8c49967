"""Numbers with their units as people write them, ``1 Gbit/s`` or ``16 GiB``, read and written without loss."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from fractions import Fraction

from counterpoint.errors import PlanError

_THOUSAND = Fraction(1000)
_DECIMAL = {name: _THOUSAND**power for power, name in enumerate(("B", "kB", "MB", "GB", "TB"))}
_BINARY = {name: Fraction(1024) ** power for power, name in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)}
_BITS = {f"{prefix}bit/s": _THOUSAND**power / 8 for power, prefix in enumerate(("", "k", "M", "G", "T"))}
_OPERATIONS = {f"{prefix}FLOP/s": _THOUSAND**power for power, prefix in enumerate(("", "k", "M", "G", "T", "P"))}
_SECONDS = {name: _THOUSAND**power for power, name in ((-3, "ns"), (-2, "us"), (-1, "ms"), (0, "s"))}
_RATES = {f"{name}/s": size for name, size in (_DECIMAL | _BINARY).items()} | _BITS

NUMBER = r"[-+]?(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?|inf)"
"""What is read as a number."""

_QUANTITY = re.compile(rf"({NUMBER})\s*(\S.*)?")


@dataclass(frozen=True, slots=True)
class QuantityKind:
    """What is measured.

    Args:
        meaning: what the number counts.
        example: one of them, for messages.
        units: how much of what it counts each unit is.
        written: the units in which it is written, from small to large.
        is_whole: whether it is counted in whole numbers; parts are left out.
        may_be_none: whether 0 is one.
        may_be_endless: whether ``inf`` is one.
    """

    meaning: str
    example: str
    units: Mapping[str, Fraction]
    output_units: tuple[str, ...]
    is_integer: bool = False
    allows_zero: bool = False
    allows_infinity: bool = False


FLOPS = QuantityKind(
    "floating point operations per second", "30 GFLOP/s", _OPERATIONS, tuple(_OPERATIONS), allows_infinity=True
)
MEMORY = QuantityKind("bytes", "16 GiB", _DECIMAL | _BINARY, ("B", *_BINARY), is_integer=True)
BANDWIDTH = QuantityKind(
    "bits or bytes per second", "1 Gbit/s", _RATES, tuple(f"{name}/s" for name in _DECIMAL), allows_infinity=True
)
LATENCY = QuantityKind("seconds", "50 us", _SECONDS, tuple(_SECONDS), allows_zero=True)


def parse_quantity(text: str, kind: QuantityKind) -> float:
    """Return how much a text says, in what the kind counts.

    Example:
        >>> parse_quantity("1 Gbit/s", BANDWIDTH), parse_quantity("50 us", LATENCY)
        (125000000.0, 5e-05)

    Raises:
        PlanError: it is no number with a unit of this kind, or there cannot be so much.
    """
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise PlanError(f"it must be a number of {kind.meaning} with its unit; write it as in {kind.example}")
    number, unit = found[1], found[2]
    if unit is None:
        usual = kind.example.partition(" ")[2]
        raise PlanError(f"it has no unit; say what these {kind.meaning} are counted in, as in {number} {usual}")
    if unit not in kind.units:
        raise PlanError(f"{unit} is no unit of {kind.meaning}; {_suggest_unit(unit, kind)}")
    amount = _to_base_units(number, kind.units[unit], kind)
    if amount < 0 or (amount == 0 and not kind.allows_zero):
        raise PlanError(
            f"it must be {'0 or more' if kind.allows_zero else 'more than 0'}; write it as in {kind.example}"
        )
    if not math.isfinite(amount) and not (kind.allows_infinity and number.endswith("inf")):
        raise PlanError(f"that is more than there can be; write it as in {kind.example}")
    return amount


def format_quantity(amount: float, kind: QuantityKind) -> str:
    """Return the text that :func:`parse_quantity` reads as exactly this much, in the largest unit that suits it.

    Example:
        >>> format_quantity(125e6, BANDWIDTH), format_quantity(2**34, MEMORY), format_quantity(5e-05, LATENCY)
        ('125 MB/s', '16 GiB', '50 us')
    """
    if not math.isfinite(amount):
        return f"{amount} {kind.output_units[0]}"
    exact = Fraction(repr(amount))
    suiting = [
        unit
        for unit in kind.output_units
        if exact >= kind.units[unit] and not (kind.is_integer and exact % kind.units[unit])
    ]
    unit = suiting[-1] if suiting else kind.output_units[0]
    scaled = exact / kind.units[unit]
    digits = (Decimal(scaled.numerator) / Decimal(scaled.denominator)).normalize()
    return f"{digits:f} {unit}" if -6 < digits.adjusted() < 12 else f"{digits} {unit}"


def _to_base_units(number: str, unit: Fraction, kind: QuantityKind) -> float:
    """Return how much a number of a unit is, rounded once; ``inf`` where no number is large enough."""
    if number.endswith("inf"):
        return float(number)
    exact = Fraction(number) * unit
    try:
        amount = float(exact)
    except OverflowError:
        return math.inf
    return int(exact) if kind.is_integer else amount


def _suggest_unit(unit: str, kind: QuantityKind) -> str:
    """Return what the unit was probably meant to be; where nothing is near, which there are."""
    known, lower = {name.lower(): name for name in kind.units}, unit.lower()
    guesses = [*get_close_matches(lower, known, n=1), lower.replace("bps", "b/s").replace("b/s", "bit/s")]
    near = dict.fromkeys(known[name] for name in guesses if name in known)
    return f"did you mean {' or '.join(near)}?" if near else f"the units are {', '.join(kind.units)}"
