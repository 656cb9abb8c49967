"""Whatever operation the machine stops at, exactly the old or exactly the new state loads."""

import errno
import shutil

import pytest

from counterpoint.checkpoint import Checkpoint, begin, save, verify
from counterpoint.errors import CheckpointError
from counterpoint.testing.failing_disk import FailingDisk, SimulatedCrash
from tests.checkpoint.saved_states import holds_exactly, save_step, save_through


def operations(tmp_path, keep=None):
    save_step(tmp_path / "count", 1)
    counter = FailingDisk()
    save_through(counter, tmp_path / "count", 2, keep=keep)
    return counter.log


def stop_at(tmp_path, at, failure=SimulatedCrash):
    root = tmp_path / f"stop-{at}"
    save_step(root, 1)
    files = FailingDisk(at, failure)
    with pytest.raises((SimulatedCrash, CheckpointError)):
        save_through(files, root, 2, keep=2)
    return root, files


def test_a_save_syncs_every_file_and_folder_before_the_one_rename(tmp_path):
    words = [line.split()[0] for line in operations(tmp_path)]
    before = words[: words.index("rename")]
    assert before.count("create") == before.count("sync") == 3
    assert before[-2:] == ["sync", "sync_folder"]
    assert words[words.index("rename") + 1] == "sync_folder"


def test_a_kill_after_any_operation_leaves_exactly_the_old_or_exactly_the_new_state(tmp_path):
    total, seen = len(operations(tmp_path)), set()
    for at in range(1, total + 1):
        root, _ = stop_at(tmp_path, at)
        checkpoint = Checkpoint.open(root)
        assert holds_exactly(checkpoint, checkpoint.step), f"mixture after a kill at operation {at}"
        seen.add(checkpoint.step)
        save_step(root, 3)
        assert not list(root.glob("*.tmp-*")), f"leftovers after a kill at operation {at}"
    assert seen == {1, 2}


def test_a_power_cut_after_any_operation_leaves_exactly_the_old_or_exactly_the_new_state(tmp_path):
    total, seen = len(operations(tmp_path)), set()
    for at in range(1, total + 1):
        root, files = stop_at(tmp_path, at)
        files.drop_unsynced()
        checkpoint = Checkpoint.open(root)
        assert holds_exactly(checkpoint, checkpoint.step), f"mixture after a power cut at operation {at}"
        seen.add(checkpoint.step)
    root = tmp_path / "done"
    save_step(root, 1)
    files = FailingDisk()
    save_through(files, root, 2)
    files.drop_unsynced()
    assert seen == {1}
    assert holds_exactly(Checkpoint.open(root), 2)


def test_a_kill_while_old_checkpoints_are_deleted_never_harms_the_new_one(tmp_path):
    log = operations(tmp_path, keep=1)
    first = next(index for index, line in enumerate(log, start=1) if line.startswith("rename step-00000001"))
    for at in range(first, len(log) + 1):
        root = tmp_path / f"prune-{at}"
        save_step(root, 1)
        with pytest.raises(SimulatedCrash):
            save_through(FailingDisk(at), root, 2, keep=1)
        assert holds_exactly(Checkpoint.open(root), 2)
        assert all(not verify(folder).problems for folder in root.glob("step-????????"))


@pytest.mark.long(quick=["30"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_an_error_from_the_disk_at_any_operation_is_named_and_keeps_the_old_state(tmp_path, code):
    total = len(operations(tmp_path))
    for at in range(1, total):
        root, _ = stop_at(tmp_path, at, lambda: OSError(code, "the disk said no"))
        assert holds_exactly(Checkpoint.open(root), 1)
        shutil.rmtree(root)


def test_a_disk_that_fills_up_while_writing_tells_needed_and_free_bytes(tmp_path):
    save_step(tmp_path, 1)
    files = FailingDisk(fail_at=4, failure=lambda: OSError(errno.ENOSPC, "No space left on device"), free=77)
    with pytest.raises(CheckpointError) as caught:
        save_through(files, tmp_path, 2)
    assert "the disk filled up while writing" in str(caught.value)
    assert "bytes were needed, 77 are free now (No space left on device)" in str(caught.value)
    assert "earlier checkpoints are untouched" in str(caught.value)


def test_space_is_looked_at_before_anything_is_written(tmp_path):
    files = FailingDisk(free=100)
    with pytest.raises(CheckpointError, match="4,096 bytes are needed, 100 are free; nothing was written"):
        begin(tmp_path, 1, needed_bytes=4096, files=files)
    assert list(tmp_path.iterdir()) == []


def test_the_draft_of_a_living_save_is_not_swept_by_another_run(tmp_path):
    with begin(tmp_path, 5) as alive:
        save_step(tmp_path, 6)
        assert alive.folder.is_dir()
    assert not alive.folder.exists()


def test_the_same_checkpoint_saved_twice_is_one_checkpoint(tmp_path):
    first = save_step(tmp_path, 1)
    written = (first / "manifest.json").stat().st_mtime_ns
    assert save_step(tmp_path, 1) == first
    assert (first / "manifest.json").stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_another_checkpoint_of_the_same_step_is_never_overwritten(tmp_path):
    save_step(tmp_path, 1)
    with pytest.raises(CheckpointError, match="exists and differs from what is being saved; a checkpoint is never"):
        save(tmp_path, 1, {}, {})
    assert holds_exactly(Checkpoint.open(tmp_path), 1)


def test_a_damaged_checkpoint_of_the_same_step_is_moved_aside_not_deleted(tmp_path):
    shard = save_step(tmp_path, 1) / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="was damaged .*; it was renamed to step-00000001.damaged-"):
        save_step(tmp_path, 1)
    assert holds_exactly(Checkpoint.open(tmp_path), 1)
    assert len(list(tmp_path.glob("step-00000001.damaged-*/shard-00000.safetensors"))) == 1


def test_keep_counts_intact_checkpoints_only(tmp_path):
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    save_step(tmp_path, 4, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000002",
        "step-00000003",
        "step-00000004",
    ]


def test_keep_none_at_all_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="keep=0 would delete the checkpoint that is being saved"):
        save_step(tmp_path, 1, keep=0)
