"""Claims: what we say of ourselves, each with the command that measures it and the bar it must reach.

A claim is one folder of ``benchmarks/`` in a checkout: ``claim.yaml`` says it, ``run.py`` measures it with
``measure(options) -> Result``, ``README.md`` explains it. What has no such folder may not be claimed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from counterpoint.errors import DataError, LaunchError


class Claim(BaseModel):
    """What ``claim.yaml`` says.

    Args:
        claim: the sentence that can be false.
        command: what measures it.
        bar: what the measurement must reach, in words.
        peers: with whom it is compared.
        source: where it is promised or was published.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    claim: str
    command: str
    bar: str
    peers: tuple[str, ...] = ()
    source: str


@dataclass(frozen=True, slots=True)
class BenchmarkOptions:
    """What a measurement may be told.

    Args:
        processes: also on real processes, where the claim has such a part.
        rounds: repetitions; None for as many as the claim takes.
        tell: takes a line of progress.
    """

    processes: bool = False
    rounds: int | None = None
    report_progress: Callable[[str], None] = lambda _line: None


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """What a measurement came to.

    Args:
        columns: of the table.
        rows: of the table, ready to be read.
        missed: for every bar that is missed one line that says by what; empty when the claim holds.
        figures: all numbers behind the table, as JSON values.
        notes: what a mark in the table means, by mark.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    missed: tuple[str, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


def find_benchmarks() -> Path:
    """Return the folder of claims of this checkout.

    Raises:
        LaunchError: the package was installed without one.
    """
    places = [*Path(__file__).resolve().parents, Path.cwd(), *Path.cwd().parents]
    for place in places:
        if (place / "benchmarks").is_dir() and (place / "src" / "counterpoint").is_dir():
            return place / "benchmarks"
    raise LaunchError(
        f"there is no benchmarks folder beside the package in {Path(__file__).resolve().parents[1]}, nor above "
        f"{Path.cwd()}; benchmarks are part of a checkout of the repository: clone it, and run counterpoint bench there"
    )


def read_claims(folder: Path) -> dict[str, Claim]:
    """Return all claims of a folder by name.

    Raises:
        DataError: one of them cannot be read; the message names the file and the field.
    """
    return {path.parent.name: read_claim(path) for path in sorted(folder.glob("*/claim.yaml"))}


def read_claim(path: Path) -> Claim:
    """Return the claim that a file holds."""
    try:
        return Claim.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValidationError) as wrong:
        raise DataError(f"{path} is no claim: {wrong}; its fields are {', '.join(Claim.model_fields)}") from None


def find_claim(folder: Path, name: str) -> Claim:
    """Return the claim of that name.

    Raises:
        LaunchError: there is none; the message suggests the nearest one.
    """
    claims = read_claims(folder)
    if name in claims:
        return claims[name]
    near = get_close_matches(name, claims, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise LaunchError(f"there is no claim {name!r}; {hint}the claims of {folder} are {', '.join(claims) or 'none'}")


def run_benchmark(folder: Path, name: str, options: BenchmarkOptions) -> BenchmarkResult:
    """Return what the claim's ``run.py`` measures."""
    result = _load_module(folder / name / "run.py", f"counterpoint_claim_{name}").measure(options)
    assert isinstance(result, BenchmarkResult), "what every run.py returns"
    return result


def _load_module(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise LaunchError(f"{path.parent} has no run.py with measure(options); a claim without one cannot be measured")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_record(name: str, claim: Claim, result: BenchmarkResult) -> dict[str, Any]:
    """Return a measurement with all that is needed to judge it later, as JSON values."""
    return {
        "name": name,
        **claim.model_dump(mode="json"),
        "holds": not result.missed,
        "missed": list(result.missed),
        "columns": list(result.columns),
        "rows": [list(row) for row in result.rows],
        "figures": dict(result.figures),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
    }


def describe_machine() -> dict[str, str | int]:
    """Return what a figure depends on."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "load": f"{os.getloadavg()[0]:.1f}",
    }
