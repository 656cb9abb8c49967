"""Coordinator, servers and workers on separate hosts, started by command, connected by TCP with a key."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.lab import Lab, wait_all
from counterpoint.ps.process.disk_layout import complete_snapshots
from counterpoint.rpc.job_key import new_key, write_key
from tests.elastic.worker_fixtures import make_numeric_data, max_relative_difference, mlp, train_single_process
from tests.lab.ps_worker import plan
from tests.lab.server_job import COUNTERPOINT, PORT, READY_S, FarJob, says_nothing_but_the_greeting
from tests.ps.process.conftest import wait_until

pytestmark = [pytest.mark.process, pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]
SCAN = Path(__file__).with_name("scan_ports.py")
LONG_S = 150.0


@pytest.fixture
def far(permitted, tmp_path):
    """A job on six hosts: the coordinator on h0, servers on h1 and h2, nothing yet on the others."""
    with Lab(hosts=6) as lab:
        job = FarJob(lab, tmp_path, plan().job)
        job.begin("--folder", str(tmp_path / "run"))
        yield job


def is_as_one_loop(written):
    """Whether what a worker has learnt is what one loop learns."""
    learnt, expected = (
        mlp(),
        train_single_process(mlp(), make_numeric_data(64), plan().data_slices, epochs=plan().epochs),
    )
    with torch.no_grad():
        for parameter, values in zip(learnt.parameters(), json.loads(written.splitlines()[-1]), strict=True):
            parameter.copy_(torch.tensor(values, dtype=torch.float64))
    return max_relative_difference(learnt, expected) < 1e-12


def test_workers_and_servers_on_five_hosts_learn_what_one_loop_does(far):
    workers = [far.work("h3", "worker-0"), far.work("h4", "worker-1")]
    for worker in wait_all(workers, LONG_S):
        assert "portion 1\n" in worker.text()
        assert is_as_one_loop(worker.text())


def test_a_scan_finds_the_ports_of_coordinator_and_servers_and_nothing_but_the_greeting(far, tmp_path):
    worker = far.work("h3", "worker-0", gate=tmp_path / "gate")
    worker.wait_for("joined", READY_S)
    hosts = ("h0", "h1", "h2", "h3")
    scans = [far.lab.start("h5", [sys.executable, "-I", str(SCAN), far.lab.addresses[host]]) for host in hosts]
    result = {host: json.loads(one.text()) for host, one in zip(hosts, wait_all(scans, LONG_S), strict=True)}
    assert {host: len(ports) for host, ports in result.items()} == {"h0": 1, "h1": 1, "h2": 1, "h3": 0}
    assert list(result["h0"]) == [str(PORT)]
    assert all(says_nothing_but_the_greeting(answers) for ports in result.values() for answers in ports.values())
    (tmp_path / "gate").touch()
    assert is_as_one_loop(wait_all([worker], LONG_S)[0].text())


def test_a_worker_with_another_key_gets_an_error_and_the_job_continues(far, tmp_path):
    write_key(new_key(), tmp_path / "other.key")
    stranger = wait_all([far.work("h5", "stranger", key=tmp_path / "other.key")], LONG_S)[0]
    assert stranger.code != 0
    assert "LaunchError: stranger could not join job far: " in stranger.err
    assert "key" in stranger.err
    assert is_as_one_loop(wait_all([far.work("h3", "worker-0")], LONG_S)[0].text())


def test_a_member_without_a_key_does_not_listen(far):
    for words in (("coordinator",), ("server", "--name", "bare", "--listen", "tcp:h5:0")):
        command = [*COUNTERPOINT, "serve", *words, "--job", str(far.path)]
        ended = far.lab.run({"h5": command}, deadline_s=60)["h5"]
        assert ended.code != 0
        assert "there is no job key for tcp:" in ended.out + ended.err


def test_a_job_continues_when_the_host_of_a_server_is_unplugged(far):
    far.serve("h4", "server", name="spare")
    far.wait_for_servers()
    worker = far.work("h3", "worker-0")
    worker.wait_for("portion 60\n", READY_S)
    far.lab.unplug("h1")
    assert is_as_one_loop(wait_all([worker], LONG_S)[0].text())


def test_a_job_resumes_from_its_snapshot_when_all_hosts_have_died(far, tmp_path):
    worker = far.work("h3", "worker-0")
    worker.wait_for("portion 60\n", READY_S)
    wait_until(lambda: complete_snapshots(tmp_path / "run", plan().job), LONG_S)
    worker.kill()
    far.kill()
    command = [*COUNTERPOINT, "serve", "resume", "--job", str(far.path), "--folder", str(tmp_path / "run")]
    output = far.lab.run({"h0": command}, deadline_s=60)["h0"].text()
    snapshot = output.split("--snapshot ")[1].strip()
    far.begin("--folder", str(tmp_path / "run"), "--snapshot", snapshot)
    last = wait_all([far.work("h4", "worker-1")], LONG_S)[0]
    assert is_as_one_loop(last.text())
    assert last.text().count("portion") < plan().job.data.num_slices * plan().epochs
