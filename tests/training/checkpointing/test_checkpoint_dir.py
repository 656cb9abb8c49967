"""One run at a time saves to a folder, whether it can is known before the first step, and a bad disk ends no run."""

import errno
import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path
from threading import Event

import pytest

import counterpoint as cp
from counterpoint.checkpoint import Checkpoint, step_folders
from counterpoint.checkpoint.file_ops import LOCAL_FILES, LocalFileOps
from counterpoint.checkpoint.folder_lock import LOCK
from counterpoint.training.batches.batch_source import open_batches
from counterpoint.training.batches.dataset_batches import DataLoadingConfig
from counterpoint.training.callbacks.callback import CheckpointFailed
from counterpoint.training.checkpointing.checkpoint_dir import format_flaws, probe_dir, require_space
from counterpoint.training.fit_loop import CheckpointConfig, EvaluationConfig, FitConfig
from tests.training.trainers import StopAt, dataset, equal_bits, fit, make_trainer, state_of


class NeverSteps(cp.Callback):
    def on_step(self, event):
        raise AssertionError("a step was taken")


class StartsAnother(cp.Callback):
    """Starts a second run in the same folder while this one runs, and keeps its error."""

    def __init__(self, **options):
        self.options = options
        self.error = ""

    def on_step(self, event):
        if event.step == 1:
            with make_trainer("data(2)", callbacks=[NeverSteps()]) as one, pytest.raises(cp.CheckpointError) as caught:
                one.fit(dataset(), batch_size=12, **self.options)
            self.error = str(caught.value)


class Disk(LocalFileOps):
    """A disk that fails with an error code while one is set, for shards of these ranks."""

    def __init__(self, ranks=("00000", "00001")):
        self.code = 0
        self.ranks = ranks

    def create(self, path):
        if self.code and path.name[6:11] in self.ranks:
            raise OSError(self.code, os.strerror(self.code), str(path))
        return super().create(path)


class SlowDisk(Disk):
    """A disk that takes its time for each file."""

    def create(self, path):
        Event().wait(0.05)
        return super().create(path)


class FailsAt(cp.Callback):
    """Sets the error code of a disk after some steps, and records what is told of saves."""

    def __init__(self, disk, codes):
        self.disk = disk
        self.codes = codes
        self.events = []

    def on_step(self, event):
        self.disk.code = self.codes.get(event.step + 1, self.disk.code)

    def on_checkpoint(self, event):
        self.events.append(event.step)

    def on_checkpoint_failed(self, event):
        self.events.append(event)


def fit_on(disk, folder, codes, strategy="data(2)", **options):
    """Train for eight steps, saving every second one to a disk that fails from these steps on; return the state."""
    told = FailsAt(disk, codes)
    with make_trainer(strategy, callbacks=[told], **options) as one:
        batches = open_batches(
            dataset(), layout=one.sample_layout, batch_size=12, collate_fn=None, loading=DataLoadingConfig()
        )
        config = CheckpointConfig(folder, 2, 2, "synchronous", disk)
        one.run_fit(one.build_fit_loop(batches, FitConfig(2, None, EvaluationConfig(None, None, None), config), []))
        return state_of(one.model), told.events


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step():
    with (
        make_trainer("data(2)", callbacks=[NeverSteps()]) as one,
        pytest.raises(
            cp.CheckpointError, match=r"^the folder /proc/self for checkpoints cannot be written: .*; choose an"
        ),
    ):
        one.fit(dataset(), batch_size=12, checkpoint_dir="/proc/self")


def test_a_folder_without_space_for_the_model_is_refused():
    require_space(Path("there"), 100, free_bytes=100)
    with pytest.raises(
        cp.CheckpointError, match=r"^the model has 100 bytes, but there has only 99 free, so no checkpoint"
    ):
        require_space(Path("there"), 100, free_bytes=99)


def test_ranks_that_do_not_share_the_folder_or_cannot_write_there_are_named(tmp_path):
    unshared = probe_dir(LOCAL_FILES, tmp_path, "a1", 1)
    (tmp_path / ".probe-a1").mkdir()
    (tmp_path / ".probe-a1" / "token").write_text("a1")
    full = Disk(("",))
    full.code = errno.EROFS
    refused = probe_dir(full, tmp_path, "a1", 2)
    assert probe_dir(LOCAL_FILES, tmp_path, "a1", 0) == ""
    text = format_flaws(tmp_path, [["a", ""], ["b", unshared], ["c", refused]])
    assert f"not every rank can save to {tmp_path}: rank 1 on host b does not find there what rank 0 has just" in text
    assert "; rank 2 on host c cannot write there: Read-only file system; every rank writes its part" in text


