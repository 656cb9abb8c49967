"""Shared memory segments without a name, and how much memory is available.

A segment is a ``memfd``: it has no name in a file system, so it disappears when the last process that maps it ends,
however it ends. Another process of the same user opens it through ``/proc/<pid>/fd``, and maps it only if it is the
announced file (inode, size), belongs to the same user and cannot shrink (sealed). The native library checks the same.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from counterpoint.errors import PeerError

COOKIE_BYTES = 16
HUGE_PAGE_MIN_BYTES = 4 << 20
LIMITS = {
    errno.EMFILE: (resource.RLIMIT_NOFILE, "-n"), errno.EFBIG: (resource.RLIMIT_FSIZE, "-f"),
}  # fmt: skip
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(slots=True)
class SegmentMapping:
    """A mapped segment.

    Args:
        memory: the mapping.
        fd: its file descriptor, while other processes may still have to open it; -1 afterwards.
    """

    memory: mmap.mmap
    fd: int = -1

    @property
    def address(self) -> int:
        """The address of its first byte."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    @property
    def inode(self) -> int:
        """The number of its file, which is open."""
        return os.fstat(self.fd).st_ino

    def close(self) -> None:
        """Unmap it; nothing in this process may use it any more."""
        self.close_file()
        self.memory.close()

    def close_file(self) -> None:
        """Close the file descriptor: no other process can open it any more; existing mappings stay."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def create_segment(name: str, num_bytes: int, *, allocate: bool) -> SegmentMapping:
    """Create a segment of zeros.

    Args:
        name: shown in ``/proc``.
        num_bytes: its size.
        allocate: allocate all pages now, so that a shortage is an error here instead of a SIGBUS later.

    Raises:
        PeerError: there is not enough memory.
    """
    check_memory(name, num_bytes)
    fd = -1
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, num_bytes)
        if allocate:
            os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        return SegmentMapping(map_file(fd, num_bytes), fd)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise PeerError(mmap_error(name, num_bytes, error.errno or 0)) from error


def open_segment(pid: int, fd: int, inode: int, num_bytes: int) -> SegmentMapping:
    """Map the segment that another process of this user has open as file descriptor ``fd``.

    Args:
        pid: of the process.
        fd: its file descriptor.
        inode: of the segment, as the process announced it.
        num_bytes: size of the segment.

    Raises:
        OSError: it is gone, not permitted, or not the sealed memory that the process announced.
    """
    own_fd = os.open(f"/proc/{pid:d}/fd/{fd:d}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check_segment(own_fd, inode, num_bytes)
        return SegmentMapping(map_file(own_fd, num_bytes))
    finally:
        os.close(own_fd)


def _check_segment(fd: int, inode: int, num_bytes: int) -> None:
    """Check that an open file is the sealed memory that a process of this user announced.

    Raises:
        OSError: it is not.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or (status.st_ino, status.st_size) != (inode, num_bytes):
        raise PermissionError(
            errno.EPERM, f"it is file {status.st_ino} of {status.st_size} bytes, not {inode} of {num_bytes}"
        )
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to user {status.st_uid}, not {os.geteuid()}")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise PermissionError(errno.EPERM, "it is not sealed, and could shrink while it is read")


def map_file(fd: int, num_bytes: int) -> mmap.mmap:
    """Map a file, with huge pages if it is large and the kernel supports them."""
    memory = mmap.mmap(fd, num_bytes)
    if num_bytes >= HUGE_PAGE_MIN_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def allocate_pages(name: str, fd: int, offset: int, num_bytes: int) -> None:
    """Allocate all pages of a part of a file, so that a shortage is an error here instead of a SIGBUS later.

    Raises:
        PeerError: there is not enough memory.
    """
    try:
        os.posix_fallocate(fd, offset, num_bytes)
    except OSError as error:
        raise PeerError(mmap_error(name, num_bytes, error.errno or 0)) from error


def discard_shared_pages(address: int, num_bytes: int) -> None:
    """Release whole pages of shared memory to the kernel; they read as zeros afterwards.

    Private memory is unchanged.
    """
    start, stop = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None)
    if stop > start and hasattr(libc, "madvise") and hasattr(mmap, "MADV_REMOVE"):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_REMOVE)


