"""A job's coordinator and servers as processes of this host, watched: who dies is started again, and none is left."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from counterpoint.errors import LaunchError
from counterpoint.launchers.local import DEFAULTS, GRACE_S, LEASH
from counterpoint.launchers.variables import THREADS
from counterpoint.server.actions import COORDINATOR
from counterpoint.server.coordinator import LOG
from counterpoint.server.hosting.contact import Contact, write_contact
from counterpoint.server.hosting.folder import log_path
from counterpoint.server.hosting.joining import READY_S, join
from counterpoint.server.hosting.resuming import resume
from counterpoint.server.job import Job
from counterpoint.server.wire.key import JobKey
from counterpoint.server.wire.place import UnixPlace
from counterpoint.server.worker import WorkerSession

WATCH_S = 0.1
TOLD_BYTES = 4096


@dataclass(slots=True)
class Child:
    """One process of a job.

    Attributes:
        arguments: of ``counterpoint serve``.
        popen: the process.
        errors: what it writes to standard error.
    """

    arguments: list[str]
    popen: subprocess.Popen[bytes]
    errors: IO[bytes]


def start(
    job: Job,
    *,
    spares: int = 0,
    folder: Path | None = None,
    key: JobKey | None = None,
    threads: int = 1,
    is_journaled: bool = False,
) -> ServerProcesses:
    """Return the coordinator and the servers of a job, running as processes of this host.

    They talk over UNIX sockets, and lay large tensors down in shared memory. A process that dies is started again; if
    this one dies, however it dies, the kernel ends them.

    Args:
        job: what all agree on.
        spares: servers beyond the job's, for when one of these dies.
        folder: for logs and cuts, empty or of an earlier run of this job, which goes on then; if not given, the job
            ends with its processes.
        key: which workers must have, too; None among processes of this user.
        threads: for the arithmetic of each process.
        is_journaled: whether everything that is counted is written to the folder's journals, to be looked at later.

    Raises:
        LaunchError: a process could not be started.
        CheckpointError: what is in the folder cannot be gone on from.
    """
    cut = resume(folder, job) if folder is not None and log_path(folder, LOG).exists() else None
    options = [] if cut is None else ["--cut", str(cut)]
    found = ServerProcesses(job, folder, key, threads, [*options, *(["--journal"] if is_journaled else [])])
    try:
        found.begin(spares)
    except BaseException:
        found.close()
        raise
    return found


class ServerProcesses:
    """See :func:`start`; also a context manager.

    Attributes:
        contact: where the job is found, for :func:`counterpoint.server.hosting.join`.
        contact_path: a file that says so, for workers that are processes of their own.
    """

    def __init__(self, job: Job, folder: Path | None, key: JobKey | None, threads: int, options: list[str]) -> None:
        self._stack = ExitStack()
        self._name = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._folder, self._key, self._threads, self._options = folder, key, threads, options
        self._children: dict[str, Child] = {}
        self._lock = threading.RLock()
        self._is_closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._error: LaunchError | None = None
        self.contact = Contact(job, UnixPlace(f"{self._name}-{COORDINATOR}"))
        scratch = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="counterpoint-")))
        self.contact_path = scratch / "job.json"
        write_contact(self.contact, self.contact_path)

    def begin(self, spares: int) -> None:
        """The processes run, and somebody watches them."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._start(COORDINATOR, [COORDINATOR])
        for index in range(self.contact.job.num_servers + spares):
            self.add_server(f"server-{index}")
        self._watcher = threading.Thread(target=self._watch, name="counterpoint servers", daemon=True)
        self._watcher.start()

    def add_server(self, name: str) -> None:
        """One server more runs; a LaunchError where there is one of that name."""
        with self._lock:
            if name in self._children:
                raise LaunchError(f"there is a server {name} already; give another name")
            place = f"unix:{self._name}-{name}"
            self._start(name, ["server", "--name", name, "--listen", place, *self._options])

    def join(self, name: str, *, deadline_s: float = READY_S) -> WorkerSession:
        """Return the session of a worker in this process; see :func:`counterpoint.server.hosting.join`."""
        self.check()
        try:
            return join(self.contact, name, self._key, deadline_s=deadline_s)
        except LaunchError:
            self.check()
            raise

    @property
    def pids(self) -> dict[str, int]:
        """The process of each member."""
        with self._lock:
            return {name: child.popen.pid for name, child in self._children.items()}

    def kill(self, name: str) -> None:
        """The process is killed, as a machine that loses its power; it is started again soon."""
        with self._lock:
            self._children[name].popen.kill()

    def check(self) -> None:
        """All processes run, or will again.

        Raises:
            LaunchError: one has ended by itself, and would again; the error says what it said.
        """
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """No process is left, and no file but in the job's folder."""
        self._is_closing.set()
        if self._watcher is not None:
            self._watcher.join()
        for number in (signal.SIGTERM, signal.SIGKILL):
            living = [child for child in self._children.values() if child.popen.poll() is None]
            for child in living:
                with suppress(ProcessLookupError):
                    child.popen.send_signal(number)
            end = time.monotonic() + GRACE_S
            for child in living:
                with suppress(subprocess.TimeoutExpired):
                    child.popen.wait(max(0.0, end - time.monotonic()))
        for child in self._children.values():
            child.popen.wait()
            child.errors.close()
        self._children.clear()
        self._stack.close()

    def _start(self, name: str, arguments: list[str]) -> None:
        read_fd, write_fd = os.pipe()
        try:
            leash = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), ""]
            command = [*arguments, "--job", str(self.contact_path)]
            if self._folder is not None:
                command += ["--folder", str(self._folder)]
            if self._key is not None:
                os.write(write_fd, self._key.secret.hex().encode())
                command += ["--key-fd", str(read_fd)]
            errors = tempfile.TemporaryFile(prefix="counterpoint-")  # noqa: SIM115 - the child's as long as it lives
            popen = subprocess.Popen(
                [*leash, sys.executable, "-m", "counterpoint", "serve", *command],
                env={**DEFAULTS, **os.environ, THREADS: str(self._threads)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
                pass_fds=(read_fd,) if self._key is not None else (),
            )
            self._children[name] = Child(arguments, popen, errors)
        finally:
            os.close(read_fd)
            os.close(write_fd)

    def _watch(self) -> None:
        """Whoever was killed is started again; whoever has ended by itself is told of."""
        while not self._is_closing.wait(WATCH_S):
            with self._lock:
                for name, child in list(self._children.items()):
                    code = child.popen.poll()
                    if code is not None and code < 0:
                        child.errors.close()
                        self._start(name, child.arguments)
                    elif code is not None and self._error is None:
                        self._error = LaunchError(f"{name} of {self.contact.job.name} has ended: {_said(child, code)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def _said(child: Child, code: int) -> str:
    """Return the end of what a process wrote to standard error."""
    size = child.errors.seek(0, os.SEEK_END)
    child.errors.seek(max(0, size - TOLD_BYTES))
    return child.errors.read().decode(errors="replace").strip() or f"exit code {code}"
