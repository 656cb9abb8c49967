"""Run as a script in front of every rank: ``leash.py PARENT_PID COMMAND…`` becomes COMMAND, tied to its parent.

When the parent dies, however it dies, the kernel kills the command. It is a script of its own, not code between
fork and exec, because after the fork of a process with threads no Python runs safely.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """This process is the command; it only returns by ending."""
    parent, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(parent):  # it died before the line above; nobody is left to tell
        sys.exit(128 + signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
