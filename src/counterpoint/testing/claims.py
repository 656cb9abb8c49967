"""Benchmark claims: statements about the library, each with the command that measures it and its required result.

A claim is a folder of ``benchmarks/`` in a checkout: ``claim.yaml`` states it, ``run.py`` measures it with
``measure(options) -> BenchmarkResult``, and ``README.md`` explains it. Do not claim anything without such a folder.
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
    """Content of ``claim.yaml``.

    Args:
        claim: a sentence that can be false.
        command: that measures it.
        bar: required result, in words.
        peers: systems that it is compared with.
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
    """Options of a measurement.

    Args:
        processes: also measure on separate processes, if the claim has such a part.
        rounds: repetitions; None for the claim's default.
        report_progress: receives lines of progress.
        is_quick: whether to run the smallest size once, only to see that the benchmark runs.
    """

    processes: bool = False
    rounds: int | None = None
    report_progress: Callable[[str], None] = lambda _line: None
    is_quick: bool = False

    def num_rounds(self, default: int, minimum: int = 3) -> int:
        """Return the number of repetitions.

        Args:
            default: the claim's.
            minimum: below which a median means nothing.

        Example:
            >>> BenchmarkOptions().num_rounds(9), BenchmarkOptions(rounds=1).num_rounds(9)
            (9, 3)
            >>> BenchmarkOptions(is_quick=True).num_rounds(9)
            1
        """
        return 1 if self.is_quick else max(minimum, self.rounds or default)


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """Result of a measurement.

    Args:
        columns: of the table.
        rows: of the table, formatted.
        missed: a line for every bar that is missed; empty if the claim holds.
        figures: all measured numbers, as JSON values.
        notes: explanations of marks in the table, by mark.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    missed: tuple[str, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


def find_benchmarks() -> Path:
    """Return the benchmarks folder of this checkout.

    Raises:
        LaunchError: the package was installed without one.
    """
    folders = [*Path(__file__).resolve().parents, Path.cwd(), *Path.cwd().parents]
    for folder in folders:
        if (folder / "benchmarks").is_dir() and (folder / "src" / "counterpoint").is_dir():
            return folder / "benchmarks"
    raise LaunchError(
        f"there is no benchmarks folder next to the package in {Path(__file__).resolve().parents[1]}, nor above "
        f"{Path.cwd()}; benchmarks are part of a checkout of the repository: clone it, and run counterpoint bench there"
    )


def read_claims(folder: Path) -> dict[str, Claim]:
    """Return all claims of a folder by name.

    Raises:
        DataError: one cannot be read; the message names the file and the field.
    """
    return {path.parent.name: read_claim(path) for path in sorted(folder.glob("*/claim.yaml"))}


def read_claim(path: Path) -> Claim:
    """Return the claim in a file."""
    try:
        return Claim.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValidationError) as error:
        raise DataError(
            f"{path} is not a valid claim: {error}; its fields are {', '.join(Claim.model_fields)}"
        ) from None


def find_claim(folder: Path, name: str) -> Claim:
    """Return the claim of a name.

    Raises:
        LaunchError: it is unknown; the message suggests the nearest name.
    """
    claims = read_claims(folder)
    if name in claims:
        return claims[name]
    near = get_close_matches(name, claims, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise LaunchError(f"unknown claim {name!r}; {hint}the claims of {folder} are {', '.join(claims) or 'none'}")


def run_benchmark(folder: Path, name: str, options: BenchmarkOptions) -> BenchmarkResult:
    """Run ``measure`` of the claim's ``run.py`` and return its result."""
    result = _load_module(folder / name / "run.py", f"counterpoint_claim_{name}").measure(options)
    assert isinstance(result, BenchmarkResult), "measure() of run.py must return a BenchmarkResult"
    return result


def _load_module(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise LaunchError(f"{path.parent} has no run.py with measure(options); add one to measure the claim")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_record(name: str, claim: Claim, result: BenchmarkResult) -> dict[str, Any]:
    """Return a measurement with its claim and machine, as JSON values."""
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
    """Return the properties of the machine that affect measurements."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "load": f"{os.getloadavg()[0]:.1f}",
    }
