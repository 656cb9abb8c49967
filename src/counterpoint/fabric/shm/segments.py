"""Memory that the ranks of one host share: files without a name, which are gone when the last process that has them is.

A segment is a ``memfd``: no file system has a name for it, so that nothing is left behind by any end of a process.
Another process of the same user opens it through ``/proc``, where nobody else may look, and only takes it for what it
is when it begins with the number that its maker told.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from counterpoint.errors import PeerError

COOKIE_BYTES = 16
HUGE_FROM = 4 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(slots=True)
class Mapping:
    """Shared memory in this process.

    Args:
        memory: the mapping.
        fd: its file, as long as others may still have to open it; -1 afterwards.
    """

    memory: mmap.mmap
    fd: int = -1

    @property
    def address(self) -> int:
        """Where it begins."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def close(self) -> None:
        """It is gone from this process; nothing here may use it any more."""
        self.forget_file()
        self.memory.close()

    def forget_file(self) -> None:
        """Nobody can open it any more; those who have it keep it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def create(name: str, num_bytes: int, *, fill: bool) -> Mapping:
    """Return new shared memory, all zeros.

    Args:
        name: what ``/proc`` shows for it.
        num_bytes: its size.
        fill: take all of its pages now, so that a shortage is an error here and not a signal later.

    Raises:
        PeerError: there is not enough memory.
    """
    require_memory(name, num_bytes)
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, num_bytes)
        if fill:
            os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        return Mapping(mapped(fd, num_bytes), fd)
    except OSError as error:
        os.close(fd)
        raise PeerError(shortage(name, num_bytes, available_bytes(), os.strerror(error.errno or 0))) from error


def open_of(pid: int, fd: int, num_bytes: int) -> Mapping:
    """Return the shared memory that another process has as its file ``fd``.

    Raises:
        OSError: it is gone, or may not be looked at.
    """
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return Mapping(mapped(own, num_bytes))
    finally:
        os.close(own)


def mapped(fd: int, num_bytes: int) -> mmap.mmap:
    """Return the file in memory, with large pages where it is large and the kernel gives them."""
    memory = mmap.mmap(fd, num_bytes)
    if num_bytes >= HUGE_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def require_memory(name: str, num_bytes: int) -> None:
    """There is memory for so much more.

    Raises:
        PeerError: there is not.
    """
    free = available_bytes()
    if num_bytes > free:
        raise PeerError(shortage(name, num_bytes, free, "it would have to swap or to end a process"))


def shortage(name: str, num_bytes: int, free: int, cause: str) -> str:
    """Say that memory is short, with the free and the needed bytes."""
    return (
        f"no shared memory for {name}: {num_bytes} bytes are needed and {free} are free ({cause}); it counts "
        "as memory of this host and of this container: give it more, run fewer ranks here, or take transport='gloo'"
    )


def available_bytes() -> int:
    """Return how much memory this process may still take: the host's, or what its control group leaves."""
    free = int(field(Path("/proc/meminfo"), "MemAvailable:", "0").split()[0]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        values = [text.strip() for text in map(read, (limit, used))]
        if all(value.isdigit() for value in values):
            free = min(free, max(int(values[0]) - int(values[1]), 0))
    return free


def field(path: Path, name: str, default: str) -> str:
    """Return what follows a name at the beginning of a line of a file."""
    found = [line.removeprefix(name).strip() for line in read(str(path)).splitlines() if line.startswith(name)]
    return found[0] if found else default


def read(path: str) -> str:
    """Return a file's text; nothing where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
