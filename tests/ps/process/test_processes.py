"""Coordinator, servers and workers as processes that are killed: nothing is counted twice, nothing is left behind."""

import os
from functools import cache
from statistics import fmean

import pytest
import torch

from counterpoint.errors import LaunchError
from counterpoint.launchers.server_processes import start_servers
from counterpoint.ps.consistency import Asp
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.messages import PushRequest
from counterpoint.ps.process.wal_writer import read_journals
from counterpoint.ps.shard import replay_journal
from counterpoint.ps.update_rules import Sgd
from counterpoint.rpc.job_key import new_key
from tests.ps.process.chaos import run
from tests.ps.process.chaos_workloads import CONSISTENCIES, CountingWorkload, TrainingWorkload
from tests.ps.process.conftest import wait_until
from tests.ps.process.counting_worker import total_of

pytestmark = pytest.mark.process
BUSY_S = 60.0
"""In which a process has started, on a machine that has much else to do."""


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.long
def test_processes_serve_and_none_is_left():
    with start_servers(JobConfig("short", Asp(), is_logged=False), key=new_key()) as servers:
        pids, file = servers.pids, servers.contact_path
        with servers.join("worker-0") as session:
            session.init("weight", torch.zeros(400_000), Sgd(1.0))
            session.push("weight", torch.ones(400_000)).wait()
            assert float(session.pull("weight").wait().values.sum()) == -400_000
    assert not any(map(is_running, pids.values()))
    assert not file.parent.exists()


@pytest.mark.long
def test_a_process_that_ends_by_itself_is_reported_of_with_what_it_said(tmp_path):
    (tmp_path / "shard-0.log").mkdir()
    with start_servers(JobConfig("short", Asp()), folder=tmp_path) as servers:
        wait_until(lambda: has_failed(servers), BUSY_S)
        with pytest.raises(LaunchError, match=r"server-0 of short has ended: .*CheckpointError: cannot read"):
            servers.join("worker-0", timeout_s=5.0)


def has_failed(servers):
    """Whether a process that ended by itself has been noticed."""
    try:
        servers.check()
    except LaunchError:
        return True
    return False


def counted(chaos_run, folder):
    """The slices that each key has counted as new, by shard, from the first entry of the journals to the last."""
    result: dict[tuple[int, str], list[int]] = {}
    for index, entries in read_journals(folder, chaos_run.job.num_shards).items():
        shard = replay_journal(chaos_run.job, index, [])
        for entry in entries:
            answer = shard.apply(entry)
            if isinstance(entry, PushRequest) and getattr(answer, "is_new", False):
                result.setdefault((index, entry.key), []).append(entry.slice_index)
    return {place: sorted(slices) for place, slices in result.items()}


def check_counts(chaos_run, folder, num_places):
    """Every slice is counted once on each part of each key."""
    assert not chaos_run.errors, chaos_run
    result = counted(chaos_run, folder)
    assert len(result) == num_places
    assert all(slices == list(range(total_of(chaos_run.job))) for slices in result.values()), chaos_run


def count(seed, folder, **options):
    """Run a chaos job in which each slice adds 1, and check that each is counted once."""
    chaos_run = run(seed, folder, CountingWorkload(), **options)
    check_counts(chaos_run, folder, 1)
    assert chaos_run.values == [-1.0] * total_of(chaos_run.job)


@pytest.mark.long
def test_every_slice_is_counted_once_though_processes_are_killed(tmp_path):
    count(1, tmp_path, num_strikes=3)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", range(100, 150))
def test_every_slice_is_counted_once_on_50_bad_days(tmp_path, seed):
    count(seed, tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The held-out loss of a mode when no process is killed, joins or leaves.

    On average over a few runs: in each the order of pushes is another one, which alone moves it by half a percent.
    """

    @cache
    def loss(mode):
        folders = [tmp_path_factory.mktemp("undisturbed") for _ in range(4)]
        return fmean(run(0, folder, TrainingWorkload(mode), num_strikes=0).values[0] for folder in folders)

    return loss


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("mode", CONSISTENCIES, ids=str)
@pytest.mark.parametrize("seed", range(200, 204))
def test_lines_are_learned_as_well_on_bad_days(tmp_path, undisturbed, mode, seed):
    chaos_run = run(seed, tmp_path, TrainingWorkload(mode))
    check_counts(chaos_run, tmp_path, 1 + chaos_run.job.num_servers)  # the head on one server, the table on all
    assert chaos_run.values == [pytest.approx(undisturbed(mode), rel=0.01)]
