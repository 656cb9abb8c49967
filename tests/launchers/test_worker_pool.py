"""Worker processes that move between jobs; a job here is a folder whose files are taken one by one."""

import os
import threading
from multiprocessing import Pipe
from pathlib import Path

import pytest

from counterpoint.elastic.worker_allocation import JobDemand
from counterpoint.errors import LaunchError
from counterpoint.launchers.worker_pool import WorkerPool, worker_main

pytestmark = pytest.mark.process
LONG_S, LOOK_S = 60.0, 0.02


def take_all(job, worker, must_go):
    """Take files until none is left; a file that names a folder waits until that folder has no files left."""
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


def linger(job, worker, must_go):
    """The first worker is done as soon as the second one is there, which goes when it has to, and takes its time."""
    Path(job, f"{worker}.came").touch()
    pause = threading.Event()
    if worker == "worker-0":
        while not Path(job, "worker-1.came").exists():
            pause.wait(LOOK_S)
        return True
    while not must_go():
        pause.wait(LOOK_S)
    for _ in range(20):
        pause.wait(LOOK_S)
    Path(job, "worker-1.left").touch()
    return False


def stay(job, worker, must_go):
    """The second worker stays until a file says that it may go; the first is done when the second is there."""
    pause = threading.Event()
    if worker == "worker-1":
        Path(job, "here").touch()
    while not Path(job, "go" if worker == "worker-1" else "here").exists():
        pause.wait(LOOK_S)
    return True


def folder(path, num_files, after=""):
    path.mkdir()
    for index in range(num_files):
        Path(path, f"{index:02}.todo").write_text(str(after))
    return str(path)


def test_workers_go_to_the_other_job_when_one_is_complete(tmp_path):
    first = folder(tmp_path / "first", 3)
    gate = folder(tmp_path / "gate", 1)
    second = folder(tmp_path / "second", 3, after=gate)
    with WorkerPool(2, take_all) as pool:
        pool.add_job(JobDemand(second))
        assert set(pool.current_jobs.values()) == {second}
        pool.add_job(JobDemand(first))
        assert set(pool.current_jobs.values()) == {first, second}
        assert pool.wait(LONG_S) == first
        assert set(pool.current_jobs.values()) == {second}
        Path(gate, "00.todo").unlink()
        assert pool.wait(LONG_S) == second
    assert not list(tmp_path.rglob("*.todo"))


def test_wait_returns_a_complete_job_once_all_workers_have_left_it(tmp_path):
    with WorkerPool(2, linger) as pool:
        pool.add_job(JobDemand(str(tmp_path)))
        assert pool.wait(LONG_S) == str(tmp_path)
        assert Path(tmp_path, "worker-1.left").exists()


@pytest.mark.long
def test_a_worker_that_does_not_leave_a_complete_job_is_named(tmp_path):
    with WorkerPool(2, stay) as pool:
        pool.add_job(JobDemand(str(tmp_path)))
        with pytest.raises(LaunchError, match="is complete, but worker-1 had not left it after 5 s; give more time"):
            pool.wait(5.0)
        Path(tmp_path, "go").touch()


def test_orders_that_were_passed_over_are_answered_too():
    ours, theirs = Pipe()
    for number, job in enumerate(("first", "second")):
        ours.send((number, job))
    worker = threading.Thread(target=worker_main, args=(lambda job, *_: job == "second", "worker-0", theirs))
    worker.start()
    assert [ours.recv() for _ in range(2) if ours.poll(LONG_S)] == [(0, "first", False), (1, "second", True)]
    ours.close()
    worker.join(LONG_S)


def test_a_worker_that_dies_is_started_again(tmp_path):
    with WorkerPool(1, die_once) as pool:
        pool.add_job(JobDemand(folder(tmp_path / "job", 2)))
        assert pool.wait(LONG_S).endswith("job")


def test_a_worker_that_dies_repeatedly_is_reported():
    with WorkerPool(1, die) as pool:
        pool.add_job(JobDemand("job"))
        with pytest.raises(LaunchError, match="worker-0 has ended 4 times, the last time with exit code 3 at job job"):
            pool.wait(LONG_S)


def test_waiting_for_no_job_is_an_error():
    with WorkerPool(1, take_all) as pool, pytest.raises(LaunchError, match="there is no job to wait for"):
        pool.wait(LONG_S)
