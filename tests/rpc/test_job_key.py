"""A job key comes from where only its owner can read, and is shown nowhere."""

import contextlib
import errno
import os
import tempfile
import threading
from pathlib import Path

import pytest

from counterpoint.errors import LaunchError
from counterpoint.rpc import job_key
from counterpoint.rpc.job_key import new_key, read_key, read_key_from, write_key
from tests.other_user import STRANGER, as_root, as_user


def test_a_key_that_was_written_is_read_from_its_file_and_from_a_descriptor(tmp_path):
    key, path = new_key(), tmp_path / "key"
    write_key(key, path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key(path).secret == read_key_from(os.open(path, os.O_RDONLY)).secret == key.secret


def test_a_key_that_others_may_read_is_refused(tmp_path):
    write_key(new_key(), tmp_path / "key")
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(LaunchError, match=r"may be read by others \(mode 640\).*chmod 600"):
        read_key(tmp_path / "key")


@as_root
@pytest.mark.parametrize(
    ("owner", "group", "mode", "text"),
    [
        (0, 1000, 0o440, ""),  # as Kubernetes mounts a secret for a pod with fsGroup 1000
        (1000, 1000, 0o600, ""),
        (1000, 1000, 0o440, r"may be read by others \(mode 440\)"),
        (0, 1000, 0o444, r"may be read by others \(mode 444\)"),
        (STRANGER, 1000, 0o440, f"belongs to user {STRANGER}, not 1000, who can join the job"),
    ],
)
def test_a_key_is_of_this_user_or_of_root_for_a_group_of_this_user(owner, group, mode, text):
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "key"
        Path(name).chmod(0o755)
        write_key(new_key(), path)
        os.chown(path, owner, group)
        path.chmod(mode)
        with as_user(1000), pytest.raises(LaunchError, match=text) if text else contextlib.nullcontext():
            read_key(path)


def test_a_key_is_never_written_over_another(tmp_path):
    write_key(new_key(), tmp_path / "key")
    with pytest.raises(LaunchError, match=r"cannot write a job key to .*key: file exists; give a new file's name"):
        write_key(new_key(), tmp_path / "key")


@pytest.mark.parametrize("text", ["", "ab" * 31, "ab" * 32 + "a", "xy" * 40, "ab" * 5000, "ab " * 40])
def test_what_is_no_key_is_refused_without_being_shown(tmp_path, text):
    (tmp_path / "key").write_text(text, encoding="ascii")
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(LaunchError, match=r"holds no job key; .* 64 at least") as caught:
        read_key(tmp_path / "key")
    assert not text or text not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(LaunchError, match=r"cannot read the job key in .*key: no such file or directory"):
        read_key(tmp_path / "key")


def test_a_pipe_that_nobody_writes_or_closes_is_given_up_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(job_key, "READ_S", 0.05)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(LaunchError, match=r"pipe was not written and closed within 0 s, so it holds no job key"):
        read_key(tmp_path / "pipe")
    reader, writer = os.pipe()
    os.write(writer, b"0f" * 32)
    with pytest.raises(LaunchError, match=rf"descriptor {reader} was not written and closed within"):
        read_key_from(reader)
    os.close(writer)


def test_a_key_is_read_from_a_pipe_that_is_written_slowly(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)

    def write():
        with (tmp_path / "pipe").open("wb", buffering=0) as pipe:
            for half in (b"0f" * 16, b"0f" * 16 + b"\n"):
                threading.Event().wait(0.02)
                pipe.write(half)

    writer = threading.Thread(target=write)
    writer.start()
    assert read_key(tmp_path / "pipe").secret == b"\x0f" * 32
    writer.join()


@pytest.mark.parametrize(("path", "kind"), [("/dev/zero", "a device"), ("/dev/tty0", "a device"), ("/", "a folder")])
def test_what_is_no_file_holds_no_key(path, kind):
    if not Path(path).exists():
        pytest.skip(f"there is no {path}")
    with pytest.raises(
        LaunchError, match=rf"{path} is {kind}, and holds no job key; give a file|cannot read the job key"
    ):
        read_key(Path(path))


@pytest.mark.parametrize("number", [-1, 2**40, 1_000_000])
def test_a_number_that_is_no_descriptor_is_named(number):
    with pytest.raises(LaunchError, match=rf"cannot read the job key from descriptor {number}: .*; open it before"):
        read_key_from(number)


def test_a_key_that_the_disk_does_not_take_is_not_left_half_written(tmp_path, monkeypatch):
    def fail(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(LaunchError, match=r"cannot write a job key to .*: no space left on device; give a new file's"):
        write_key(new_key(), tmp_path / "key")
    assert not list(tmp_path.iterdir())


def test_a_key_hides_in_text_and_cannot_be_pickled():
    key = new_key()
    assert key.secret.hex() not in f"{key} {key!r}"
    with pytest.raises(TypeError, match="not copied into files or messages"):
        key.__reduce__()
