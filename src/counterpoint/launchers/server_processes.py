"""Coordinator and servers of a parameter-server job as supervised processes of this host; killed ones are restarted."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from counterpoint.errors import LaunchError
from counterpoint.launchers.child_process import ChildProcess, stop_processes
from counterpoint.launchers.variables import THREADS_VARIABLE
from counterpoint.ps.actions import COORDINATOR
from counterpoint.ps.coordinator import COORDINATOR_LOG
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.process.disk_layout import log_path, resume
from counterpoint.ps.process.job_file import JobEndpoint, write_job_file
from counterpoint.ps.process.join_job import READY_TIMEOUT_S, join
from counterpoint.ps.worker_session import WorkerSession
from counterpoint.rpc.address import UnixAddress
from counterpoint.rpc.job_key import JobKey

WATCH_INTERVAL_S = 0.1
STDERR_TAIL_BYTES = 4096


@dataclass(slots=True)
class ServerProcess:
    """One process of a job.

    Attributes:
        arguments: of ``counterpoint serve``.
        process: which.
        errors: its stderr.
    """

    arguments: list[str]
    process: ChildProcess
    errors: IO[bytes]


def start_servers(
    job: JobConfig,
    *,
    num_spares: int = 0,
    folder: Path | None = None,
    key: JobKey | None = None,
    threads: int = 1,
    is_journaled: bool = False,
) -> ServerProcesses:
    """Start the coordinator and the servers of a job as processes of this host.

    They communicate over UNIX sockets, and exchange large tensors through shared memory. A process that dies is
    restarted; if this one ends, however it ends, the kernel kills them.

    Args:
        job: its configuration.
        num_spares: standby servers, in addition to the job's.
        folder: for logs and snapshots, empty or of an earlier run of this job, which is then resumed; without it, the
            job is lost when its processes end.
        key: that workers need, too; None among processes of this user.
        threads: for the arithmetic of each process.
        is_journaled: whether to write all counted updates to journals in the folder, for later inspection.

    Raises:
        LaunchError: a process could not be started.
        CheckpointError: the run in the folder cannot be resumed.
    """
    snapshot = resume(folder, job) if folder is not None and log_path(folder, COORDINATOR_LOG).exists() else None
    options = [] if snapshot is None else ["--snapshot", str(snapshot)]
    processes = ServerProcesses(job, folder, key, threads, [*options, *(["--journal"] if is_journaled else [])])
    try:
        processes.start(num_spares)
    except BaseException:
        processes.close()
        raise
    return processes


class ServerProcesses:
    """See :func:`start_servers`; also a context manager.

    Attributes:
        contact: address of the job, for :func:`counterpoint.ps.process.join`.
        contact_path: a file with it, for workers that are processes of their own.
    """

    def __init__(
        self, job: JobConfig, folder: Path | None, key: JobKey | None, threads: int, options: list[str]
    ) -> None:
        self._stack = ExitStack()
        self._name = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._folder, self._key, self._threads, self._options = folder, key, threads, options
        self._children: dict[str, ServerProcess] = {}
        self._lock = threading.RLock()
        self._is_closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._error: LaunchError | None = None
        self.contact = JobEndpoint(job, UnixAddress(f"{self._name}-{COORDINATOR}"))
        scratch = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="counterpoint-")))
        self.contact_path = scratch / "job.json"
        write_job_file(self.contact, self.contact_path)

    def start(self, num_spares: int) -> None:
        """Start and supervise the processes."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._start(COORDINATOR, [COORDINATOR])
        for index in range(self.contact.job.num_servers + num_spares):
            self.add_server(f"server-{index}")
        self._watcher = threading.Thread(target=self._watch, name="counterpoint servers", daemon=True)
        self._watcher.start()

    def add_server(self, name: str) -> None:
        """Start another server; raise LaunchError if the name is taken."""
        with self._lock:
            if name in self._children:
                raise LaunchError(f"there is a server {name} already; give another name")
            place = f"unix:{self._name}-{name}"
            self._start(name, ["server", "--name", name, "--listen", place, *self._options])

    def join(self, name: str, *, timeout_s: float = READY_TIMEOUT_S) -> WorkerSession:
        """Return the session of a worker in this process; see :func:`counterpoint.ps.process.join`."""
        self.check()
        try:
            return join(self.contact, name, self._key, timeout_s=timeout_s)
        except LaunchError:
            self.check()
            raise

    @property
    def pids(self) -> dict[str, int]:
        """The process id of each member."""
        with self._lock:
            return {name: child.process.pid for name, child in self._children.items()}

    def kill(self, name: str) -> None:
        """Kill a process, as a power failure would; it is restarted soon."""
        with self._lock:
            self._children[name].process.send_signal(signal.SIGKILL)

    def check(self) -> None:
        """Raise the error of a process that has exited on its own, and would exit again after a restart.

        Raises:
            LaunchError: with the end of its stderr.
        """
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End all processes, and delete all files except those in the job's folder."""
        self._is_closing.set()
        if self._watcher is not None:
            self._watcher.join()
        stop_processes([child.process for child in self._children.values()])
        for child in self._children.values():
            child.errors.close()
        self._children.clear()
        self._stack.close()

    def _start(self, name: str, arguments: list[str]) -> None:
        read_fd, write_fd = os.pipe()
        try:
            command = [*arguments, "--job", str(self.contact_path)]
            if self._folder is not None:
                command += ["--folder", str(self._folder)]
            if self._key is not None:
                os.write(write_fd, self._key.secret.hex().encode())
                command += ["--key-fd", str(read_fd)]
            errors = tempfile.TemporaryFile(prefix="counterpoint-")  # noqa: SIM115 - closed with the process
            process = ChildProcess(
                [sys.executable, "-m", "counterpoint", "serve", *command],
                {**os.environ, THREADS_VARIABLE: str(self._threads)},
                stdout=subprocess.DEVNULL,
                stderr=errors,
                inherited_fd=None if self._key is None else read_fd,
            )
            self._children[name] = ServerProcess(arguments, process, errors)
        finally:
            os.close(read_fd)
            os.close(write_fd)

    def _watch(self) -> None:
        """Restart killed processes; record the error of one that exited."""
        while not self._is_closing.wait(WATCH_INTERVAL_S):
            with self._lock:
                for name, child in list(self._children.items()):
                    code = child.process.poll()
                    if code is not None and code < 0:
                        child.errors.close()
                        self._start(name, child.arguments)
                    elif code is not None and self._error is None:
                        self._error = LaunchError(
                            f"{name} of {self.contact.job.name} has ended: {_stderr_tail(child, code)}"
                        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def _stderr_tail(child: ServerProcess, code: int) -> str:
    """Return the end of a process's stderr."""
    size = child.errors.seek(0, os.SEEK_END)
    child.errors.seek(max(0, size - STDERR_TAIL_BYTES))
    return child.errors.read().decode(errors="replace").strip() or f"exit code {code}"
