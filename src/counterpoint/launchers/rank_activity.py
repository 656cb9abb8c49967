"""What a running rank does, for the report of a run in which others waited for it in vain.

The launcher asks by a signal. faulthandler answers in its handler, so that a rank also answers from native code::

    launcher                                    rank
    read_activity --- STACK_SIGNAL --------->   faulthandler writes the stack of the main thread
                  <-- rank-1.stack ---------
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from counterpoint.launchers.child_process import ChildProcess
from counterpoint.launchers.source_location import PACKAGE, is_user_file, relative_path
from counterpoint.world.process_stat import PROC

STACK_SIGNAL: Final = signal.SIGRTMAX - 1  # not SIGUSR1 or SIGUSR2, which schedulers and users send
STACK_WAIT_S = 0.5
PAUSE_S = 0.02
MAX_FRAMES = 5
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
NOTICE_S = 10.0
FABRIC_PREFIX = str(PACKAGE / "fabric") + os.sep


@dataclass(frozen=True, slots=True)
class RankActivity:
    """What a rank did when the launcher stopped it because of others that had waited for it.

    Args:
        stopped_by: the signal that had stopped it before, or a debugger; empty if it ran.
        stopped_s: for how long it had been stopped.
        location: ``read at job.py:40``, where the user's code was; empty if that is unknown.
        frames: innermost ones of its stack, innermost first.
        is_waiting: whether it waited for other ranks itself.
    """

    stopped_by: str = ""
    stopped_s: float = 0.0
    location: str = ""
    frames: tuple[str, ...] = ()
    is_waiting: bool = False


def register_stack_dump(error_file: Path) -> None:
    """Let this process write the stack of its main thread, next to the error file, when it gets STACK_SIGNAL."""
    descriptor = os.open(_stack_file(error_file), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)  # open to the end
    faulthandler.register(STACK_SIGNAL, descriptor, all_threads=False)


def read_activity(process: ChildProcess, error_file: Path) -> RankActivity:
    """Ask a process that runs for its stack, and return what it does; nothing is known of one that does not answer."""
    text, end_s = "", time.monotonic() + STACK_WAIT_S
    if _catches_signal(process.pid, STACK_SIGNAL):
        process.send_signal(STACK_SIGNAL, to_session=False)
        while time.monotonic() < end_s:
            time.sleep(PAUSE_S)
            before, text = text, _stack_file(error_file).read_text(encoding="utf-8", errors="replace")
            if text and text == before:  # it is written in small parts
                break
    return parse_stack(text)


def parse_stack(text: str) -> RankActivity:
    r"""Return what a process does, from the stack that faulthandler has written.

    Example:
        >>> parse_stack('Current thread 0x1 (most recent call first):\n  File "job.py", line 7 in read').location
        'read at job.py:7'
    """
    frames = [match.groups() for match in FRAME.finditer(text)]
    lines = [f"{function} at {relative_path(file)}:{line}" for file, line, function in frames]
    users = [line for line, (file, _, _) in zip(lines, frames, strict=True) if is_user_file(file)]
    return RankActivity(
        location=next(iter([*users, *lines]), ""),
        frames=tuple(lines[:MAX_FRAMES]),
        is_waiting=any(file.startswith(FABRIC_PREFIX) for file, _, _ in frames),
    )


@dataclass(slots=True)
class StopTimer:
    """How long a process has been stopped, according to repeated observations.

    Attributes:
        stopped_by: what has stopped it, in the last observation; empty if it ran.
        since_s: when that was first observed.
        is_reported: whether the user has been warned.
    """

    stopped_by: str = ""
    since_s: float = 0.0
    is_reported: bool = False

    def observe(self, stopped_by: str, now_s: float) -> bool:
        """Record an observation; return whether the process has been stopped for so long that the user is to know."""
        if stopped_by != self.stopped_by:
            self.stopped_by, self.since_s, self.is_reported = stopped_by, now_s, False
        if not stopped_by or self.is_reported or now_s - self.since_s < NOTICE_S:
            return False
        self.is_reported = True
        return True


def _stack_file(error_file: Path) -> Path:
    return error_file.with_suffix(".stack")


def _catches_signal(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, which would end it otherwise."""
    try:
        status = (PROC / str(pid) / "status").read_text()
    except OSError:
        return False
    mask = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)
