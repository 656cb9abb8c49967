"""The Python standard library's source files: real text that every machine already has.

Files are held out by the hash of their path: no window and no line of a held-out file is ever trained on, and a file
stays in its split when other files are added or removed.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from counterpoint.errors import DataError

DatasetSplit: TypeAlias = Literal["train", "held-out"]

SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "ensurepip"}
)
MACHINE_WRITTEN = "_sysconfigdata"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A source file.

    Args:
        path: relative to the standard library, with forward slashes on every system.
        content: its bytes.
    """

    path: str
    content: bytes

    @property
    def top_level(self) -> str:
        """The top-level package or module of the file."""
        return self.path.split("/", 1)[0].removesuffix(".py")


def read_sources(root: Path | None = None) -> tuple[SourceFile, ...]:
    """Return every readable source file below ``root``, sorted by path, except tests and installed packages.

    Args:
        root: folder to read; the running Python's standard library by default.

    Raises:
        DataError: no file was found.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    sources = tuple(sorted(_walk(folder), key=lambda source: source.path))
    if not sources:
        raise DataError(
            f"no readable .py file below {folder}; the text and lines datasets need the standard library's "
            "sources: use a Python with them, or give another root"
        )
    return sources


def select_split(sources: tuple[SourceFile, ...], split: DatasetSplit, one_in: int) -> tuple[SourceFile, ...]:
    """Return the files of one split; each file is in exactly one.

    Args:
        sources: files of both splits.
        split: ``"train"`` or ``"held-out"``.
        one_in: hold out one of this number of files, on average.

    Raises:
        DataError: there is no such split, or it has no file.
    """
    if split not in ("train", "held-out"):
        raise DataError(f"a dataset has no split {split!r}; give train or held-out")
    chosen = tuple(source for source in sources if is_held_out(source.path, one_in) == (split == "held-out"))
    if not chosen:
        raise DataError(
            f"none of the {len(sources)} files is in the split {split!r}: one file in {one_in} is held out, "
            "by the hash of its path; give a folder of more files"
        )
    return chosen


def is_held_out(path: str, one_in: int) -> bool:
    """Tell whether a file is held out; the same on every machine and in every process."""
    return zlib.crc32(path.encode("utf-8", "surrogateescape")) % one_in == 0


def _walk(root: Path) -> Iterator[SourceFile]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        for name in names:
            if name.endswith(".py") and not name.startswith(MACHINE_WRITTEN):
                yield from _read(root, Path(folder, name))


def _read(root: Path, file: Path) -> Iterator[SourceFile]:
    """Yield the file, unless it cannot be read or named."""
    try:
        yield SourceFile(file.relative_to(root).as_posix(), file.read_bytes())
    except OSError:
        return
