"""A file on disk that chunks of memory are written to and read back from, by threads.

The file is one rank's own, for as long as its process uses it: it has no name from the moment it is made, so that
nothing is left of it however the process ends. Its space is reserved at once, so that a disk that is too full is found
before the first step. Reads and writes go past the page cache (``O_DIRECT``) where the file system allows it, since
what is written is not read again before everything else was. A checksum of each chunk is kept in memory.

Source:
    open(2), section O_DIRECT; posix_fallocate(3).
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from ctypes import c_char
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from counterpoint.errors import OffloadError
from counterpoint.terminal_text import warn

BLOCK_BYTES = 4096
"""Direct reads and writes begin and end at multiples of it, in the file and in memory."""

Content: TypeAlias = Literal["the optimizer state", "the input of recomputed blocks", "the shard of the weights"]
"""What a file has."""
INPUTS: Content = "the input of recomputed blocks"
WEIGHTS: Content = "the shard of the weights"

_REMEDIES: dict[Content, str] = {
    "the optimizer state": "shard the state over more ranks with zero(...)",
    WEIGHTS: "shard the weights over more ranks with zero(..., level=3)",
    INPUTS: "offload less: smaller microbatches, or a pass recompute:PATTERN that matches fewer blocks",
}
"""What to do about a disk that is full, by what is on it."""

_Job: TypeAlias = tuple[Callable[[], None], "Future[None]"]
_Jobs: TypeAlias = "SimpleQueue[_Job | None]"


IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
"""File systems whose files are in memory."""


def find_file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return the type of the file system that a folder is on; empty if the system does not tell.

    Args:
        folder: the folder.
        mounts: the system's list of mounted file systems.
    """
    try:
        rows = [line.split() for line in mounts.read_text(errors="replace").splitlines()]
    except OSError:
        return ""
    path = folder.resolve()
    found = [(len(row[1]), row[2]) for row in rows if len(row) > 2 and path.is_relative_to(row[1])]
    return max(found)[1] if found else ""


