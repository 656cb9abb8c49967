"""A disk that crashes, fills up or loses its cache at a chosen operation."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from counterpoint.checkpoint.file_ops import LocalFileOps


class SimulatedCrash(BaseException):
    """Crash of the process; not an ``Exception``, so that no handler catches it and nothing more is written."""


class FailingDisk(LocalFileOps):
    """The real disk until operation number ``fail_at`` (from 1); then every operation raises ``failure``.

    It counts operations, so it is mutable.

    Args:
        fail_at: first operation that fails; 0 for none, to count operations.
        failure: makes the exception; a ``SimulatedCrash`` simulates kill -9.
        free: result of ``free_bytes`` from operation ``fail_at`` on; None uses the real disk.
    """

    def __init__(
        self, fail_at: int = 0, failure: Callable[[], BaseException] = SimulatedCrash, free: int | None = None
    ) -> None:
        self.log: list[str] = []
        self._fail_at = fail_at
        self._failure = failure
        self._free = free
        self._paths: dict[int, Path] = {}
        self._unsynced_files: set[Path] = set()
        self._unsynced_names: list[tuple[str, Path, Path]] = []

    def drop_unsynced(self) -> None:
        """Simulate a power failure at the worst moment: undo everything that was not synced."""
        for path in self._unsynced_files:
            if path.exists():
                os.truncate(path, 0)
        for kind, source, target in reversed(self._unsynced_names):
            if not target.exists():
                continue
            if kind == "rename":
                target.rename(source)
            elif kind == "create":
                target.unlink()

    def make_folder(self, path: Path) -> None:
        """Create a folder."""
        self._step("make_folder", path)
        super().make_folder(path)

    def create(self, path: Path) -> int:
        """Create an empty file."""
        self._step("create", path)
        descriptor = super().create(path)
        self._paths[descriptor] = path
        self._unsynced_files.add(path)
        self._unsynced_names.append(("create", path, path))
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> None:
        """Append ``data``; if this operation fails, half of it."""
        try:
            self._step("write", self._paths[descriptor])
        except OSError:
            super().write(descriptor, data[: len(data) // 2])
            raise
        super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Sync a file's content."""
        self._step("sync", self._paths[descriptor])
        super().sync(descriptor)
        self._unsynced_files.discard(self._paths[descriptor])

    def sync_folder(self, path: Path) -> None:
        """Sync a folder's entries."""
        self._step("sync_folder", path)
        super().sync_folder(path)
        self._unsynced_names = [entry for entry in self._unsynced_names if entry[2].parent != path]

    def rename(self, source: Path, target: Path) -> None:
        """Rename ``source`` to ``target``."""
        self._step("rename", target)
        super().rename(source, target)
        self._unsynced_files = {target / path.name if path.parent == source else path for path in self._unsynced_files}

        def after_rename(path: Path) -> Path:
            return target / path.name if path.parent == source else path

        self._unsynced_names = [
            (kind, after_rename(first_path), after_rename(second_path))
            for kind, first_path, second_path in self._unsynced_names
        ]
        self._unsynced_names.append(("rename", source, target))

    def unlink(self, path: Path) -> None:
        """Delete a file."""
        self._step("unlink", path)
        super().unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Delete a folder."""
        self._step("remove_folder", path)
        super().remove_folder(path)

    def free_bytes(self, path: Path) -> int:
        """Return the simulated or the real free space."""
        return super().free_bytes(path) if self._free is None or len(self.log) < self._fail_at else self._free

    def _step(self, operation: str, path: Path) -> None:
        self.log.append(f"{operation} {path.name}")
        if self._fail_at and len(self.log) >= self._fail_at:
            raise self._failure()
