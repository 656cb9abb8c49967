"""Run the parts, each in a process with a time limit, and print the table: see ``run.sh``."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.gpu.checks import Check, Verdict, format_table, part_verdict, read_checks, write_part

TOTAL_S = 530.0
DRY_RUN_S = 300.0
ROOT = Path(__file__).parents[2]
GRACE_S = 5.0
NCCL = "/tmp/libnccl.so.2"


@dataclass(frozen=True)
class Part:
    """One part.

    Args:
        name: its own.
        limit_s: the longest that it may take.
        function: that yields its checks, ``module:name``.
        variables: of the environment of its process.
        is_default: whether it runs if no part is named.
    """

    name: str
    limit_s: float
    function: str
    variables: Mapping[str, str] = field(default_factory=dict)
    is_default: bool = True


PARTS = (
    Part("facts", 25, "benchmarks.gpu.facts:measure"),
    Part("survey", 70, "benchmarks.gpu.survey:measure"),
    Part("tests", 60, "benchmarks.gpu.tests:measure"),
    Part("sanitizer", 30, "benchmarks.gpu.sanitizer:measure", {"TORCH_CUDA_SANITIZER": "1"}),
    Part(
        "nccl",
        90,
        "benchmarks.gpu.nccl:measure",
        {"LD_PRELOAD": NCCL, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"},
    ),
    Part("throughput", 165, "benchmarks.gpu.throughput:measure"),
    Part("precision", 50, "benchmarks.gpu.precision:measure"),
    Part("offload", 45, "benchmarks.gpu.offload:measure"),
    Part("host-tests", 240, "benchmarks.gpu.tests:measure_host", is_default=False),
)
Start = Callable[[Part, Path, float], str]
"""Runs a part with a time limit, so that its checks are in a file; returns what went wrong, or nothing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--dry-run", action="store_true", help="small sizes, on the stand-in device")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=float("inf"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.parts) - {part.name for part in PARTS})
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; give some of {', '.join(part.name for part in PARTS)}")
    chosen = [part for part in PARTS if part.name in given.parts or (not given.parts and part.is_default)]
    if given.part:
        measure_part(chosen[0], given.folder, is_dry_run=given.dry_run, limit_s=given.limit)
        return 0

    def start(part: Part, folder: Path, limit_s: float) -> str:
        part = replace(part, variables={}) if given.dry_run else part
        command = [sys.executable, "-m", "benchmarks.gpu.run_parts", str(folder.resolve()), part.name, "--part"]
        options = ["--limit", f"{limit_s:.0f}", *(["--dry-run"] if given.dry_run else [])]
        return start_process(part, [*command, *options], folder, limit_s)

    total_s = TOTAL_S
    if given.dry_run:  # nothing about speed is checked, on whatever machine
        chosen, total_s = [replace(part, limit_s=DRY_RUN_S) for part in chosen], DRY_RUN_S * len(chosen)
    return 1 if run_parts(chosen, given.folder, start, total_s) == "FAIL" else 0


def run_parts(parts: Sequence[Part], folder: Path, start: Start, total_s: float = TOTAL_S) -> Verdict:
    """Run parts one after the other, print the table, and return the verdict of all."""
    folder.mkdir(parents=True, exist_ok=True)
    end, checks, seconds = time.monotonic() + total_s, {}, {}
    for part in parts:
        path = folder / f"{part.name}.json"
        path.unlink(missing_ok=True)
        began = time.monotonic()
        limit_s = min(part.limit_s, end - began)
        wrong = start(part, folder, limit_s) if limit_s > GRACE_S else "no time was left for it"
        seconds[part.name] = time.monotonic() - began
        checks[part.name] = read_checks(path)
        if wrong or not checks[part.name]:
            checks[part.name].append(Check("the whole part", "FAIL", reason=wrong or "it has written nothing"))
        print(f"{part_verdict(checks[part.name])} {part.name}, {seconds[part.name]:.0f} s", file=sys.stderr, flush=True)
    table = format_table(checks, seconds)
    (folder / "table.txt").write_text(table + "\n")
    print(table)
    return part_verdict([check for part_checks in checks.values() for check in part_checks])


def start_process(part: Part, command: Sequence[str], folder: Path, limit_s: float) -> str:
    """Run a part in a process, with all that it starts killed at its limit; its output goes to a file."""
    variables = {**os.environ, **part.variables}
    if not Path(variables.get("LD_PRELOAD", "/")).exists():
        del variables["LD_PRELOAD"]
    with (folder / f"{part.name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"killed after {limit_s:.0f} s; see {log.name}"
        finally:
            kill_group(process)
    return f"exit code {code}; see {log.name}" if code else ""


def kill_group(process: subprocess.Popen) -> None:
    """Kill a process and those of its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def measure_part(part: Part, folder: Path, *, is_dry_run: bool, limit_s: float, **options: object) -> None:
    """Run a part in this process, and write its checks one by one."""
    from benchmarks.gpu.target import make_target

    path, checks = folder / f"{part.name}.json", []
    target = make_target(is_dry_run=is_dry_run, deadline_s=time.monotonic() + limit_s, **options)
    facts = {"part": part.name, **target.facts()}
    module, _, name = part.function.partition(":")
    try:
        for check in getattr(importlib.import_module(module), name)(target):
            checks.append(check)
            write_part(path, facts, checks)
    except Exception as error:  # noqa: BLE001 - a line of the table
        traceback.print_exc()
        checks.append(Check("the whole part", "FAIL", reason=f"{type(error).__name__}: {error}"[:500]))
        write_part(path, facts, checks)


if __name__ == "__main__":
    sys.exit(main())
