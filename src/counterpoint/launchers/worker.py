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
from counterpoint.launchers.ending import ErrorRecord
from counterpoint.launchers.environment import ERROR_FILE

#: How long an error that only blames another rank is not shown: a supervisor ends this rank in the meantime, if it
#: finds the cause, and then tells that first.
HELD_BACK_S = 0.5

#: What libraries say when a peer went away; such an error is a consequence.
PEER_TEXTS = ("connection reset by peer", "connection closed by peer", "broken pipe", "connection refused")
_OURS = str(Path(__file__).parent) + os.sep
_NOT_THE_USERS = (
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
        record_of(error).write(Path(path))


def let_the_cause_come_first(error: BaseException) -> None:
    """An error that only blames another rank has waited for a supervisor that knows better; any other has not."""
    if os.environ.get(ERROR_FILE) and blames_a_peer(error):
        time.sleep(HELD_BACK_S)


def record_of(error: BaseException) -> ErrorRecord:
    """Return what a supervisor needs to know about an error."""
    kind, message = type(error).__name__, str(error)
    return ErrorRecord(kind, message, place_of(error), blames_a_peer(error), time.monotonic())


def blames_a_peer(error: BaseException | None) -> bool:
    """Return whether the error, or what caused it, only says that another rank went away."""
    if error is None:
        return False
    text = str(error).lower()
    network = isinstance(error, OSError | RuntimeError) and any(words in text for words in PEER_TEXTS)
    return isinstance(error, PeerError) or network or blames_a_peer(error.__cause__)


def place_of(error: BaseException) -> str:
    """Return ``file.py:40``: the last line of the user's own code that the error passed through."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    return f"{_short(own[-1].filename)}:{own[-1].lineno}" if own else ""


def worker_main(argv: Sequence[str]) -> int:
    """The script has run as ``python argv`` would run it; the exit code is returned.

    Args:
        argv: a script or ``-m`` and a module, and then its own arguments.
    """
    if argv[0] == "-m":
        sys.argv[:] = list(argv[1:])
        return run_reported(lambda: runpy.run_module(argv[1], run_name="__main__", alter_sys=True))
    sys.argv[:] = list(argv)
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(argv[0]).resolve().parent)
    return run_reported(lambda: runpy.run_path(argv[0], run_name="__main__"))


def run_reported(body: Callable[[], object]) -> int:
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
        let_the_cause_come_first(error)
        shown = error.with_traceback(_users_part(error.__traceback__))
        sys.excepthook(type(shown), shown, shown.__traceback__)
        return 1
    return 0


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the user's first own frame on, as without a launcher; None where there is none."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((_OURS, "<frozen")):
        trace = trace.tb_next
    return trace


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
