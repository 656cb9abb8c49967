"""A folder is one run's at a time, whoever starts second is told whose, and a dead run keeps nobody out."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from counterpoint.checkpoint import begin, draft, folder_lock, join_draft
from counterpoint.checkpoint.file_ops import LocalFileOps
from counterpoint.checkpoint.folder_lock import LOCK, LockOwner, lock_folder
from counterpoint.errors import CheckpointError, CheckpointWriteError
from tests.other_user import STRANGER, as_root, as_user

REMEDY = "give another folder"
HOLD = """
import sys
from pathlib import Path
from counterpoint.checkpoint.folder_lock import lock_folder
lock = lock_folder(Path(sys.argv[1]), "a1b2", "give another folder")
print("held", flush=True)
sys.stdin.read()
"""


def no_locks(descriptor, operation):
    raise OSError(errno.ENOLCK, "No locks available")


def leave_lock(folder, **changes):
    """Write the lock file of a process of this host that has ended."""
    owner = replace(LockOwner.this_process("a1b2"), start_ticks=1, **changes)
    (folder / LOCK).write_text(json.dumps(asdict(owner)))


def test_a_second_run_is_refused_and_told_who_holds_the_folder_since_when(tmp_path):
    lock = lock_folder(tmp_path, "a1b2", REMEDY)
    with pytest.raises(CheckpointError) as caught:
        lock_folder(tmp_path, "c3d4", REMEDY)
    lock.release()
    assert f"another run uses {tmp_path}: run a1b2, pid {os.getpid()} on host {os.uname().nodename}, since 20" in str(
        caught.value
    )
    assert "would replace each other: give another folder, or start when that run has ended" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    lock_folder(tmp_path, "c3d4", REMEDY).release()


def test_the_lock_of_a_run_killed_by_kill_9_keeps_nobody_out(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    paths = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    with subprocess.Popen(command, env=paths, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=f"run a1b2, pid {other.pid} on host"):
            lock_folder(tmp_path, "c3d4", REMEDY)
        other.kill()
        other.wait()
        with pytest.warns(RuntimeWarning, match=rf"was left by a run that has ended \(run a1b2, pid {other.pid} on"):
            lock_folder(tmp_path, "c3d4", REMEDY).release()


@as_root
def test_another_user_cannot_open_the_lock_and_so_cannot_hold_it(tmp_path):
    tmp_path.chmod(0o755)
    lock = lock_folder(tmp_path, "a1b2", REMEDY)
    assert lock.path.stat().st_mode & 0o777 == 0o600
    with as_user(STRANGER), pytest.raises(PermissionError):
        os.open(lock.path, os.O_RDONLY)
    lock.release()


def test_a_process_that_keeps_the_lock_of_a_dead_run_is_not_taken_for_that_run(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "ORPHAN_WAIT_S", 0.1)
    leave_lock(tmp_path)
    with (tmp_path / LOCK).open() as stranger:
        fcntl.flock(stranger, fcntl.LOCK_SH)
        with pytest.raises(CheckpointError) as caught:
            lock_folder(tmp_path, "c3d4", REMEDY)
    assert str(caught.value).startswith(f"the run that used {tmp_path} has ended (run a1b2, pid ")
    assert f"another process still holds its lock: end that process, which `fuser {tmp_path / LOCK}` names" in str(
        caught.value
    )


@pytest.mark.parametrize("start", [begin, partial(join_draft, run="a1")])
def test_a_draft_that_another_process_keeps_locked_is_given_up_and_the_save_is_one_that_failed(
    start, tmp_path, monkeypatch
):
    monkeypatch.setattr(draft, "DRAFT_LOCK_S", 0.05)
    held = []

    class Watched(LocalFileOps):
        def make_folder(self, path):
            super().make_folder(path)
            held.append(os.open(path, os.O_RDONLY))  # what every user can do who may read the folder
            fcntl.flock(held[-1], fcntl.LOCK_EX)

    with pytest.raises(
        CheckpointWriteError,
        match=r"step-00000001.tmp-\w+ has been locked for 0 s by a process that does not",
    ):
        start(tmp_path, 1, files=Watched())
    for descriptor in held:
        os.close(descriptor)


def test_a_file_system_without_locks_is_named_and_the_file_stands_for_one(tmp_path):
    with pytest.warns(RuntimeWarning, match="has no locks, so the file run.lock in it stands for one"):
        lock = lock_folder(tmp_path, "a1b2", REMEDY, flock=no_locks)
    with pytest.raises(CheckpointError, match=r"when that run has ended and .*run.lock is removed"):
        lock_folder(tmp_path, "c3d4", REMEDY, flock=no_locks)
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_without_locks_a_dead_run_of_this_host_gives_way_and_one_of_another_host_does_not(tmp_path):
    leave_lock(tmp_path)
    with pytest.warns(RuntimeWarning) as warned:
        lock_folder(tmp_path, "c3d4", REMEDY, flock=no_locks).release()
    assert "was left by a run that has ended" in str(warned[0].message)
    leave_lock(tmp_path, host="other", kernel="another boot")
    with pytest.raises(CheckpointError, match=r"another run uses .*: run a1b2, pid \d+ on host other, since"):
        lock_folder(tmp_path, "c3d4", REMEDY, flock=no_locks)


def test_a_run_whose_lock_file_was_removed_does_not_save(tmp_path):
    lock = lock_folder(tmp_path, "a1b2", REMEDY)
    lock.require_held()
    lock.path.unlink()
    other = lock_folder(tmp_path, "c3d4", REMEDY)
    with pytest.raises(CheckpointError, match="is no longer the lock that this run holds"):
        lock.require_held()
    lock.release()
    other.require_held()
    other.release()


@pytest.mark.parametrize(("make", "kind"), [
    (lambda path: path.symlink_to("/dev/zero"), "a link"), (Path.mkdir, "a folder"), (os.mkfifo, "not a regular file"),
])  # fmt: skip
def test_a_lock_that_is_no_file_is_named(make, kind, tmp_path):
    make(tmp_path / LOCK)
    with pytest.raises(OSError, match=f"{tmp_path / LOCK} is {kind}: remove it"):
        lock_folder(tmp_path, "c3d4", REMEDY)


INFINITE_PID = json.dumps(asdict(LockOwner("a", "b", "c", 7, 1, "d"))).replace("7", "1e999")


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"pid": "x"}', "[" * 4000, INFINITE_PID])
def test_a_lock_file_that_nobody_holds_is_taken_whatever_is_in_it(content, tmp_path):
    (tmp_path / LOCK).write_text(content)
    lock_folder(tmp_path, "c3d4", REMEDY).release()
    assert list(tmp_path.iterdir()) == []
