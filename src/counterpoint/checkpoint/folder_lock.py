"""The lock of a folder to which one run at a time writes: the file says who holds it, and the kernel releases it.

The lock is ``flock`` on a file in the folder. It ends with the process that holds it, however that ends, so that no run
is ever kept out by a dead one. Where the file system has no such locks, the file itself is the lock, and its owner is
looked up: one that has ended on this host gives way, one on another host cannot be seen and keeps the folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeAlias

from counterpoint.errors import CheckpointError, CheckpointWriteError
from counterpoint.json_reader import parse_json
from counterpoint.terminal_text import warn
from counterpoint.world.process_stat import PROC, read_process_stat

LOCK = "run.lock"
OWNER_MAX_BYTES = 4096
ORPHAN_WAIT_S = 6.0  # a process that a dead run has forked holds its lock until it notices: DataLoader's after 5 s
ORPHAN_POLL_S = 0.1
LockState: TypeAlias = Literal["locked", "taken", "unsupported"]
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF})


@dataclass(frozen=True, slots=True)
class LockOwner:
    """Who holds a lock.

    Args:
        run_id: of its run; empty for a run that has none.
        host: its host name.
        kernel: identifies the running kernel and the container, in which the process id means something.
        pid: its process id.
        start_ticks: when the process has started, since another one may get its id later.
        since: when it took the lock, for people.
    """

    run_id: str
    host: str
    kernel: str
    pid: int
    start_ticks: int
    since: str

    @staticmethod
    def this_process(run_id: str) -> LockOwner:
        """Return this process as the owner."""
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        return LockOwner(run_id, socket.gethostname(), kernel_id(), os.getpid(), read_start_ticks(os.getpid()), since)

    @staticmethod
    def parse(data: bytes) -> LockOwner | None:
        """Return the owner that a lock file names; None for a file that names none."""
        try:
            content = parse_json(data)
        except ValueError:
            return None
        match content:
            case {"run_id": str(run_id), "host": str(host), "kernel": str(kernel), "pid": int(pid),
                  "start_ticks": int(start_ticks), "since": str(since)}:  # fmt: skip
                return LockOwner(run_id, host, kernel, pid, start_ticks, since)
            case _:
                return None

    def is_known_dead(self) -> bool:
        """Tell whether it has ended for certain; a process of another host or container cannot be seen."""
        return self.kernel == kernel_id() and read_start_ticks(self.pid) != self.start_ticks

    def __str__(self) -> str:
        """Return it as a text with what finds it."""
        run = f"run {self.run_id}, " if self.run_id else ""
        return f"{run}pid {self.pid} on host {self.host}, since {self.since}"


class FolderLock:
    """A lock that this process holds; it is released by :meth:`release`, and by the kernel when the process ends.

    Args:
        path: of the lock file.
        descriptor: open on it; owned.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    def require_held(self) -> None:
        """Check that the lock file is still the one that was locked.

        Raises:
            CheckpointWriteError: it was removed or replaced; what the run trains is not lost if it comes back.
        """
        if self._descriptor is not None and is_same_file(self.path, self._descriptor):
            return
        if not os.path.lexists(self.path.parent):
            raise CheckpointWriteError(
                f"{self.path.parent} was removed or renamed while this run used it; nothing was saved: rename it back, "
                "with what was in it"
            )
        raise CheckpointWriteError(
            f"{self.path} is no longer the lock that this run holds, so another run may write to the folder; "
            "nothing was saved: end one of the two, and continue the other with resume='auto'"
        )

    def release(self) -> None:
        """Remove the lock file, unless it has become another run's, and release the lock. Idempotent."""
        if self._descriptor is None:
            return
        with suppress(OSError):  # a file system that is read-only by now: the kernel's lock ends all the same
            if is_same_file(self.path, self._descriptor):
                self.path.unlink()
        os.close(self._descriptor)
        self._descriptor = None


