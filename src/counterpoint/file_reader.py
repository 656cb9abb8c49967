"""Open files that may come from elsewhere: regular files only, of a bounded size, and without waiting for a writer.

A pipe or a device can block or never end, and a link can lead out of the folder that a user has named. Errors are
``OSError``, with a ``strerror`` that says what the file is, so that callers report them as they report a missing file.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Literal, TypeAlias

Links: TypeAlias = Literal["followed", "refused"]
"""Whether a path may be a link: one that the user names may be, one below a folder that the user names may not."""

TEXT_MAX_BYTES = 64 * 2**20
"""The largest file that is read as a text."""

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


FileKind: TypeAlias = Literal["nothing", "folder", "file"]
"""What a path names; ``file`` stands for everything that is not a folder, such as a pipe."""


def find_file_kind(path: Path) -> FileKind:
    """Return what is at a path, links followed.

    Raises:
        OSError: the path cannot be examined: its name is too long, or this user has no access.
    """
    try:
        status = _status(path)
    except (FileNotFoundError, NotADirectoryError):
        return "nothing"
    return "folder" if stat.S_ISDIR(status.st_mode) else "file"


def open_regular_file(path: Path, *, links: Links = "followed") -> BufferedReader:
    """Open a regular file for reading.

    Args:
        path: of the file.
        links: whether the path may be a link.

    Raises:
        OSError: it cannot be opened, or is not a regular file; nothing else is ever opened.
    """
    _check_is_regular(_status(path, links=links), path)  # opening a device can already act
    no_follow = os.O_NOFOLLOW if links == "refused" else 0
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | no_follow), "rb")
    try:
        _check_is_regular(os.fstat(file.fileno()), path)
    except OSError:
        file.close()
        raise
    return file


def read_regular_file(path: Path, *, max_bytes: int, links: Links = "followed") -> bytes:
    """Return the content of a regular file.

    Args:
        path: of the file.
        max_bytes: the largest size that such a file can have.
        links: whether the path may be a link.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger.
    """
    with open_regular_file(path, links=links) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > max_bytes:
            problem = f"it has {num_bytes:,} bytes, and such a file has at most {max_bytes:,}"
            raise OSError(errno.EFBIG, problem, str(path))
        return file.read(num_bytes)


def read_regular_text(path: Path, *, max_bytes: int = TEXT_MAX_BYTES, links: Links = "followed") -> str:
    r"""Return the text of a regular file in UTF-8, with ``\n`` at the end of each line.

    Args:
        path: of the file.
        max_bytes: the largest size that such a file can have.
        links: whether the path may be a link.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger.
        UnicodeDecodeError: it is not UTF-8.
    """
    text = read_regular_file(path, max_bytes=max_bytes, links=links).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _status(path: Path, *, links: Links = "followed") -> os.stat_result:
    try:
        return path.stat(follow_symlinks=links == "followed")
    except ValueError as error:
        raise OSError(errno.EINVAL, "its name has a null byte", str(path)) from error


def _check_is_regular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, and only regular files are read", str(path))
