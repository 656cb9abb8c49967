"""Run as a script in front of every rank: it becomes the rank's command, tied to its parent and bound to its cores.

``exec_wrapper.py PARENT_PID CPUS COMMAND…``, where CPUS is a list of hyperthreads as ``0,2``, or empty for all.
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
    parent, cpus, *command = arguments
    if cpus:  # before its first thread starts and its first page is touched, so that all of them are there
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
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
