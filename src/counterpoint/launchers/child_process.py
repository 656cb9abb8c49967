"""Processes that this one starts and supervises: each has a session of its own, and none outlives this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from counterpoint.world.process_stat import PROC, STOPPED_BY, read_process_stat

GRACE_S = 2.0  # from SIGTERM to SIGKILL
POLL_S = 0.01
EXEC_WRAPPER = Path(__file__).with_name("exec_wrapper.py")

#: Defaults in the environment of a process. torch's own warnings about lost connections would precede the report, which
#: names the rank that was lost first.
DEFAULT_VARIABLES = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


class ChildProcess:
    """A process in a session of its own; the kernel kills it if this process ends. Any thread may call its methods.

    Args:
        argv: its command.
        variables: its environment.
        cpus: hyperthreads that it is bound to; all if empty.
        stdout: as for ``subprocess.Popen``, by default inherited.
        stderr: likewise.
        inherited_fd: a file descriptor that it inherits, if any.
    """

    def __init__(
        self,
        argv: Sequence[str],
        variables: Mapping[str, str],
        *,
        cpus: Sequence[int] = (),
        stdout: int | None = None,
        stderr: int | IO[bytes] | None = None,
        inherited_fd: int | None = None,
    ) -> None:
        wrapper = [sys.executable, "-I", "-S", str(EXEC_WRAPPER), str(os.getpid()), ",".join(map(str, cpus))]
        self._lock = threading.Lock()
        self._popen = subprocess.Popen(
            [*wrapper, *argv],
            env={**DEFAULT_VARIABLES, **variables},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            pass_fds=() if inherited_fd is None else (inherited_fd,),
        )
        self.pid = self._popen.pid
        self.stdout, self.stderr = self._popen.stdout, self._popen.stderr

    def send_signal(self, number: int, *, to_session: bool = True) -> None:
        """Send a signal to the process, if it has not ended, and to all that it has started in its session.

        Args:
            number: of the signal.
            to_session: whether all that it has started in its session get it, too.
        """
        with self._lock:
            if self._popen.returncode is None:  # not reaped: its ids cannot be those of others
                if to_session:
                    self._kill_group(number)
                else:
                    os.kill(self.pid, number)

    def stopped_by(self) -> str:
        """Return the signal that has stopped the process, or that a debugger has; empty if nothing has."""
        with self._lock:
            found = None if self._popen.returncode is not None else read_process_stat(PROC / str(self.pid))
            if found is None or found.letter not in STOPPED_BY:
                return ""
            event = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
            return STOPPED_BY[found.letter] if event is None else signal.Signals(event.si_status).name

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal that ended the process; None while it runs.

        Once it has ended, what it had started in its session is killed.
        """
        with self._lock:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if self._popen.returncode is None and os.waitid(os.P_PID, self.pid, options) is not None:
                self._kill_group(signal.SIGKILL)
                self._popen.wait()
            return self._popen.returncode

    def wait(self) -> int:
        """Return what :meth:`poll` returns once the process has ended."""
        with suppress(ChildProcessError):  # another thread has called poll
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        code = self.poll()
        assert code is not None, "it has ended"
        return code

    def _kill_group(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def stop_processes(processes: Sequence[ChildProcess]) -> None:
    """End the processes, and wait for them: SIGTERM, and after the grace period SIGKILL."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    end_s = time.monotonic() + GRACE_S
    while any(process.poll() is None for process in processes) and time.monotonic() < end_s:
        time.sleep(POLL_S)
    kill_processes(processes)


def kill_processes(processes: Sequence[ChildProcess]) -> None:
    """Kill the processes, and wait for them."""
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.wait()
