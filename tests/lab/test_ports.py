"""What a stranger on another host finds of a job: one port, and behind it a greeting that he cannot finish."""

import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HELLO_BYTES, PROOF_BYTES = 40, 32

pytestmark = [pytest.mark.process, pytest.mark.lab, pytest.mark.slow]


@pytest.fixture
def scan(lab):
    """What a scan of a host with a job finds from another host: the job's port, and what each port said."""
    job = lab.start("h0", [sys.executable, str(HERE / "job.py"), "10.77.0.1"])
    job.wait_for("ready", deadline_s=60)
    port = job.written().split("ready ")[1].split()[0]
    ended = lab.run({"h1": [sys.executable, "-I", str(HERE / "scan.py"), "10.77.0.1"]}, deadline_s=90)["h1"]
    return port, json.loads(ended.text().splitlines()[-1])


def test_a_scan_finds_the_port_of_the_job_and_nothing_but_the_greeting(scan):
    port, found = scan
    assert list(found) == [port]
    said = {name: bytes.fromhex(answer) for name, answer in found[port].items()}
    greeted = {name for name, answer in said.items() if answer}
    assert greeted == {name for name in said if name.startswith("a greeting")}
    for name in greeted:
        assert said[name].startswith(b"CPWS\1\1\0\0")
        assert len(said[name]) == HELLO_BYTES + PROOF_BYTES * ("proof" in name)
        assert not any(said[name][HELLO_BYTES:])