def test_a_file_system_without_rename_is_refused_before_the_first_step(tmp_path):
    class NoRename(LocalFileOps):
        def rename(self, source, target):
            raise OSError(errno.ENOTSUP, "Operation not supported")

    with pytest.raises(cp.CheckpointError, match=r"cannot be renamed \(Operation not supported\), and a checkpoint is"):
        fit_on(NoRename(), tmp_path, {})
    assert not list(tmp_path.iterdir())


def test_a_second_run_in_a_folder_is_refused_before_its_first_step_and_the_first_one_is_untouched(tmp_path):
    other = StartsAnother(checkpoint_dir=tmp_path, resume="auto", save_every=1, keep_last=1)
    fit("data(2)", fit_options={"checkpoint_dir": tmp_path, "save_every": 1}, callbacks=[other])
    expected = rf"another run uses {re.escape(str(tmp_path))}: run [0-9a-f]{{12}}, pid {os.getpid()} on host .*, since "
    assert re.match(expected, other.error)
    assert other.error.endswith("give another checkpoint_dir, or start when that run has ended")
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"step-0000000{step}" for step in (2, 3, 4)]


def test_a_second_run_in_a_run_folder_is_refused_though_its_checkpoints_are_elsewhere(tmp_path):
    fit("data(2)", fit_options={"checkpoint_dir": tmp_path / "a"})
    other = StartsAnother(run_dir=tmp_path / "run", checkpoint_dir=tmp_path / "b", resume=tmp_path / "a", epochs=2)
    fit("data(2)", fit_options={"run_dir": tmp_path / "run"}, callbacks=[other])
    assert other.error.startswith(f"another run uses {tmp_path / 'run'}: pid ")
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_run_removes_only_its_own_checkpoints(tmp_path):
    fit("data(2)", fit_options={"checkpoint_dir": tmp_path / "other", "max_steps": 2})
    with pytest.raises(KeyboardInterrupt):
        fit("data(2)", fit_options={"checkpoint_dir": tmp_path / "a", "save_every": 1}, callbacks=[StopAt(0)])
    fit("data(2)", fit_options={"checkpoint_dir": tmp_path / "a", "save_every": 1, "max_steps": 1})
    (tmp_path / "other" / "step-00000002").rename(tmp_path / "a" / "step-00000002")
    resume = {"checkpoint_dir": tmp_path / "a", "resume": tmp_path / "a" / "step-00000001"}
    fit("data(2)", fit_options={**resume, "save_every": 3, "keep_last": 1}, epochs=2)
    assert [path.name for path in step_folders(tmp_path / "a")] == ["step-00000002", "step-00000008"]


def test_a_resumed_run_is_the_same_run_and_another_one_is_not(tmp_path):
    ids = []
    for folder, resume, steps in [("a", None, 2), ("a", tmp_path / "a", 4), ("b", None, 2)]:
        options = {"checkpoint_dir": tmp_path / folder, "resume": resume, "max_steps": steps}
        fit("data(2)", fit_options=options)
        ids.append(Checkpoint.open(tmp_path / folder).state["run_id"])
    assert ids[0] == ids[1] != ids[2]


def test_a_slow_disk_that_is_full_then_read_only_then_freed_costs_checkpoints_but_no_step(tmp_path):
    with pytest.warns(RuntimeWarning, match=r"a checkpoint is still being written on rank.* after 0 s; training waits"):
        state, events = fit_on(SlowDisk(), tmp_path, {3: errno.ENOSPC, 5: errno.EROFS, 7: 0}, timeout_s=0.03)
    assert equal_bits(state, fit("data(2)", epochs=2)[0])
    assert [event.step if isinstance(event, CheckpointFailed) else event for event in events] == [2, 4, 6, 8]
    assert [event.num_failed for event in events[1:3]] == [1, 2]
    assert re.search(r"bytes were needed, [\d,]+ are free now \(No space left on device\)", events[1].reason)
    assert "Read-only file system; a file whose write or sync failed is never used again" in events[2].reason
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000002", "step-00000008"]
    assert equal_bits(fit("data(2)", fit_options={"resume": tmp_path}, epochs=2)[0], state)


