"""Memory that the ranks of one host share: files without a name, which are gone when the last process that has them is.

A segment is a ``memfd``: no file system has a name for it, so that nothing is left behind by any end of a process.
Another process of the same user opens it through ``/proc``, where nobody else may look, and only takes it for what it
is when it begins with the number that its maker told.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
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
        self.close_file()
        self.memory.close()

    def close_file(self) -> None:
        """Nobody can open it any more; those who have it keep it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def create_segment(name: str, num_bytes: int, *, allocate: bool) -> SegmentMapping:
    """Return new shared memory, all zeros.

    Args:
        name: what ``/proc`` shows for it.
        num_bytes: its size.
        fill: take all of its pages now, so that a shortage is an error here and not a signal later.

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


def open_segment(pid: int, fd: int, num_bytes: int) -> SegmentMapping:
    """Return the shared memory that another process has as its file ``fd``.

    Raises:
        OSError: it is gone, or may not be looked at.
    """
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return SegmentMapping(map_file(own, num_bytes))
    finally:
        os.close(own)


def map_file(fd: int, num_bytes: int) -> mmap.mmap:
    """Return the file in memory, with large pages where it is large and the kernel gives them."""
    memory = mmap.mmap(fd, num_bytes)
    if num_bytes >= HUGE_PAGE_MIN_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def allocate_pages(name: str, fd: int, offset: int, num_bytes: int) -> None:
    """All pages of a part of a file are there, so that a shortage is an error here and not a signal later.

    Raises:
        PeerError: there is not enough memory.
    """
    try:
        os.posix_fallocate(fd, offset, num_bytes)
    except OSError as error:
        raise PeerError(mmap_error(name, num_bytes, error.errno or 0)) from error


def discard_shared_pages(address: int, num_bytes: int) -> None:
    """Shared memory is empty where it fills pages: they take no room until somebody writes. Private memory stays."""
    start, stop = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None)
    if stop > start and hasattr(libc, "madvise") and hasattr(mmap, "MADV_REMOVE"):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_REMOVE)


def check_memory(name: str, num_bytes: int) -> None:
    """There is memory for so much more.

    Raises:
        PeerError: there is not.
    """
    free = available_bytes()
    if num_bytes > free:
        raise PeerError(out_of_memory_error(name, num_bytes, free, "it would have to swap or to end a process"))


def mmap_error(name: str, num_bytes: int, number: int) -> str:
    """Say why the kernel gives none: a limit of this process, or a shortage.

    Args:
        name: of the segment.
        num_bytes: of the segment.
        number: the kernel's error.
    """
    free, cause = available_bytes(), os.strerror(number).lower()
    if number == errno.ENOMEM and num_bytes <= free:
        limit, option = resource.RLIMIT_AS, "-v"
    elif number in LIMITS:
        limit, option = LIMITS[number]
    else:
        return out_of_memory_error(name, num_bytes, free, cause)
    return (
        f"no shared memory for {name}: {num_bytes} bytes are needed, which this process may not have ({cause}; its "
        f"limit is {resource.getrlimit(limit)[0]}): raise ulimit {option}, or take transport='gloo'"
    )


def out_of_memory_error(name: str, num_bytes: int, free: int, cause: str) -> str:
    """Say that memory is short, with the free and the needed bytes."""
    return (
        f"no shared memory for {name}: {num_bytes} bytes are needed and {free} are free ({cause}); it counts "
        "as memory of this host and of this container: give it more, run fewer ranks here, or take transport='gloo'"
    )


def available_bytes(root: Path = Path("/")) -> int:
    """Return how much memory this process may still take: the host's, or what its control groups leave.

    Args:
        root: of the file system in which the kernel tells.
    """
    unknown = str(sys.maxsize >> 10)  # the kernel does not say, or this process may open no file: it will find out
    host = int(read_field(root / "proc/meminfo", "MemAvailable:", unknown).split()[0]) << 10
    return min([host, *(group.free_bytes() for group in memory_cgroups(root))])


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """Processes that have a limit in common, as the kernel shows them in a folder.

    Args:
        folder: of this group.
        limit: the file with the most it may take; no number where it may take anything.
        used: the file with what it has taken, the pages of files that the kernel can drop included.
        caches: the lines of ``memory.stat`` that say how many these are.
    """

    folder: Path
    limit: str
    used: str
    caches: tuple[str, ...]

    def free_bytes(self) -> int:
        """Return how much its processes may still take."""
        limit, used = (read_text(self.folder / name).strip() for name in (self.limit, self.used))
        if not limit.isdigit() or not used.isdigit():
            return sys.maxsize
        dropped = sum(int(read_field(self.folder / "memory.stat", f"{name} ", "0")) for name in self.caches)
        return max(int(limit) - int(used) + dropped, 0)


def memory_cgroups(root: Path) -> Iterator[MemoryCgroup]:
    """Yield the groups that this process is in, and those that these are in: each of them limits it."""
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
    """Return what follows a name at the beginning of a line of a file."""
    found = [line.removeprefix(name).strip() for line in read_text(path).splitlines() if line.startswith(name)]
    return found[0] if found else default


def read_text(path: Path) -> str:
    """Return a file's text; nothing where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
