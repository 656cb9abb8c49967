"""The command: quick, lazy, and readable when something fails."""

import errno
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from counterpoint.cli.error_handling import with_error_handling
from counterpoint.cli.main import COMMANDS, RENAMED_FLAGS, build_app
from counterpoint.errors import PlanError

LOADED = """
import sys
from counterpoint.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    print(end.code, *(name for name in ("torch", "numpy", "pydantic", "rich") if name in sys.modules))
"""
HOW_LONG = """
import sys, time
from counterpoint.cli.main import app
try:
    app(["--help"])
except SystemExit:
    print(time.process_time())
"""


def python(code, *arguments):
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True).stdout


def call(command, *words):
    """The result of a command line whose command is the given function."""
    typed = build_app(["nothing"])
    typed.command("call")(with_error_handling(command))
    return CliRunner().invoke(typed, ["call", *words])


def failing():
    raise PlanError("data(2) needs 2 ranks, but there are 3\ngive another number")


def interrupted():
    raise KeyboardInterrupt


def test_help_lists_every_command_and_loads_nothing_heavy():
    lines = python(LOADED, "--help").splitlines()
    assert lines[-1] == "0", "neither torch nor anything of ours that takes time"
    assert all(any(line.split()[:1] == [name] for line in lines) for name in COMMANDS)


def test_help_answers_in_three_tenths_of_a_second():
    """In seconds of its process from its first, not of the clock: a busy machine cannot fail it."""
    assert min(float(python(HOW_LONG).splitlines()[-1]) for _ in range(2)) < 0.3


@pytest.mark.long(quick=["key"])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_in_the_list_exists_and_its_help_does_not_load_torch(name):
    assert "torch" not in python(LOADED, name, "--help").splitlines()[-1].split()


def test_the_command_without_arguments_shows_the_list():
    result = CliRunner().invoke(build_app([]), [])
    assert "Commands:" in result.output


def test_an_unknown_command_is_wrong_usage_and_the_nearest_is_named():
    result = CliRunner().invoke(build_app(["trian"]), ["trian"])
    assert result.exit_code == 2
    assert "train" in result.output


def test_an_error_is_one_block_without_traceback():
    result = call(failing)
    assert result.exit_code == 1
    assert result.output == "PlanError: data(2) needs 2 ranks, but there are 3\n  give another number\n"


def test_an_error_shows_its_traceback_when_asked():
    result = call(failing, "--traceback")
    assert result.exit_code == 1
    assert isinstance(result.exception, PlanError)


def test_ctrl_c_ends_with_130():
    result = call(interrupted)
    assert (result.exit_code, result.output) == (130, "stopped by Ctrl-C\n")


def test_a_wrong_option_is_wrong_usage():
    assert CliRunner().invoke(build_app(["run"]), ["run", "--rnaks", "2", "x.py"]).exit_code == 2


@pytest.mark.parametrize(
    ("command", "old"),
    [("profile", "--again"), ("serve", "--cut"), ("run", "--deadline"), ("launch", "--deadline"), ("plan", "--timing")],
)
def test_an_option_with_an_earlier_name_is_refused_with_its_present_one(command, old):
    result = CliRunner().invoke(build_app([command]), [command, old])
    assert result.exit_code == 2
    assert f"No such option: {old}; {old} is now called {RENAMED_FLAGS[old]}" in result.output


def test_an_option_of_another_command_has_no_present_name():
    assert "now called" not in CliRunner().invoke(build_app(["show"]), ["show", "--again"]).output


def test_an_error_of_the_system_is_one_line_and_a_traceback_only_if_it_is_asked_for():
    def fills():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a\x1b]0;title\x07")

    result = call(fills)
    assert result.exit_code == 1
    assert result.output == (
        "the system refused what the command needs: a\\x1b]0;title\\x07: No space left on device\n"
    )
    assert isinstance(call(fills, "--traceback").exception, OSError)
