"""Coordinator, servers and workers as processes that are killed: nothing is counted twice, nothing is left behind."""

import os
from pathlib import Path

import pytest
import torch

from counterpoint.errors import LaunchError
from counterpoint.launchers.serving import start
from counterpoint.server.choices import Sgd
from counterpoint.server.hosting.journals import read_journals
from counterpoint.server.job import Asp, Job
from counterpoint.server.messages import Push
from counterpoint.server.shard import replay
from counterpoint.server.wire.key import new_key
from tests.server.hosting.conftest import until
from tests.server.hosting.ordeal import run
from tests.server.hosting.program import KEY, total_of

pytestmark = pytest.mark.process


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_processes_serve_and_none_is_left():
    with start(Job("short", Asp(), is_logged=False), key=new_key()) as servers:
        pids, file = servers.pids, servers.contact_path
        with servers.join("worker-0") as session:
            session.init("weight", torch.zeros(400_000), Sgd(1.0))
            session.push("weight", torch.ones(400_000)).wait()
            assert float(session.pull("weight").wait().values.sum()) == -400_000
    assert not any(map(is_running, pids.values()))
    assert not file.parent.exists()


def test_a_process_that_ends_by_itself_is_told_of_with_what_it_said(tmp_path):
    (tmp_path / "shard-0.log").mkdir()
    with start(Job("short", Asp()), folder=tmp_path) as servers:
        until(lambda: any(map(is_ended, servers.pids.values())))
        with pytest.raises(LaunchError, match=r"server-0 of short has ended: .*CheckpointError: cannot read"):
            servers.join("worker-0", deadline_s=5.0)


def is_ended(pid):
    """Whether a child of this process is one that nobody has waited for, or gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def check(ordeal, folder):
    """Everything is counted once: in the numbers, and in the journals from the first entry to the last."""
    assert ordeal.is_exact, ordeal
    journals = read_journals(folder, ordeal.job.num_shards)
    counted = []
    for index, entries in journals.items():
        shard = replay(ordeal.job, index, [])
        for entry in entries:
            answer = shard.apply(entry)
            if isinstance(entry, Push) and getattr(answer, "is_new", False):
                counted.append(entry.portion)
    assert sorted(counted) == list(range(total_of(ordeal.job)))
    assert KEY in {entry.key for entries in journals.values() for entry in entries if isinstance(entry, Push)}


def test_every_portion_is_counted_once_though_processes_are_killed(tmp_path):
    check(run(1, tmp_path, num_strikes=3), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("seed", range(100, 150))
def test_every_portion_is_counted_once_on_50_bad_days(tmp_path, seed):
    check(run(seed, tmp_path), tmp_path)
