"""A job key comes from where only its owner can read, and is shown nowhere."""

import os

import pytest

from counterpoint.errors import LaunchError
from counterpoint.rpc.job_key import new_key, read_key, read_key_from, write_key


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


def test_a_key_hides_in_text_and_cannot_be_pickled():
    key = new_key()
    assert key.secret.hex() not in f"{key} {key!r}"
    with pytest.raises(TypeError, match="not copied into files or messages"):
        key.__reduce__()