def lock_folder(
    folder: Path, run_id: str, remedy: str, *, name: str = LOCK, flock: Callable[[int, int], object] = fcntl.flock
) -> FolderLock:
    """Lock a folder for a run, or refuse it while another run holds it.

    A lock that a dead run has left is taken over, with a warning.

    Args:
        folder: exists.
        run_id: of the run.
        remedy: what to give instead.
        name: of the lock file.
        flock: locks a file; tests pass one of a file system without locks.

    Raises:
        CheckpointError: another run holds it.
        OSError: the lock file cannot be written.
    """
    path, end_s = folder / name, time.monotonic() + ORPHAN_WAIT_S
    while True:
        descriptor, is_new = open_lock_file(path)
        try:
            require_regular(descriptor, path)
            state = try_flock(descriptor, flock)
            owner = LockOwner.parse(os.pread(descriptor, OWNER_MAX_BYTES, 0))
            is_held = state == "taken" or (state == "unsupported" and not is_new)
            is_dead = owner is not None and owner.is_known_dead()
            if is_held and not is_dead:
                raise CheckpointError(
                    f"another run uses {folder}: {owner or 'it has just started'}; the checkpoints and records of two "
                    f"runs in one folder would replace each other: {remedy}, or start when that run has ended"
                    + (f" and {path} is removed" if state == "unsupported" else "")
                )
            if is_held and time.monotonic() >= end_s:
                raise CheckpointError(
                    f"the run that used {folder} has ended ({owner}), but another process still holds its lock: end "
                    f"that process, which `fuser {path}` names, and start again; or {remedy}"
                )
            if not is_same_file(path, descriptor):  # its owner has just released and removed it
                continue
            if not is_held:
                warn_of_state(path, owner, state)
                write_owner(descriptor, LockOwner.this_process(run_id))
                return FolderLock(path, os.dup(descriptor))
            if state == "unsupported":
                warn_of_state(path, owner, "locked")
                path.unlink()
            else:  # a process that the dead run has forked still holds it
                time.sleep(ORPHAN_POLL_S)
        finally:
            os.close(descriptor)


def open_lock_file(path: Path) -> tuple[int, bool]:
    """Return a descriptor of the lock file, and whether this call has created it."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        with suppress(FileExistsError):
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), True  # who can open it can lock it
        try:
            with suppress(FileNotFoundError):
                return os.open(path, flags), False
        except IsADirectoryError as error:
            raise OSError(errno.EISDIR, f"{path} is a folder: remove it", str(path)) from error
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise OSError(errno.ELOOP, f"{path} is a link: remove it", str(path)) from error


def require_regular(descriptor: int, path: Path) -> None:
    """Check that an open file is one in which an owner can be written.

    Raises:
        OSError: it is a pipe or a device.
    """
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, f"{path} is not a regular file: remove it", str(path))


def try_flock(descriptor: int, flock: Callable[[int, int], object]) -> LockState:
    """Return ``locked``, ``taken`` by another process, or ``unsupported`` by the file system."""
    try:
        flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "taken"
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return "unsupported"
    return "locked"


def write_owner(descriptor: int, owner: LockOwner) -> None:
    """Write who holds the lock."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(owner)).encode(), 0)
    os.fsync(descriptor)


def warn_of_state(path: Path, dead_owner: LockOwner | None, state: LockState) -> None:
    """Warn of a lock that a dead run has left, and of a file system without locks."""
    if dead_owner is not None:
        text = f"the lock of {path.parent} was left by a run that has ended ({dead_owner}); this run takes it over"
        warn(text, RuntimeWarning, stacklevel=3)
    if state == "unsupported":
        warn(
            f"the file system of {path.parent} has no locks, so the file {path.name} in it stands for one; if this "
            "run is killed, a run on another host is refused until the file is removed",
            RuntimeWarning,
            stacklevel=3,
        )


def is_same_file(path: Path, descriptor: int) -> bool:
    """Tell whether a path still names an open file."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except OSError:
        return False


def kernel_id() -> str:
    """Return what is equal for processes that see each other's process ids."""
    boot, container = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    return f"{boot.read_text(encoding='ascii').strip()} {container.readlink()}"


def read_start_ticks(pid: int) -> int:
    """Return when a process has started, in ticks since the start of the kernel; 0 if there is none or it has ended."""
    found = read_process_stat(PROC / str(pid))
    return 0 if found is None or found.letter in {"Z", "X"} else found.start_ticks
