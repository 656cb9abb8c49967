"""Agent that starts one rank on another host, waits for it, and reports how it ended; used by Ray and Spark."""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypedDict

from counterpoint.launchers.child_process import ChildProcess, stop_processes
from counterpoint.launchers.environment import RankEnvironment
from counterpoint.launchers.exit_report import ErrorRecord, RankExit
from counterpoint.launchers.local import rank_environ
from counterpoint.launchers.ports import LOOPBACK, reserve_port
from counterpoint.launchers.variables import THREADS_VARIABLE
from counterpoint.rpc.job_key import JobKey, write_key


class RankExitInfo(TypedDict):
    """How a rank ended, as JSON; times are of its host's clock.

    Attributes:
        host: which ran it.
        pid: its process.
        returncode: exit code, or minus the signal that killed it.
        seconds: how long it ran.
        record: of the end of its script, with ``ago_s`` for the time before its exit; None if there is none.
    """

    host: str
    pid: int
    returncode: int
    seconds: float
    record: dict[str, Any] | None


class RankAgent:
    """Starts and stops one rank. Methods may be called from several threads: `stop` while `run` waits."""

    def __init__(self) -> None:
        self._port_socket: socket.socket | None = None
        self._child: ChildProcess | None = None
        self._is_stopped = False

    def reserve(self, host: str | None = None) -> tuple[str, int]:
        """Return this host's address and a port that is reserved for rank 0, which is then started here.

        Args:
            host: the address, if it is known.
        """
        host = host or outbound_address()
        self._port_socket = reserve_port(None, host)
        return host, int(self._port_socket.getsockname()[1])

    def run(
        self,
        argv: Sequence[str],
        environment: RankEnvironment,
        extra_variables: Mapping[str, str],
        secret: bytes | None = None,
    ) -> RankExitInfo:
        """Run the rank until it ends, tied to the life of this process.

        Args:
            argv: its command; ``python`` is replaced by this interpreter.
            environment: its rank.
            extra_variables: further environment variables.
            secret: of the job's key, which the rank finds in a file; None if it has a key file already, or needs none.
        """
        command = [sys.executable if argv[0] == "python" else argv[0], *argv[1:]]
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="counterpoint-") as folder:
            error_file = Path(folder) / "error.json"
            if secret is not None:
                environment = replace(environment, key_file=str(Path(folder) / "job.key"))
                write_key(JobKey(secret), Path(folder) / "job.key")
            store_fd = None if self._port_socket is None else self._port_socket.fileno()
            variables = rank_environ(replace(environment, store_fd=store_fd), error_file, extra_variables)
            self._child = ChildProcess(command, variables, inherited_fd=store_fd)
            if self._port_socket is not None:
                self._port_socket.close()  # inherited by the rank
            if self._is_stopped:
                self.stop()
            code = self._child.wait()
            return RankExitInfo(
                host=socket.gethostname(),
                pid=self._child.pid,
                returncode=code,
                seconds=time.monotonic() - began,
                record=_read_record(error_file),
            )

    def stop(self) -> None:
        """Ask the rank to end; kill it after the grace period."""
        self._is_stopped = True
        if self._child is not None:
            stop_processes([self._child])


def outbound_address() -> str:
    """Return the address of this host on its default route; the loopback address without one.

    Nothing is sent: the kernel only selects a route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])


def to_rank_exit(rank: int, info: RankExitInfo, now_s: float, stopped_s: float | None) -> RankExit:
    """Return a rank's exit in the clock of the supervisor.

    Args:
        rank: which.
        info: from its agent.
        now_s: the supervisor's clock.
        stopped_s: when the supervisor asked it to end, if it did.
    """
    record = None
    if info["record"] is not None:
        fields = dict(info["record"])
        fields |= {"time_s": now_s - fields.pop("ago_s"), "notes": tuple(fields["notes"])}
        record = ErrorRecord(**fields)
    return RankExit(rank, info["pid"], info["returncode"], info["seconds"], now_s, stopped_s, record, host=info["host"])


def _read_record(file: Path) -> dict[str, Any] | None:
    record = ErrorRecord.read(file)
    return None if record is None else {**asdict(record), "ago_s": time.monotonic() - record.time_s}


def thread_variables(cpus: int) -> dict[str, str]:
    """Return the environment variables that set a rank's number of threads."""
    return {THREADS_VARIABLE: str(cpus)}
