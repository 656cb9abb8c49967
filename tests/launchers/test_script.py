"""A script that a command runs in its own process sees what it would see under ``python script``."""

import sys
from pathlib import Path

import pytest

import counterpoint as cp
from counterpoint.launchers.script import ScriptStop, run_script

SEEN = """
import os, sys
from neighbour_of_seen import VALUE
if __name__ == "__main__":
    print(VALUE, sys.argv[1:], os.getcwd())
"""


def write(folder, text, name="script.py"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_script_has_its_arguments_its_neighbours_and_the_current_folder(tmp_path, capsys):
    write(tmp_path, "VALUE = 7", "neighbour_of_seen.py")
    argv, path = list(sys.argv), list(sys.path)
    assert not run_script(write(tmp_path, SEEN), ["--epochs", "3"])
    assert capsys.readouterr() == ("", f"7 ['--epochs', '3'] {Path.cwd()}\n")
    assert (sys.argv, sys.path) == (argv, path)


def test_a_script_can_be_stopped_from_within(tmp_path):
    text = "from counterpoint.launchers.script import ScriptStop\ntry:\n    raise ScriptStop\nexcept Exception:\n    pass\n"
    assert run_script(write(tmp_path, text), [])
    assert not issubclass(ScriptStop, Exception)


def test_an_error_is_shown_in_the_lines_of_the_script(tmp_path):
    path = write(tmp_path, "import counterpoint as cp\n\ndef build():\n    cp.Plan.parse('date(2)')\n\nbuild()\n")
    with pytest.raises(cp.LaunchError) as raised:
        run_script(path, [])
    lines = str(raised.value).splitlines()
    assert lines[0] == f"{path} ended with an error before it trained"
    assert f'  File "{path}", line 4, in build' in lines
    assert not [line for line in lines if "src/counterpoint" in line or "runpy" in line]
    assert lines[-1].startswith("counterpoint.errors.PlanError: there is no strategy 'date'")


def test_wrong_arguments_are_the_scripts_own_message(tmp_path, capsys):
    path = write(tmp_path, "import argparse\nargparse.ArgumentParser().parse_args()\n")
    with pytest.raises(cp.LaunchError, match="exited with 2 before it trained; its own arguments follow --"):
        run_script(path, ["--none"])
    assert "unrecognized arguments: --none" in capsys.readouterr().err


def test_a_script_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(cp.LaunchError, match=r"there is no file .*train\.py; give the path of a Python script"):
        run_script(tmp_path / "train.py", [])


def test_a_script_may_not_start_ranks(tmp_path):
    with pytest.raises(cp.LaunchError, match=r"script\.py starts other processes with cp\.launch, but this command"):
        run_script(write(tmp_path, "import counterpoint as cp\ncp.launch(print, ranks=2)\n"), [])
