"""A script runs in a rank as `python script.py` would run it."""

import json
import os
import sys
from pathlib import Path

import pytest

from counterpoint.errors import PeerError
from counterpoint.launchers import report_error, run_command, script_command
from counterpoint.launchers.exit_report import ErrorRecord
from counterpoint.launchers.rank_main import is_peer_error, user_location
from tests.launchers.ranks import run, script

ASK = """
import json
print(json.dumps([sys.argv, sys.path[0], __name__, __file__, sys.modules["__main__"].__file__]))
"""


@pytest.mark.process
def test_a_script_sees_what_python_shows_it(tmp_path):
    path, lines = script(tmp_path, ASK), []
    run_command([*script_command(path), "--lr", "3"], 1, on_line=lambda line: lines.append(line.text))
    run_command([sys.executable, str(path), "--lr", "3"], 1, on_line=lambda line: lines.append(line.text))
    assert lines[0] == lines[1]
    assert lines[0].startswith(f'[["{path}", "--lr", "3"], "{tmp_path}", "__main__"')


@pytest.mark.process
def test_a_script_imports_modules_of_its_folder_and_a_module_runs_by_name(tmp_path):
    (tmp_path / "beside.py").write_text("answer = 42\n")
    assert run(tmp_path, "import beside; print(beside.answer)", 1)[1] == [(0, "out", "42")]
    lines = []
    command = [sys.executable, "-m", "counterpoint.launchers", "-m", "this", "x"]
    assert run_command(command, 1, on_line=lambda line: lines.append(line.text)).exit_code == 0
    assert lines[0] == "The Zen of Python, by Tim Peters"


@pytest.mark.process
def test_a_syntax_error_is_reported_with_its_location(tmp_path):
    result, lines = run(tmp_path, "if rank ==", 1)
    assert result.report.startswith("rank 0 failed: SyntaxError: invalid syntax")
    assert result.report.splitlines()[0].endswith(f" at {tmp_path}/job.py:3")
    assert not [text for _, _, text in lines if "runpy" in text or "launchers" in text]


@pytest.mark.process
def test_an_interrupted_rank_is_quiet(tmp_path):
    result, lines = run(tmp_path, "raise KeyboardInterrupt", 1)
    assert lines == []
    assert result.exit_code == 130


def test_the_place_of_an_error_is_the_users_last_line_not_a_librarys():
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    own = __file__.removeprefix(f"{Path.cwd()}/")
    assert user_location(caught.value).startswith(f"{own}:")


def test_errors_that_blame_a_peer_are_known_by_type_text_and_cause():
    wrapped = RuntimeError("step failed")
    wrapped.__cause__ = PeerError("rank 3 is gone")
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:34")
    assert all(
        is_peer_error(error) for error in (PeerError("x"), ConnectionResetError("Connection reset by peer"), gloo)
    )
    assert is_peer_error(wrapped)
    assert not is_peer_error(ValueError("connection reset by peer"))
    assert not is_peer_error(FileNotFoundError("data.csv"))


def test_an_error_is_written_down_where_a_supervisor_asked_for_it(tmp_path, monkeypatch):
    path = tmp_path / "rank-0.json"
    monkeypatch.setenv("COUNTERPOINT_ERROR_FILE", str(path))
    report_error(PeerError("rank 3 is gone"))
    record = ErrorRecord.read(path)
    assert record is not None
    assert (record.kind, record.message, record.is_peer) == ("PeerError", "rank 3 is gone", True)
    monkeypatch.delenv("COUNTERPOINT_ERROR_FILE")
    report_error(ValueError("nobody watches"))
    assert [file.name for file in tmp_path.iterdir()] == ["rank-0.json"]


class MuteError(Exception):
    """Has a text that cannot be made, a long name, and notes that are not texts."""

    def __str__(self):
        raise RuntimeError("no text")


MuteError.__name__ = "Mute" * 100_000


def test_an_error_that_cannot_be_written_as_it_is_is_written_all_the_same(tmp_path, monkeypatch):
    """Its rank was said to have ended with an exit code, and who had waited for it was blamed."""
    mute, foreign = MuteError(), FileNotFoundError(os.fsdecode(b"no file x\xff"))
    mute.__notes__ = [1, None]  # type: ignore[list-item]  # what Python does not check
    for number, (error, kind, message, notes) in enumerate((
        (mute, "Mute" * 1000, "its text could not be made: RuntimeError in __str__", ("1", "None")),
        (foreign, "FileNotFoundError", "no file x\\udcff", ()),
    )):  # fmt: skip
        monkeypatch.setenv("COUNTERPOINT_ERROR_FILE", str(tmp_path / f"{number}.json"))
        report_error(error)
        record = ErrorRecord.read(tmp_path / f"{number}.json")
        assert record is not None
        assert (record.kind, record.message, record.notes) == (kind, message, notes)
