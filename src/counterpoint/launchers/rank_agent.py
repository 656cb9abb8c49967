"""One rank's place on another host: an agent there starts the rank's process, waits for it, and tells how it ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from counterpoint.launchers.environment import ERROR_FILE, STORE_FD, TIMEOUT_S, RankEnvironment, rank_variables
from counterpoint.launchers.exit_report import ErrorRecord, RankExit
from counterpoint.launchers.local import DEFAULT_VARIABLES, EXEC_WRAPPER, GRACE_S
from counterpoint.launchers.ports import LOOPBACK, reserve_port
from counterpoint.launchers.variables import THREADS_VARIABLE


class RankExitInfo(TypedDict):
    """How a rank ended, as JSON; times are of that host's clock.

    Attributes:
        pid: its process.
        returncode: exit code, or minus the signal that killed it.
        seconds: how long it ran.
        error: what it wrote down, with ``ago_s`` for how long before its end; None if nothing.
    """

    pid: int
    returncode: int
    seconds: float
    error: dict[str, str | float | bool] | None


class RankAgent:
    """A rank's place; its methods may be called from several threads, `stop` while `run` waits."""

    def __init__(self) -> None:
        self._meeting: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def reserve(self, host: str | None = None) -> tuple[str, int]:
        """Return this host's address, as others reach it, and a port that is kept for rank 0, which is started here.

        Args:
            host: the address, where it is known.
        """
        host = host or outbound_address()
        self._meeting = reserve_port(None, host)
        return host, int(self._meeting.getsockname()[1])

    def run(
        self, argv: Sequence[str], environment: RankEnvironment, extra_variables: Mapping[str, str]
    ) -> RankExitInfo:
        """The rank has run here, tied to the life of this process.

        Args:
            argv: its command; ``python`` is the one that runs here.
            found: which rank it is.
            more: variables, beside those that say so.
        """
        words = [sys.executable if argv[0] == "python" else argv[0], *argv[1:]]
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="counterpoint-") as folder:
            file = Path(folder) / "error.json"
            self._child = self._start(
                words, replace(environment, store_fd=self._listener()), {**extra_variables, ERROR_FILE: str(file)}
            )
            if self._meeting is not None:
                self._meeting.close()  # the rank has it now
            if self._is_stopped:
                self.stop()
            code = self._child.wait()
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)
            return RankExitInfo(
                pid=self._child.pid, returncode=code, seconds=time.monotonic() - began, error=_read_error(file)
            )

    def stop(self) -> None:
        """The rank has been asked to end, and is killed if it does not within its grace."""
        self._is_stopped = True
        child = self._child
        if child is not None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(GRACE_S)
                    return

    def _listener(self) -> int | None:
        return None if self._meeting is None else self._meeting.fileno()

    def _start(
        self, command: Sequence[str], environment: RankEnvironment, extra_variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        inherited = {name: value for name, value in os.environ.items() if name not in {STORE_FD, TIMEOUT_S}}
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(EXEC_WRAPPER), str(os.getpid()), "", *command],
            env={**DEFAULT_VARIABLES, **inherited, **rank_variables(environment), **extra_variables},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=() if environment.store_fd is None else (environment.store_fd,),
        )


def outbound_address() -> str:
    """Return the address by which this host goes out; the loopback where it has no way out.

    No message is sent: the kernel only chooses a route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])


def to_rank_exit(rank: int, info: RankExitInfo, now_s: float, stopped_s: float | None) -> RankExit:
    """Return how a rank ended, by the clock of whoever watches.

    Args:
        rank: which.
        ended: as its seat tells.
        now_s: the watcher's clock.
        stopped_s: when the watcher asked it to end, if it did.
    """
    error, told = None, info["error"]
    if told is not None:
        kind, message, place = str(told["kind"]), str(told["message"]), str(told["place"])
        error = ErrorRecord(kind, message, place, bool(told["is_peer"]), now_s - float(told["ago_s"]))
    return RankExit(rank, info["pid"], info["returncode"], info["seconds"], now_s, stopped_s, error)


def _read_error(file: Path) -> dict[str, str | float | bool] | None:
    error = ErrorRecord.read(file)
    if error is None:
        return None
    ago_s = time.monotonic() - error.time_s
    return {
        "kind": error.kind, "message": error.message, "place": error.place, "is_peer": error.is_peer, "ago_s": ago_s
    }  # fmt: skip


def thread_variables(cpus: int) -> dict[str, str]:
    """Return what a rank finds beside who it is: its threads, as many as its cores."""
    return {THREADS_VARIABLE: str(cpus)}
