"""The file operations of a save, behind an interface so that tests can fail at any of them; errors of full disks."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Protocol

from counterpoint.errors import CheckpointError, CheckpointWriteError
from counterpoint.file_reader import find_file_kind

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class FileOps(Protocol):
    """The file operations of a save; loading only reads and does not use them."""

    def make_folder(self, path: Path) -> None:
        """Create a folder; it must not exist."""

    def create(self, path: Path) -> int:
        """Create an empty file; return a descriptor that is open for writing."""

    def write(self, descriptor: int, data: memoryview) -> None:
        """Append all of ``data`` to the file."""

    def sync(self, descriptor: int) -> None:
        """Make the bytes written so far durable."""

    def close(self, descriptor: int) -> None:
        """Close the descriptor."""

    def sync_folder(self, path: Path) -> None:
        """Make the names in the folder durable."""

    def rename(self, source: Path, target: Path) -> None:
        """Move ``source`` to ``target`` atomically."""

    def unlink(self, path: Path) -> None:
        """Remove a file."""

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""

    def free_bytes(self, path: Path) -> int:
        """Return the free bytes, for an ordinary user, of the disk of ``path``."""


class LocalFileOps:
    """The real file system."""

    def make_folder(self, path: Path) -> None:
        """Create a folder; it must not exist."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """Create an empty file; return a descriptor that is open for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)

    def write(self, descriptor: int, data: memoryview) -> None:
        """Append all of ``data`` to the file."""
        while data:
            data = data[os.write(descriptor, data) :]

    def sync(self, descriptor: int) -> None:
        """Make the bytes written so far durable."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close the descriptor."""
        os.close(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Make the names in the folder durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Move ``source`` to ``target`` atomically."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def free_bytes(self, path: Path) -> int:
        """Return the free bytes, for an ordinary user, of the disk of ``path``."""
        stats = os.statvfs(path)
        return stats.f_bavail * stats.f_frsize


LOCAL_FILES = LocalFileOps()


def write_file(files: FileOps, path: Path, data: bytes) -> None:
    """Write ``data`` to a new file; it is durable once its folder is synced."""
    descriptor = files.create(path)
    try:
        files.write(descriptor, memoryview(data))
        files.sync(descriptor)
    finally:
        files.close(descriptor)


def remove_tree(files: FileOps, folder: Path) -> None:
    """Remove a folder with its contents, or a link to one; links are removed, not followed."""
    if folder.is_symlink():
        files.unlink(folder)
        return
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            remove_tree(files, Path(entry.path))
        else:
            files.unlink(Path(entry.path))
    files.remove_folder(folder)


def check_space(files: FileOps, folder: Path, needed_bytes: int) -> None:
    """Check that there is free space, before anything is written.

    Raises:
        CheckpointWriteError: there is not enough.
    """
    free_bytes = files.free_bytes(folder)
    if needed_bytes > free_bytes:
        raise CheckpointWriteError(
            f"not enough space in {folder}: {needed_bytes:,} bytes are needed, {free_bytes:,} are free; "
            f"nothing was written and earlier checkpoints are untouched; "
            f"free space, keep fewer, or choose another folder"
        )


def write_failure(files: FileOps, folder: Path, needed_bytes: int, error: OSError) -> CheckpointWriteError:
    """Return the error for a failed write; a folder that is not complete is never used."""
    if error.errno in NO_SPACE:
        return CheckpointWriteError(
            f"the disk filled up while writing {folder}: {needed_bytes:,} bytes were needed, "
            f"{files.free_bytes(folder.parent):,} are free now ({error.strerror}); "
            f"earlier checkpoints are untouched; "
            f"free space, keep fewer, or choose another folder"
        )
    return CheckpointWriteError(
        f"could not write {error.filename or folder}: {error.strerror or error}; "
        f"a file whose write or sync failed is never used again and earlier checkpoints are untouched; "
        f"check the disk, then save again"
    )


def is_folder(path: Path) -> bool:
    """Tell whether a path leads to a folder.

    Raises:
        CheckpointError: this user cannot find out.
    """
    try:
        return find_file_kind(path) == "folder"
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a folder of checkpoints that cannot be read."""
    return CheckpointError(f"{path} cannot be read: {error.strerror}; give a folder that this user may read")