def align(num_bytes: int, multiple: int = BLOCK_BYTES) -> int:
    """Return the next multiple from a number of bytes on.

    Example:
        >>> align(0), align(1), align(4096)
        (0, 4096, 4096)
    """
    return -(-num_bytes // multiple) * multiple


def allocate_aligned(num_bytes: int) -> Tensor:
    """Return an uninitialized buffer of bytes that direct reads and writes can use."""
    memory = torch.empty(num_bytes + BLOCK_BYTES, dtype=torch.uint8)
    start = -memory.data_ptr() % BLOCK_BYTES
    return memory[start : start + num_bytes]


@dataclass(frozen=True, slots=True)
class Span:
    """A chunk's place in the file.

    Args:
        index: of the chunk.
        offset: its first byte, a multiple of :data:`BLOCK_BYTES`.
        num_bytes: its size, likewise.
    """

    index: int
    offset: int
    num_bytes: int


class ChunkFile:
    """A file of one rank.

    Args:
        folder: where it lies; made if it does not exist.
        rank: for errors.
        timeout_s: the longest time that a chunk may take, in seconds.
        content: what is in it, for errors.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int,
        timeout_s: float,
        content: Content = "the optimizer state",
    ) -> None:
        self.folder, self.rank, self.timeout_s, self.content = Path(folder), rank, timeout_s, content
        self.checksums: dict[int, int] = {}  # of the chunks that were written
        self.failure: OffloadError | None = None
        self.is_direct = True
        self._file: _SharedFile | None = None
        self._reads: _Jobs = SimpleQueue()
        self._writes: _Jobs = SimpleQueue()

    @property
    def name(self) -> str:
        """What errors call the file."""
        return f"the offload file of rank {self.rank} in {self.folder}"

    def open(self, num_bytes: int) -> None:
        """Make the file and reserve its space.

        Raises:
            OffloadError: the folder cannot be used, or its disk has no room.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            prefix = f"counterpoint-rank{self.rank}-"
            descriptor, path = tempfile.mkstemp(prefix=prefix, suffix=".offload", dir=self.folder)
            Path(path).unlink()
        except OSError as error:
            raise OffloadError(
                f"{self.name} cannot be made: {error.strerror}; give a folder on a local disk that this process may "
                "write to as offload_folder"
            ) from error
        self._file = _SharedFile(descriptor)
        self._finalizer = weakref.finalize(self, _close, self._file, self._reads, self._writes)
        self.reserve(num_bytes)
        if find_file_system(self.folder) in IN_MEMORY:
            warn(
                f"{self.name} is in memory, because the folder's file system is, so that offloading saves none; give a "
                "folder on a disk as offload_folder",
                stacklevel=2,
            )
        self.use_direct_io()
        for jobs, name in ((self._reads, "read"), (self._writes, "write")):
            args = (jobs, self._file.take())
            threading.Thread(target=_work, args=args, name=f"offload-{name}-{self.rank}", daemon=True).start()

    @property
    def descriptor(self) -> int:
        """The file's descriptor."""
        assert self._file is not None, "open"
        return self._file.descriptor

    def reserve(self, num_bytes: int, offset: int = 0) -> None:
        """Reserve space on the disk.

        Args:
            num_bytes: more than there are.
            offset: where they begin, at the end of what is reserved.

        Raises:
            OffloadError: there is not enough.
        """
        stats = os.fstatvfs(self.descriptor)
        free = stats.f_bavail * stats.f_frsize
        try:
            if free < num_bytes:
                raise OSError("no space left on device")
            if num_bytes:
                os.posix_fallocate(self.descriptor, offset, num_bytes)
        except OSError as error:
            self.close()
            problem, remedy = str(error.strerror or error), f"make room for {num_bytes - free} bytes more"
            if free >= num_bytes:  # it is not the disk that is full
                limits = {errno.EFBIG: "raise the limit of `ulimit -f`", errno.EDQUOT: "raise the quota of this user"}
                remedy = limits.get(error.errno or 0, "free space on the disk")
            self.failure = OffloadError(
                f"{self.name} needs {num_bytes} bytes {'more ' if offset else ''}for {self.content} of this rank, but "
                f"{free} are free there ({problem}); {remedy}, give another offload_folder, or "
                f"{_REMEDIES[self.content]}"
            )
            raise self.failure from error

    def use_direct_io(self) -> None:
        """Read and write past the page cache, if the file system can; else warn."""
        flag, buffer = getattr(os, "O_DIRECT", 0), allocate_aligned(BLOCK_BYTES)
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, fcntl.fcntl(self.descriptor, fcntl.F_GETFL) | flag)
            os.preadv(self.descriptor, [_bytes_of(buffer)], 0)
            self.is_direct = bool(flag)
        except OSError:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, fcntl.fcntl(self.descriptor, fcntl.F_GETFL) & ~flag)
            self.is_direct = False
        if not self.is_direct:
            warn(
                f"{self.name} goes through the page cache, because its file system has no direct reads and writes "
                "(O_DIRECT), so that the state takes memory as long as the system has some to spare; give a folder on "
                "ext4 or xfs as offload_folder to avoid it",
                stacklevel=2,
            )

    def start_read(self, span: Span, buffer: Tensor) -> Future[None]:
        """Start to read a chunk into a buffer of its size, and to compare its checksum."""
        self.require_intact()
        return _submit(self._reads, lambda: self._read(span, buffer))

    def start_write(self, span: Span, buffer: Tensor) -> Future[None]:
        """Start to write a chunk from a buffer of its size, which may not change meanwhile."""
        self.require_intact()
        return _submit(self._writes, lambda: self._write(span, buffer))

    def wait(self, job: Future[None], what: str) -> None:
        """Wait until a read or a write is done.

        Args:
            job: what :meth:`start_read` or :meth:`start_write` has returned.
            what: is waited for, for errors.

        Raises:
            OffloadError: it failed, or took too long; the file is not usable any more.
        """
        try:
            job.result(self.timeout_s)
        except OffloadError as error:
            self.failure = error
            raise
        except TimeoutError:
            self.failure = OffloadError(
                f"{self.name}: {what} has taken more than timeout_s={self.timeout_s:g} seconds; the disk hangs or "
                "is overloaded: give an offload_folder on a faster disk, or a longer timeout_s"
            )
            raise self.failure from None

    def require_intact(self) -> None:
        """Raise if a chunk was lost: of optimizer state, some of whose weights are updated, or of inputs of a step.

        Raises:
            OffloadError: one was.
        """
        if self.failure is None:
            return
        if self.content == INPUTS:  # of a step that has changed no weight
            raise OffloadError(f"the file was closed by an error of an earlier step; build ranks again: {self.failure}")
        raise OffloadError(f"{self.content} was lost in an earlier step; resume from a checkpoint: {self.failure}")

    def _read(self, span: Span, buffer: Tensor) -> None:
        view, done = _bytes_of(buffer), 0
        while done < span.num_bytes:
            try:
                count = os.preadv(self.descriptor, [view[done : span.num_bytes]], span.offset + done)
            except OSError as error:
                raise self.failed("read", span, error.strerror) from error
            if count == 0:
                raise self.failed("read", span, "the file ends before it")
            done += count
        if zlib.crc32(view[: span.num_bytes]) != self.checksums[span.index]:
            raise OffloadError(
                f"{self.name}: chunk {span.index}, {span.num_bytes} bytes from byte {span.offset} on, has another "
                "checksum than when it was written; the disk or another program has changed it: check the disk, and "
                "resume from a checkpoint with another offload_folder"
            )

    def _write(self, span: Span, buffer: Tensor) -> None:
        view, done = _bytes_of(buffer), 0
        self.checksums[span.index] = zlib.crc32(view[: span.num_bytes])
        while done < span.num_bytes:
            try:
                done += os.pwritev(self.descriptor, [view[done : span.num_bytes]], span.offset + done)
            except OSError as error:
                raise self.failed("written", span, error.strerror) from error

    def failed(self, verb: str, span: Span, reason: str | None) -> OffloadError:
        """Return the error for a chunk that cannot be read or written."""
        return OffloadError(
            f"{self.name}: chunk {span.index}, {span.num_bytes} bytes from byte {span.offset} on, cannot be {verb}: "
            f"{reason}; check the disk, and resume from a checkpoint"
        )

    def close(self) -> None:
        """Give the space on the disk back, once what is running has ended."""
        if self._file is not None:
            self._finalizer()