@pytest.mark.long(quick=["122"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT, errno.EACCES])
def test_a_save_that_fails_on_one_rank_fails_for_all_and_the_run_goes_on(code, tmp_path):
    state, events = fit_on(Disk(("00001",)), tmp_path, {5: code, 7: 0}, "zero(2, level=3)")
    assert [event.step if isinstance(event, CheckpointFailed) else event for event in events] == [2, 4, 6, 8]
    assert events[2].reason.startswith("rank 1: ")
    assert os.strerror(code) in events[2].reason
    assert equal_bits(state, fit("zero(2, level=3)", epochs=2)[0])


class Moves(FailsAt):
    """Moves the folder away after a step, puts a link there after another, and moves it back."""

    def __init__(self, folder):
        super().__init__(Disk(), {})
        self.folder, self.aside = folder, folder.with_name("aside")

    def on_step(self, event):
        if event.step == 2:
            self.folder.rename(self.aside)
        if event.step == 4:
            self.folder.symlink_to(self.aside.parent / "other")
        if event.step == 6:
            self.folder.unlink()
            self.aside.rename(self.folder)


@pytest.mark.long(quick=["options1"])
@pytest.mark.parametrize("options", [{}, {"checkpoint_mode": "per_stage"}])
def test_a_folder_that_is_moved_away_or_replaced_by_a_link_costs_checkpoints_and_no_step(options, tmp_path):
    strategy = "pipedream(2)" if options else "data(2)"
    (tmp_path / "other").mkdir()
    told = Moves(tmp_path / "a")
    settings = {"checkpoint_dir": tmp_path / "a", "save_every": 2, **options}
    state, _ = fit(strategy, epochs=2, callbacks=[told], fit_options=settings)
    assert equal_bits(state, fit(strategy, epochs=2)[0])
    failures = [event.reason for event in told.events if isinstance(event, CheckpointFailed)]
    assert [text.split("; nothing was saved: ")[1][:7] for text in failures] == ["rename ", "end one"]
    assert f"{tmp_path / 'a'} was removed or renamed while this run used it; nothing was saved" in failures[0]
    assert [event for event in told.events if not isinstance(event, CheckpointFailed)] == [2, 8]
    assert [path.name for path in sorted((tmp_path / "a").iterdir())] == ["step-00000002", "step-00000008"]
    assert not list((tmp_path / "other").iterdir())


def test_a_run_whose_last_checkpoint_fails_too_ends_with_an_error_and_keeps_the_last_good_one(tmp_path):
    with pytest.raises(cp.CheckpointError) as caught:
        fit_on(Disk(), tmp_path, {5: errno.ENOSPC})
    assert str(caught.value).startswith("the run has ended at step 8 without its last checkpoint: ")
    assert str(caught.value).endswith("of its earlier ones the newest is that of step 4, 2 more could not be saved")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000002", "step-00000004"]
    assert Checkpoint.open(tmp_path).step == 4


@pytest.mark.long
def test_a_save_that_takes_longer_than_ranks_wait_for_each_other_is_waited_for_and_said(tmp_path):
    with pytest.warns(RuntimeWarning, match=r"a checkpoint is still being written on rank.* after 0 s; training waits"):
        state, _ = fit_on(SlowDisk(), tmp_path, {}, timeout_s=0.03)
    assert equal_bits(state, fit("data(2)", epochs=2)[0])
    assert Checkpoint.open(tmp_path).step == 8


class Fills(FailsAt):
    """Fills a real disk after some steps, and frees it."""

    def __init__(self, folder):
        super().__init__(Disk(), {})
        self.filler = folder / "filler"

    def on_step(self, event):
        if event.step == 2:
            with self.filler.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))
        if event.step == 6:
            self.filler.unlink()


@pytest.fixture
def small_disk(tmp_path):
    """Yield a disk of half a megabyte."""
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(tmp_path)]
    if os.getuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root mounts disks, and not in every container")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_run_on_a_real_disk_that_fills_up_and_is_freed_ends_trained_and_saved(small_disk):
    told = Fills(small_disk)
    options = {"checkpoint_dir": small_disk / "a", "save_every": 2, "keep_last": 1}
    state, history = fit("data(2)", epochs=2, callbacks=[told], fit_options=options)
    assert [event.step if isinstance(event, CheckpointFailed) else event for event in told.events] == [2, 4, 6, 8]
    assert [isinstance(event, CheckpointFailed) for event in told.events] == [False, True, True, False]
    assert len(history.losses) == 8
    assert equal_bits(fit("data(2)", fit_options={"resume": small_disk / "a"}, epochs=2)[0], state)
