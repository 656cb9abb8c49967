"""The repository's tests that need a GPU; in a dry run those of accelerators, on the stand-in device."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu.checks import Check, passes_if, skip
from benchmarks.gpu.target import Target

ROOT = Path(__file__).parents[2]
PYTEST = ("-p", "no:cacheprovider", "--timeout", "60")
"""Without -q, which pyproject.toml has: with a second one pytest prints no summary."""
DRY = ("tests/device/test_accelerators.py", "-k", "stand_in and backward")
HOST_FOLDERS = (
    "tests/runtime",
    "tests/strategies",
    "tests/training",
    "tests/fabric",
    "tests/compat/test_operations.py",
)


def measure(target: Target) -> Iterator[Check]:
    """Run ``pytest -m gpu``."""
    yield run_pytest("pytest -m gpu", target.size(("-m", "gpu", "tests/device"), DRY), target.seconds_left())


def measure_host(target: Target) -> Iterator[Check]:
    """Run the tests of ranks on the CPU, under this machine's Python and torch."""
    if target.is_dry_run:
        yield skip("tests without a GPU", "a dry run is one of them")
        return
    chosen = ("-n", "14", "--maxfail", "200", "-m", "not serial and not integration and not gpu", *HOST_FOLDERS)
    yield run_pytest("tests without a GPU", chosen, target.seconds_left())


def run_pytest(name: str, arguments: Sequence[str], timeout_s: float) -> Check:
    """Return whether some tests pass."""
    missing = [
        module for module in ("pytest", "pytest_timeout", "hypothesis") if importlib.util.find_spec(module) is None
    ]
    if missing:
        return skip(name, f"{', '.join(missing)} is not installed")
    command = [sys.executable, "-m", "pytest", *PYTEST, *arguments]
    limit_s = None if timeout_s == float("inf") else max(1.0, timeout_s - 3)
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        return Check(name, "FAIL", reason=f"killed after {limit_s:.0f} s: {str(error.stdout or '')[-500:]}")
    summary = next(
        (line for line in reversed(ended.stdout.splitlines()) if re.search(r"\d+ \w+.* in [0-9.]+s", line)), ""
    )
    summary = summary.strip("= ")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, flags=re.MULTILINE)
    reason = "; ".join(failed) or ("all pass" if ended.returncode == 0 else (ended.stdout + ended.stderr)[-500:])
    return Check(name, passes_if(ended.returncode == 0), summary, reason, {"output": ended.stdout[-4000:]})
