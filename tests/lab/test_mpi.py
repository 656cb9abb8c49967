"""The MPI transport gives the same results as ranks of one process."""

import subprocess
import sys

import pytest

from tests.fabric import test_transports
from tests.fabric.run_ranks import on_local
from tests.lab.launch_systems import AS_ROOT, why_no, why_no_mpirun
from tests.lab.mpi_scenarios import as_text
from tests.process.test_faults import variables

REASON = why_no_mpirun() or why_no("mpi4py")
pytestmark = [
    pytest.mark.process,
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(bool(REASON), reason=REASON),
]
SCENARIOS = [
    "round_about", "in_a_message", "in_a_sum", "serve", "pick", "sums", "shares", "ballots", "casts", "values",
    "groups", "verbs", "nans", "narrow", "swap",
]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of three ranks got in each scenario, as text."""
    folder = tmp_path_factory.mktemp("mpi")
    command = ["mpirun", "-np", "3", sys.executable, "-m", "tests.lab.mpi_scenarios", str(folder), *SCENARIOS]
    environ = {**variables(), **AS_ROOT, "COUNTERPOINT_TRANSPORT": "mpi"}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)
    files = [folder / f"{rank}.txt" for rank in range(3)]
    assert all(file.is_file() for file in files), result.stderr
    return [dict(line.split("\t") for line in file.read_text().splitlines()) for file in files]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_mpi_does_what_ranks_of_one_process_do(results, scenario):
    expected = on_local(getattr(test_transports, scenario), 3)
    assert [rank[scenario] for rank in results] == [as_text(value) for value in expected]


def test_a_wait_for_an_aborted_rank_raises_its_reason(results):
    assert all("stopped because of rank 1: the disk is full" in results[rank]["told"] for rank in (0, 2))
