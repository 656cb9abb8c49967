"""What runs inside a rank: the user's script, unchanged, and one record of the error that ended it."""

from __future__ import annotations

import os
import runpy
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from counterpoint.errors import PeerError
from counterpoint.launchers.environment import ERROR_FILE
from counterpoint.launchers.exit_report import ErrorRecord

#: How long an error that only blames another rank is not shown: a supervisor ends this rank in the meantime, if it
#: finds the cause, and then tells that first.
SECONDARY_DELAY_S = 0.5

#: What libraries say when a peer went away; such an error is a consequence.
PEER_TEXTS = ("connection reset by peer", "connection closed by peer", "broken pipe", "connection refused")
_LAUNCHERS_PREFIX = str(Path(__file__).parent) + os.sep
_LIBRARY_PREFIXES = (
    str(Path(__file__).parents[1]) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    sysconfig.get_path("purelib") + os.sep,
    sysconfig.get_path("platlib") + os.sep,
    "<frozen",
)


def report_error(error: BaseException) -> None:
    """The supervisor will know why this rank ends; where none watches, nothing happens."""
    path = os.environ.get(ERROR_FILE)
    if path:
        make_error_record(error).write(Path(path))


def delay_secondary_error(error: BaseException) -> None:
    """An error that only blames another rank has waited for a supervisor that knows better; any other has not."""
    if os.environ.get(ERROR_FILE) and is_peer_error(error):
        time.sleep(SECONDARY_DELAY_S)


def make_error_record(error: BaseException) -> ErrorRecord:
    """Return what a supervisor needs to know about an error."""
    kind, message = type(error).__name__, str(error)
    return ErrorRecord(kind, message, user_location(error), is_peer_error(error), time.monotonic())


def is_peer_error(error: BaseException | None) -> bool:
    """Return whether the error, or what caused it, only says that another rank went away."""
    if error is None:
        return False
    text = str(error).lower()
    network = isinstance(error, OSError | RuntimeError) and any(words in text for words in PEER_TEXTS)
    return isinstance(error, PeerError) or network or is_peer_error(error.__cause__)


def user_location(error: BaseException) -> str:
    """Return ``file.py:40``: the last line of the user's own code that the error passed through."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_relative_path(error.filename)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARY_PREFIXES)]
    return f"{_relative_path(own[-1].filename)}:{own[-1].lineno}" if own else ""


def run_script(argv: Sequence[str]) -> int:
    """The script has run as ``python argv`` would run it; the exit code is returned.

    Args:
        argv: a script or ``-m`` and a module, and then its own arguments.
    """
    if argv[0] == "-m":
        sys.argv[:] = list(argv[1:])
        return run_with_error_report(lambda: runpy.run_module(argv[1], run_name="__main__", alter_sys=True))
    sys.argv[:] = list(argv)
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(argv[0]).resolve().parent)
    return run_with_error_report(lambda: runpy.run_path(argv[0], run_name="__main__"))


def run_with_error_report(body: Callable[[], object]) -> int:
    """The body has run; an error was written down and shown as Python shows it. Return the exit code."""
    try:
        body()
    except KeyboardInterrupt:
        return 130
    except SystemExit as error:
        if error.code not in {None, 0}:
            report_error(error)
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, it ends this rank and is told
        report_error(error)
        delay_secondary_error(error)
        shown = error.with_traceback(_user_traceback(error.__traceback__))
        sys.excepthook(type(shown), shown, shown.__traceback__)
        return 1
    return 0


def _user_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the user's first own frame on, as without a launcher; None where there is none."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((_LAUNCHERS_PREFIX, "<frozen")):
        trace = trace.tb_next
    return trace


def _relative_path(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
