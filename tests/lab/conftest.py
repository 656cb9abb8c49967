"""Two network namespaces as hosts for integration tests, which are skipped, with the reason, if none can be created."""

import sys
from pathlib import Path

import pytest

from benchmarks.lab import Lab

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def permitted():
    if reason := Lab.unavailable_reason():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def faults(permitted):
    if reason := Lab.faults_unavailable_reason():
        pytest.skip(reason)


@pytest.fixture
def lab(permitted):
    with Lab(hosts=2) as opened:
        yield opened


@pytest.fixture
def peer_command():
    """Return ``command(*words)``, the command line of tests/lab/network_peer.py."""
    return lambda *words: [sys.executable, "-I", str(HERE / "network_peer.py"), *map(str, words)]
