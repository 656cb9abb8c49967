"""Run a user's script in this process, for commands that look at what it trains instead of training it."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from pathlib import Path

from counterpoint.errors import LaunchError

_RUNNING_SCRIPT: ContextVar[Path | None] = ContextVar("_RUNNING_SCRIPT", default=None)
"""The script that a command runs in this process."""


class ScriptStop(BaseException):
    """Ends a script from within one of its calls, as KeyboardInterrupt would."""


def is_script(name: str) -> bool:
    """Return whether a command's argument names a Python file."""
    return name.endswith(".py")


def require_no_running_script(call: str) -> None:
    """Check that no command runs the script that calls this in its own process.

    Raises:
        LaunchError: one does.
    """
    script = _RUNNING_SCRIPT.get()
    if script is not None:
        raise LaunchError(
            f"{script.name} starts other processes with {call}, but this command looks at what trains in its own "
            "process, and nothing would be seen; call the function that trains instead, for instance when an argument "
            "of the script asks for it"
        )


def run_script(script: Path, arguments: Sequence[str]) -> bool:
    """Run a script as ``python script arguments`` would, until it ends or raises :class:`ScriptStop`.

    The folder stays the current one, ``sys.argv`` and the first folder of ``sys.path`` are the script's own, and what
    it prints goes to standard error.

    Returns:
        Whether it was stopped.

    Raises:
        LaunchError: there is no such file, or the script ended with an error, whose lines the message has.
    """
    if not script.is_file():
        raise LaunchError(f"there is no file {script}; give the path of a Python script")
    try:
        with script_environment(script, arguments), redirect_stdout(sys.stderr):
            runpy.run_path(str(script), run_name="__main__")
    except ScriptStop:
        return True
    except SystemExit as end:
        if end.code not in {None, 0}:
            raise LaunchError(f"{script} exited with {end.code!r} before it trained; {ARGUMENTS_HINT}") from None
    except Exception as error:
        raise LaunchError(f"{script} ended with an error before it trained\n{format_script_error(error)}") from error
    return False


ARGUMENTS_HINT = "its own arguments follow --, as in SCRIPT.py --strategies 'data(2)' -- --epochs 3"


@contextmanager
def script_environment(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Set what Python sets for a script inside, and restore it afterwards."""
    token = _RUNNING_SCRIPT.set(script)
    argv, path = list(sys.argv), list(sys.path)
    sys.argv[:] = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path
        _RUNNING_SCRIPT.reset(token)


def format_script_error(error: Exception) -> str:
    """Return the traceback of an error in the lines of the script and of what it imports, without this package's."""
    own = str(Path(__file__).parents[1])
    summary = traceback.TracebackException.from_exception(error)
    summary.stack = traceback.StackSummary.from_list(
        [frame for frame in summary.stack if not frame.filename.startswith((own, "<frozen runpy>"))]
    )
    return "".join(summary.format(chain=False)).rstrip()
