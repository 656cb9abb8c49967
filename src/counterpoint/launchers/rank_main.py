"""Entry point of a rank: runs the user's script unchanged, and records the error that ends it."""

from __future__ import annotations

import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from counterpoint.errors import PeerError, StoppedBySignal, error_text
from counterpoint.launchers.environment import ERROR_FILE, EXITED_FILE
from counterpoint.launchers.exit_report import ErrorRecord
from counterpoint.launchers.rank_activity import register_stack_dump
from counterpoint.launchers.signals import ignore_stop_signals
from counterpoint.launchers.source_location import is_user_file, relative_path

#: Delay before an error about a lost peer is printed: within it a supervisor that knows the root cause ends this rank
#: and reports the root cause.
SECONDARY_DELAY_S = 0.5

#: Error texts of libraries for a lost peer; such an error is a consequence.
PEER_TEXTS = ("connection reset by peer", "connection closed by peer", "broken pipe", "connection refused")
_LAUNCHERS_PREFIX = str(Path(__file__).parent) + os.sep


def report_error(error: BaseException) -> None:
    """Write the error for the supervisor; without a supervisor, do nothing."""
    _write_record(make_error_record(error))


def report_exit(location: str) -> None:
    """Write for the supervisor that the script ends with exit code 0.

    Args:
        location: of the line that ends it; empty for the last one.
    """
    _write_record(ErrorRecord("", "", location, is_peer=False, time_s=time.monotonic()))


def answer_stack_requests() -> None:
    """From now on let the supervisor read where this rank is; without a supervisor, do nothing."""
    path = os.environ.get(ERROR_FILE)
    if path:
        register_stack_dump(Path(path))


def has_exited_rank() -> bool:
    """Return whether the supervisor has seen the end of a rank, so that no later rendezvous will be complete."""
    path = os.environ.get(ERROR_FILE)
    return path is not None and Path(path).with_name(EXITED_FILE).exists()


def _write_record(record: ErrorRecord) -> None:
    path = os.environ.get(ERROR_FILE)
    if path:
        record.write(Path(path))


def delay_secondary_error(error: BaseException) -> None:
    """Sleep briefly if the error is only about a lost peer and there is a supervisor."""
    if os.environ.get(ERROR_FILE) and is_peer_error(error):
        time.sleep(SECONDARY_DELAY_S)


def make_error_record(error: BaseException) -> ErrorRecord:
    """Return the supervisor's record of an error."""
    kind, message, notes = type(error).__name__, error_text(error), getattr(error, "__notes__", ())
    return ErrorRecord(
        kind,
        message,
        user_location(error),
        is_peer_error(error),
        time.monotonic(),
        tuple(map(str, notes)),
        error.number if isinstance(error, StoppedBySignal) else 0,
    )


def is_peer_error(error: BaseException | None) -> bool:
    """Return whether the error, or its cause, only says that another rank was lost."""
    if error is None:
        return False
    text = error_text(error).lower()
    network = isinstance(error, OSError | RuntimeError) and any(words in text for words in PEER_TEXTS)
    return isinstance(error, PeerError) or network or is_peer_error(error.__cause__)


def user_location(error: BaseException) -> str:
    """Return ``file.py:40``: the last line of the user's own code in the traceback."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{relative_path(error.filename)}:{error.lineno}"
    user_frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    return f"{relative_path(user_frames[-1].filename)}:{user_frames[-1].lineno}" if user_frames else ""


def run_script(argv: Sequence[str]) -> int:
    """Run a script or module as ``python argv`` would; return the exit code.

    Args:
        argv: a script, or ``-m`` and a module, and then its own arguments.
    """
    if argv[0] == "-m":
        sys.argv[:] = list(argv[1:])
        return run_with_error_report(lambda: runpy.run_module(argv[1], run_name="__main__", alter_sys=True))
    sys.argv[:] = list(argv)
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(argv[0]).resolve().parent)
    return run_with_error_report(lambda: runpy.run_path(argv[0], run_name="__main__"))


def run_with_error_report(body: Callable[[], object]) -> int:
    """Run the body; record how it ends, and print an error as Python does. Return the exit code."""
    answer_stack_requests()
    try:
        body()
    except KeyboardInterrupt:
        return 130
    except SystemExit as error:
        if error.code in {None, 0}:
            report_exit(user_location(error))
        else:
            if isinstance(error, StoppedBySignal):
                ignore_stop_signals()
            report_error(error)
        raise
    except BaseException as error:  # noqa: BLE001 - any error ends this rank, and is reported
        report_error(error)
        delay_secondary_error(error)
        shown = error.with_traceback(_user_traceback(error.__traceback__))
        sys.excepthook(type(shown), shown, shown.__traceback__)
        return 1
    report_exit("")
    return 0


def _user_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame of the user's code, as without a launcher; None if there is none."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((_LAUNCHERS_PREFIX, "<frozen")):
        trace = trace.tb_next
    return trace
