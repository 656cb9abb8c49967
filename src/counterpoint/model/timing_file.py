"""Timings as text, which other processes and later days can read."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from counterpoint.errors import PlanError
from counterpoint.model.timing import Fixed, Known, Machine, PieceTime, Point, Timing

VERSION = 3
KIND = "counterpoint timing"
T = TypeVar("T")
SIGNED = {"added_s"}
"""Figures that are differences."""


def write_timing(timing: Timing) -> str:
    """Return a timing as JSON, which :func:`read_timing` reads as an equal one.

    Example:
        >>> from counterpoint.model.timing import PieceTime
        >>> took = PieceTime(1e-3, 2e-3, 1e-3, 1e-3)
        >>> timing = Timing(
        ...     "Linear", (Known("0", 16, 8.0, 4),), (("0.weight", 16),), Machine("a core"), (Point(1, (took,), took),)
        ... )
        >>> read_timing(write_timing(timing)) == timing
        True
    """
    return json.dumps({KIND: VERSION, **asdict(timing)}, indent=1) + "\n"


def file_beside(plan: Path) -> Path:
    """Return where the timing stands by which a plan in a file was ranked and cut.

    Example:
        >>> file_beside(Path("plan.yaml")).name
        'plan.timing.json'
    """
    return plan.with_suffix(".timing.json")


def read_timing(text: str) -> Timing:
    """Return the timing that a text holds.

    Raises:
        PlanError: it is none, or of another version, or a figure in it cannot be.
    """
    try:
        loaded: Any = json.loads(text)
    except ValueError as wrong:
        raise PlanError(f"this is no timing: {wrong}; `counterpoint profile JOB --out FILE` writes one") from None
    if not isinstance(loaded, dict) or KIND not in loaded:
        raise PlanError(f"this is no timing: it has no {KIND!r}; `counterpoint profile JOB --out FILE` writes one")
    if loaded[KIND] != VERSION:
        raise PlanError(
            f"the timing is of version {loaded[KIND]!r}, but only version {VERSION} can be read; profile the model anew"
        )
    try:
        return _timing(loaded)
    except (KeyError, TypeError, ValueError) as wrong:
        found = f"no {wrong}" if isinstance(wrong, KeyError) else wrong
        raise PlanError(f"this is no whole timing: {found}; profile the model again") from None


def load_timing(path: Path) -> Timing:
    """Return the timing that a file holds.

    Raises:
        PlanError: it cannot be read, or :func:`read_timing` refuses it.
    """
    try:
        return read_timing(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(
            f"{path} cannot be read: {error.strerror}; give what `counterpoint profile --out` wrote"
        ) from None


def _timing(loaded: dict[str, Any]) -> Timing:
    machine = loaded["machine"]
    points = tuple(_point(entry) for entry in loaded["points"])
    pieces = tuple(
        Known(str(entry["name"]), int(entry["weight_bytes"]), _figure(entry["cost"]), int(entry["output_bytes"]))
        for entry in loaded["pieces"]
    )
    sizes = [point.samples for point in points]
    if not points or sizes != sorted(set(sizes)) or sizes[0] < 1:
        raise ValueError(f"its sizes of microbatches are {sizes}, which do not grow from 1 or more")
    for point in points:
        if len(point.pieces) != len(pieces):
            raise ValueError(f"it has {len(pieces)} pieces, but for {point.samples} samples {len(point.pieces)} times")
    return Timing(
        model=str(loaded["model"]),
        pieces=pieces,
        weights=tuple((str(name), int(size)) for name, size in loaded["weights"]),
        machine=Machine(
            str(machine["device"]), int(machine["threads"]), str(machine["optimizer"]), bool(machine["is_measured"])
        ),
        points=points,
        update_s_per_byte=_figure(loaded["update_s_per_byte"]),
        add_s_per_byte=_figure(loaded["add_s_per_byte"]),
        fixed=_figures(Fixed, loaded["fixed"]),
    )


def _point(entry: dict[str, Any]) -> Point:
    pieces = tuple(_figures(PieceTime, one) for one in entry["pieces"])
    alone = entry["alone"]
    return Point(
        int(entry["samples"]),
        pieces,
        _figures(PieceTime, entry["whole"]),
        None if alone is None else _figures(PieceTime, alone),
    )


def _figures(kind: type[T], entry: dict[str, Any]) -> T:
    """Return a value all of whose fields are figures."""
    return kind(
        **{field.name: _figure(entry[field.name], is_signed=field.name in SIGNED) for field in fields(kind)}  # type: ignore[arg-type]
    )


def _figure(value: object, *, is_signed: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise ValueError(f"{value!r} is no time and no size; both are finite")
    if value < 0 and not is_signed:
        raise ValueError(f"{value!r} is no time and no size; both are finite and at least 0")
    return float(value)
