"""Worker processes that go from job to job; a job here is a folder whose files are to be taken one by one."""

import os
from pathlib import Path

import pytest

from counterpoint.errors import LaunchError
from counterpoint.launchers.pooled import WorkerPool
from counterpoint.server.working.pool import Want

pytestmark = pytest.mark.process
LONG_S = 60.0


def take_all(job, worker, must_go):
    """Take files until none is left, the last one only when the job named in it is done."""
    while names := sorted(path.name for path in Path(job).glob("*.todo")):
        if must_go():
            return False
        after = Path(job, names[0]).read_text()
        if not after or not list(Path(after).glob("*.todo")):
            Path(job, names[0]).rename(Path(job, f"{names[0]}.{worker}"))
    return True


def die_once(job, worker, must_go):
    if not Path(job, "died").exists():
        Path(job, "died").touch()
        os._exit(3)
    return take_all(job, worker, must_go)


def die(job, worker, must_go):
    os._exit(3)


def folder(path, num_files, after=""):
    path.mkdir()
    for index in range(num_files):
        Path(path, f"{index:02}.todo").write_text(str(after))
    return str(path)


def test_workers_go_to_the_other_job_when_one_is_complete(tmp_path):
    first = folder(tmp_path / "first", 3)
    second = folder(tmp_path / "second", 3, after=first)
    with WorkerPool(2, take_all) as pool:
        pool.begin(Want(second))
        assert set(pool.at.values()) == {second}
        pool.begin(Want(first))
        assert set(pool.at.values()) == {first, second}
        assert pool.wait(LONG_S) == first
        assert set(pool.at.values()) == {second}
        assert pool.wait(LONG_S) == second
    assert not list(tmp_path.rglob("*.todo"))


def test_a_worker_that_dies_is_started_again(tmp_path):
    with WorkerPool(1, die_once) as pool:
        pool.begin(Want(folder(tmp_path / "job", 2)))
        assert pool.wait(LONG_S).endswith("job")


def test_a_worker_that_always_dies_is_told_of():
    with WorkerPool(1, die) as pool:
        pool.begin(Want("job"))
        with pytest.raises(LaunchError, match="worker-0 has ended 4 times, the last time with exit code 3 at job job"):
            pool.wait(LONG_S)


def test_waiting_for_no_job_is_an_error():
    with WorkerPool(1, take_all) as pool, pytest.raises(LaunchError, match="no job has begun"):
        pool.wait(LONG_S)
