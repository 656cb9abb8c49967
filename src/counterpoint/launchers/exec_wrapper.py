"""Script that binds its process to cores, ties it to its parent's life, and becomes a rank's command (execvp).

``exec_wrapper.py PARENT_PID CPUS COMMAND…``, where CPUS is a list of hyperthreads as ``0,2``, or empty for all. When
the parent ends, however it ends, the kernel kills the command (PR_SET_PDEATHSIG). It is a script, and not code between
fork and exec, because after a fork of a process with threads Python code is not safe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Replace this process with the command."""
    parent, cpus, *command = arguments
    if cpus:  # before its first thread starts and its first page is allocated, so that all are placed there
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(parent):  # the parent died before the line above
        sys.exit(128 + signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