def discard_pages(address: int, num_bytes: int) -> None:
    """Release whole pages of private or shared memory to the kernel; they read as zeros afterwards."""
    start, stop = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None)
    if stop <= start or not hasattr(libc, "madvise") or not hasattr(mmap, "MADV_REMOVE"):
        return
    pages = ctypes.c_void_p(start), ctypes.c_size_t(stop - start)
    if libc.madvise(*pages, mmap.MADV_REMOVE) != 0:  # as for all private memory
        libc.madvise(*pages, mmap.MADV_DONTNEED)


def check_memory(name: str, num_bytes: int) -> None:
    """Check that this much memory is available.

    Raises:
        PeerError: it is not.
    """
    free = available_bytes()
    if num_bytes > free:
        raise PeerError(out_of_memory_error(name, num_bytes, free, "the kernel would have to swap or kill a process"))


def mmap_error(name: str, num_bytes: int, number: int) -> str:
    """Return the error text for a failed allocation: a limit of this process, or a shortage.

    Args:
        name: of the segment.
        num_bytes: of the segment.
        number: errno.
    """
    free, cause = available_bytes(), os.strerror(number).lower()
    if number == errno.ENOMEM and num_bytes <= free:
        limit, option = resource.RLIMIT_AS, "-v"
    elif number in LIMITS:
        limit, option = LIMITS[number]
    else:
        return out_of_memory_error(name, num_bytes, free, cause)
    return (
        f"no shared memory for {name}: {num_bytes} bytes exceed a limit of this process ({cause}; the limit is "
        f"{resource.getrlimit(limit)[0]}): raise ulimit {option}, or use transport='gloo'"
    )


def out_of_memory_error(name: str, num_bytes: int, free: int, cause: str) -> str:
    """Return the error text for a shortage of memory."""
    return (
        f"no shared memory for {name}: {num_bytes} bytes are needed and {free} are free ({cause}); it counts as memory "
        "of this host and of this container: provide more, run fewer ranks here, or use transport='gloo'"
    )


def available_bytes(root: Path = Path("/")) -> int:
    """Return how much memory this process may still allocate: the host's, or less if its cgroups limit it.

    Args:
        root: of the file system with ``proc`` and ``sys``.
    """
    unknown = str(sys.maxsize >> 10)  # unknown: no such file, or not permitted
    host = int(read_field(root / "proc/meminfo", "MemAvailable:", unknown).split()[0]) << 10
    return min([host, *(group.free_bytes() for group in memory_cgroups(root))])


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """A cgroup with a memory limit.

    Args:
        folder: of the cgroup.
        limit: the file with its limit; not a number if it has none.
        used: the file with its usage, which includes page cache that the kernel can drop.
        caches: the keys of ``memory.stat`` for that page cache.
    """

    folder: Path
    limit: str
    used: str
    caches: tuple[str, ...]

    def free_bytes(self) -> int:
        """Return how much its processes may still allocate."""
        limit, used = (read_text(self.folder / name).strip() for name in (self.limit, self.used))
        if not limit.isdigit() or not used.isdigit():
            return sys.maxsize
        dropped = sum(int(read_field(self.folder / "memory.stat", f"{name} ", "0")) for name in self.caches)
        return max(int(limit) - int(used) + dropped, 0)


def memory_cgroups(root: Path) -> Iterator[MemoryCgroup]:
    """Yield this process's cgroup and its ancestors; each of them limits it."""
    mounted = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, place = line.split(":", 2)
        for path in (PurePosixPath(place), *PurePosixPath(place).parents):
            within = path.relative_to("/")
            if controllers == "":
                yield MemoryCgroup(mounted / within, "memory.max", "memory.current", ("inactive_file", "active_file"))
            elif controllers == "memory":
                caches = ("total_inactive_file", "total_active_file")
                folder = mounted / "memory" / within
                yield MemoryCgroup(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", caches)


def read_field(path: Path, name: str, default: str) -> str:
    """Return the text after ``name`` in the line of the file that begins with it, or the default."""
    values = [line.removeprefix(name).strip() for line in read_text(path).splitlines() if line.startswith(name)]
    return values[0] if values else default


def read_text(path: Path) -> str:
    """Return the file's text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
