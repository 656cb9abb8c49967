"""A file is written whole or not at all, never through a link that somebody has put there, and known early to be writable."""

import errno
import os
import warnings
from pathlib import Path

import pytest

from counterpoint.compat.horovod.timeline import HorovodTimeline
from counterpoint.errors import PlanError
from counterpoint.file_writer import append_whole, replace_file, require_writable, write_output
from tests.other_user import STRANGER, as_root, as_user


class FullDisk:
    """Takes some bytes of each write while it is full, as ``os`` does."""

    def __init__(self, monkeypatch, takes=3):
        self.takes, self.is_full, self.write = takes, True, os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, descriptor, data):
        if not self.is_full:
            return self.write(descriptor, data)
        if not self.takes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken, self.takes = self.takes, 0
        return self.write(descriptor, data[:taken])


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path):
    precious, path = tmp_path / "precious", tmp_path / "report.html"
    precious.write_text("years of work")
    path.symlink_to(precious)
    replace_file(path, "a page")
    assert (path.read_text(), path.is_symlink(), precious.read_text()) == ("a page", False, "years of work")


def test_a_full_disk_leaves_a_file_as_it_was_and_no_draft(tmp_path, monkeypatch):
    replace_file(tmp_path / "a", "before")
    FullDisk(monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "a", "after it")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "before")]


@pytest.mark.parametrize("mode", ["ab", "wb"])
def test_a_line_is_appended_whole_or_not_at_all_and_the_next_one_follows(tmp_path, monkeypatch, mode):
    with (tmp_path / "a").open(mode, buffering=0) as file:
        append_whole(file.fileno(), b"first\n")
        disk = FullDisk(monkeypatch)
        with pytest.raises(OSError, match="No space left"):
            append_whole(file.fileno(), b"second\n")
        disk.is_full = False
        append_whole(file.fileno(), b"third\n")
    assert (tmp_path / "a").read_bytes() == b"first\nthird\n"


def test_bytes_of_a_name_that_are_not_utf8_are_shown_and_stop_nothing(tmp_path):
    replace_file(tmp_path / "a", os.fsdecode(b"run-\xff"))
    assert (tmp_path / "a").read_text() == "run-\\udcff"


def make_places(folder):
    (folder / "pipe.json").unlink(missing_ok=True)
    os.mkfifo(folder / "pipe.json")
    return {
        folder / "no" / "a.svg": "there is no folder",
        folder: "Is a directory",
        folder / ("a" * 300): "File name too long",
        folder / "a\0b": "its name has a null byte",
    }


def test_a_place_that_cannot_be_written_is_named_before_and_after(tmp_path):
    for path, reason in make_places(tmp_path).items():
        with pytest.raises(PlanError, match=reason):
            require_writable(path)
        with pytest.raises(PlanError, match=r"cannot be written: .*; give another file"):
            write_output(path, "text")
    with pytest.raises(PlanError, match=r"/dev/full cannot be written: No space left on device; give another file"):
        write_output(Path("/dev/full"), "text")
    with pytest.raises(PlanError, match="No such device or address"):  # a pipe that nobody reads does not block
        write_output(tmp_path / "pipe.json", "text")
    require_writable(None)
    require_writable(tmp_path / "new.json")
    write_output(tmp_path / "new.json", "text")
    write_output(tmp_path / "new.json", "new")
    assert (tmp_path / "new.json").read_text() == "new"


@as_root
def test_a_folder_of_another_user_is_refused_before_anything_is_computed(tmp_path):
    tmp_path.chmod(0o755)
    with as_user(STRANGER), pytest.raises(PlanError, match="cannot be written: Permission denied"):
        require_writable(tmp_path / "a.json")


def test_a_timeline_that_the_disk_does_not_take_ends_and_stops_nothing(tmp_path):
    with pytest.raises(PlanError, match="Is a directory; give another file"):
        HorovodTimeline(tmp_path, 0)
    with pytest.warns(RuntimeWarning, match=r"/dev/full ends here: No space left on device; training continues"):
        timeline = HorovodTimeline("/dev/full", 0)
    with warnings.catch_warnings(action="error"):
        timeline.record("loss", "ALLREDUCE", 0.0)
        timeline.close()
