"""Quantities with units as people write them, ``1 Gbit/s`` or ``16 GiB``, parsed and formatted without loss."""

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

NUMBER = r"[-+]?(?:(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][-+]?[0-9]{1,3})?|inf)"
"""Regular expression for a number, with as many digits as ``Decimal`` could need."""

_QUANTITY = re.compile(rf"({NUMBER})(?![0-9.])\s*(\S.*)?")


@dataclass(frozen=True, slots=True)
class QuantityKind:
    """A kind of quantity.

    Args:
        meaning: what the number counts.
        example: an example for messages.
        units: size of each unit.
        output_units: the units used for formatting, from small to large.
        is_integer: whether it is counted in integers; fractions are dropped.
        allows_zero: whether 0 is allowed.
        allows_infinity: whether ``inf`` is allowed.
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
    """Return a quantity in the base unit of its kind.

    Example:
        >>> parse_quantity("1 Gbit/s", BANDWIDTH), parse_quantity("50 us", LATENCY)
        (125000000.0, 5e-05)

    Raises:
        PlanError: the text is not a number with a unit of this kind, or out of range.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise PlanError(f"it must be a number with a unit of {kind.meaning}, as in {kind.example}")
    number, unit = match[1], match[2]
    if unit is None:
        unit_example = kind.example.partition(" ")[2]
        raise PlanError(f"it has no unit; give the unit of {kind.meaning}, as in {number} {unit_example}")
    if unit not in kind.units:
        raise PlanError(f"{unit} is not a unit of {kind.meaning}; {_suggest_unit(unit, kind)}")
    amount = _scale_amount(number, kind.units[unit], kind)
    if amount < 0 or (amount == 0 and not kind.allows_zero):
        raise PlanError(
            f"it must be {'0 or more' if kind.allows_zero else 'more than 0'}; write it as in {kind.example}"
        )
    if not math.isfinite(amount) and not (kind.allows_infinity and number.endswith("inf")):
        raise PlanError(f"it is too large; write it as in {kind.example}")
    return amount


def format_quantity(amount: float, kind: QuantityKind) -> str:
    """Return the text that :func:`parse_quantity` parses as exactly this amount, in the largest unit that fits.

    Example:
        >>> format_quantity(125e6, BANDWIDTH), format_quantity(2**34, MEMORY), format_quantity(5e-05, LATENCY)
        ('125 MB/s', '16 GiB', '50 us')
    """
    if not math.isfinite(amount):
        return f"{amount} {kind.output_units[0]}"
    exact = Fraction(repr(amount))
    fitting = [
        unit
        for unit in kind.output_units
        if exact >= kind.units[unit] and not (kind.is_integer and exact % kind.units[unit])
    ]
    unit = fitting[-1] if fitting else kind.output_units[0]
    scaled = exact / kind.units[unit]
    digits = (Decimal(scaled.numerator) / Decimal(scaled.denominator)).normalize()
    return f"{digits:f} {unit}" if -6 < digits.adjusted() < 12 else f"{digits} {unit}"


def _scale_amount(number: str, unit: Fraction, kind: QuantityKind) -> float:
    """Return a number of a unit in base units, rounded once; ``inf`` on overflow."""
    if number.endswith("inf"):
        return float(number)
    exact = Fraction(number) * unit
    try:
        amount = float(exact)
    except OverflowError:
        return math.inf
    return int(exact) if kind.is_integer else amount


def _suggest_unit(unit: str, kind: QuantityKind) -> str:
    """Return a suggestion for an unknown unit, or else the list of units."""
    known, lower = {name.lower(): name for name in kind.units}, unit.lower()
    guesses = [*get_close_matches(lower, known, n=1), lower.replace("bps", "b/s").replace("b/s", "bit/s")]
    suggestions = dict.fromkeys(known[name] for name in guesses if name in known)
    return f"did you mean {' or '.join(suggestions)}?" if suggestions else f"the units are {', '.join(kind.units)}"