def _bytes_of(buffer: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    return memoryview((c_char * buffer.nbytes).from_address(buffer.data_ptr())).cast("B")


def _submit(jobs: _Jobs, function: Callable[[], None]) -> Future[None]:
    job: Future[None] = Future()
    jobs.put((function, job))
    return job


class _SharedFile:
    """A descriptor that is closed by its last user, so that no read or write meets a file that has got its number.

    Args:
        descriptor: of the file; its first user is the caller.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.num_users, self.lock = descriptor, 1, threading.Lock()

    def take(self) -> _SharedFile:
        """Return it for one more user."""
        with self.lock:
            self.num_users += 1
        return self

    def release(self) -> None:
        """Have one user less."""
        with self.lock:
            self.num_users -= 1
            is_last = self.num_users == 0
        if is_last:
            os.close(self.descriptor)


def _work(jobs: _Jobs, file: _SharedFile) -> None:
    """Run jobs until there is a None.

    Args:
        jobs: of this thread.
        file: that they read or write.
    """
    while (item := jobs.get()) is not None:
        function, job = item
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            job.set_exception(error)
        else:
            job.set_result(None)
        del item, function, job  # which refer to the rank's part of the file, that may be dropped now
    file.release()


def _close(file: _SharedFile, *queues: _Jobs) -> None:
    """End the threads after their jobs; the last one closes the file."""
    for jobs in queues:
        jobs.put(None)
    file.release()
