"""``counterpoint bench NAME --quick`` of every claim: the benchmarks of this repository run, whatever they measure."""

import subprocess
import sys

import pytest

from benchmarks.lab import Lab
from counterpoint.launchers.spark import missing_for_spark
from counterpoint.testing.claims import find_benchmarks, read_claims

NEED_LAB = {"hosts", "overlap", "server", "vgg"}
"""The claims about hosts alone, which are refused where no hosts can be simulated."""


def missing(name):
    """Return why a benchmark cannot run here; empty if it can."""
    if name in NEED_LAB:
        return Lab.unavailable_reason() or ""
    return missing_for_spark() if name == "spark" else ""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(read_claims(find_benchmarks())))
def test_a_benchmark_runs_at_its_smallest_size(name):
    if reason := missing(name):
        pytest.skip(reason)
    command = [sys.executable, "-m", "counterpoint", "bench", name, "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "the benchmark runs; no bar was judged" in done.stdout
