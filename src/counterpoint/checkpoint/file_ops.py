"""The few file operations a save is made of, so that tests can stop the machine after any of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Protocol

from counterpoint.errors import CheckpointError

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class FileOps(Protocol):
    """Everything that a save does to the disk; loading only reads and needs none of it."""

    def make_folder(self, path: Path) -> None:
        """A new folder stands at ``path``; it was not there before."""

    def create(self, path: Path) -> int:
        """A new empty file stands at ``path``; the descriptor is open for writing."""

    def write(self, descriptor: int, data: memoryview) -> None:
        """All of ``data`` is appended to the file."""

    def sync(self, descriptor: int) -> None:
        """The bytes written so far survive a power cut."""

    def close(self, descriptor: int) -> None:
        """The descriptor is closed."""

    def sync_folder(self, path: Path) -> None:
        """The names inside the folder survive a power cut."""

    def rename(self, source: Path, target: Path) -> None:
        """What stood at ``source`` stands at ``target``, in one step."""

    def unlink(self, path: Path) -> None:
        """The file is gone."""

    def remove_folder(self, path: Path) -> None:
        """The empty folder is gone."""

    def free_bytes(self, path: Path) -> int:
        """Return how much an ordinary user can still write to the disk that holds ``path``."""


class LocalFileOps:
    """The real file system."""

    def make_folder(self, path: Path) -> None:
        """A new folder stands at ``path``; it was not there before."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """A new empty file stands at ``path``; the descriptor is open for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)

    def write(self, descriptor: int, data: memoryview) -> None:
        """All of ``data`` is appended to the file."""
        while data:
            data = data[os.write(descriptor, data) :]

    def sync(self, descriptor: int) -> None:
        """The bytes written so far survive a power cut."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """The descriptor is closed."""
        os.close(descriptor)

    def sync_folder(self, path: Path) -> None:
        """The names inside the folder survive a power cut."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """What stood at ``source`` stands at ``target``, in one step."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """The file is gone."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """The empty folder is gone."""
        path.rmdir()

    def free_bytes(self, path: Path) -> int:
        """Return how much an ordinary user can still write to the disk that holds ``path``."""
        figures = os.statvfs(path)
        return figures.f_bavail * figures.f_frsize


LOCAL_FILES = LocalFileOps()


def write_file(files: FileOps, path: Path, data: bytes) -> None:
    """A new file at ``path`` holds ``data``, and would survive a power cut once its folder is synced."""
    descriptor = files.create(path)
    try:
        files.write(descriptor, memoryview(data))
        files.sync(descriptor)
    finally:
        files.close(descriptor)


def remove_tree(files: FileOps, folder: Path) -> None:
    """The folder and what is in it are gone; links are removed, not followed."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            remove_tree(files, Path(entry.path))
        else:
            files.unlink(Path(entry.path))
    files.remove_folder(folder)


def check_space(files: FileOps, folder: Path, needed_bytes: int) -> None:
    """There was room for ``needed_bytes`` a moment ago.

    Raises:
        CheckpointError: there is not; nothing has been written yet.
    """
    free_bytes = files.free_bytes(folder)
    if needed_bytes > free_bytes:
        raise CheckpointError(
            f"not enough space in {folder}: {needed_bytes:,} bytes are needed, {free_bytes:,} are free; "
            f"nothing was written and earlier checkpoints are untouched; "
            f"free space, keep fewer, or choose another folder"
        )


def write_failure(files: FileOps, folder: Path, needed_bytes: int, error: OSError) -> CheckpointError:
    """Return the error to raise when the disk refused a write; the half-written folder is never used."""
    if error.errno in NO_SPACE:
        return CheckpointError(
            f"the disk filled up while writing {folder}: {needed_bytes:,} bytes were needed, "
            f"{files.free_bytes(folder.parent):,} are free now ({error.strerror}); "
            f"earlier checkpoints are untouched; "
            f"free space, keep fewer, or choose another folder"
        )
    return CheckpointError(
        f"could not write {error.filename or folder}: {error.strerror or error}; "
        f"a file whose write or sync failed is never used again and earlier checkpoints are untouched; "
        f"look at the disk, then save again"
    )
