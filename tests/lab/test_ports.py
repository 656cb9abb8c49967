"""A stranger on another host finds one open port of a job, with a handshake that it cannot complete."""

import json
import sys
from pathlib import Path

import pytest

from tests.lab.server_job import says_nothing_but_the_greeting

HERE = Path(__file__).parent

pytestmark = [pytest.mark.process, pytest.mark.integration, pytest.mark.slow]


@pytest.fixture
def scan(lab):
    """What a scan of a host with a job finds from another host: the job's port, and what each port said."""
    job = lab.start("h0", [sys.executable, str(HERE / "rpc_servers.py"), "10.77.0.1"])
    job.wait_for("ready", deadline_s=60)
    port = job.written().split("ready ")[1].split()[0]
    ended = lab.run({"h1": [sys.executable, "-I", str(HERE / "scan_ports.py"), "10.77.0.1"]}, deadline_s=90)["h1"]
    return port, json.loads(ended.text().splitlines()[-1])


def test_a_scan_finds_the_port_of_the_job_and_nothing_but_the_greeting(scan):
    port, result = scan
    assert list(result) == [port]
    assert says_nothing_but_the_greeting(result[port])
