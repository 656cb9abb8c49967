"""The Python standard library's own source files: real text that every machine already has.

What is held out is decided by file, by a hash of the file's path: no window and no line of a held-out file is
ever trained on, and a file stays on its side when others come or go.
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
    """One file.

    Args:
        path: relative to the standard library, with forward slashes on every system.
        content: its bytes.
    """

    path: str
    content: bytes

    @property
    def top_level(self) -> str:
        """The package or module that the file belongs to, as one would import it."""
        return self.path.split("/", 1)[0].removesuffix(".py")


def read_sources(root: Path | None = None) -> tuple[SourceFile, ...]:
    """Return every readable source file below ``root`` in the order of the paths.

    Tests and installed packages are left out.

    Args:
        root: folder to read; the running Python's standard library if not given.

    Raises:
        DataError: not one file was found.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    sources = tuple(sorted(_walk(folder), key=lambda source: source.path))
    if not sources:
        raise DataError(
            f"no readable .py file below {folder}; the text and lines datasets are made of the standard "
            "library's sources; use a Python that ships them, or give another root"
        )
    return sources


def select_split(sources: tuple[SourceFile, ...], split: DatasetSplit, one_in: int) -> tuple[SourceFile, ...]:
    """Return the files of one part; together the parts are all files, and no file is in both.

    Args:
        sources: files of both parts.
        part: ``"train"`` or ``"held-out"``.
        one_in: hold out one file in so many, on average.

    Raises:
        DataError: there is no such part, or it has no file.
    """
    if split not in ("train", "held-out"):
        raise DataError(f"there is no part {split!r} of a dataset; the parts are train and held-out; give one of them")
    chosen = tuple(source for source in sources if is_held_out(source.path, one_in) == (split == "held-out"))
    if not chosen:
        raise DataError(
            f"none of the {len(sources)} files is in the part {split!r}; one file in {one_in} is held out, "
            "chosen by the hash of its path; give a folder of more files"
        )
    return chosen


def is_held_out(path: str, one_in: int) -> bool:
    """Return whether a file is held out; the same on every machine and in every process."""
    return zlib.crc32(path.encode()) % one_in == 0


def _walk(root: Path) -> Iterator[SourceFile]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        for name in names:
            if name.endswith(".py") and not name.startswith(MACHINE_WRITTEN):
                yield from _read(root, Path(folder, name))


def _read(root: Path, file: Path) -> Iterator[SourceFile]:
    """Yield the file, or nothing where it cannot be read or named."""
    try:
        yield SourceFile(file.relative_to(root).as_posix(), file.read_bytes())
    except OSError:
        return
