"""Write files: outputs are known early to be writable, no link is written through, and nothing is half there.

A folder may come from elsewhere, or others may write to it, and a name in it that can be foreseen may be a link to a
file of this user. So files are written under a name that cannot be foreseen, and renamed into place.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from counterpoint.errors import PlanError
from counterpoint.file_reader import find_file_kind
from counterpoint.terminal_text import escape_surrogates


def encode_text(text: str) -> bytes:
    """Return a text in UTF-8; bytes of a file name that are not UTF-8 are escaped in it."""
    return escape_surrogates(text).encode()


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file, atomically: at any time it is as before, or complete.

    Args:
        path: of the file; a link there is replaced, not followed.
        content: of the file; a text is written in UTF-8.

    Raises:
        OSError: it cannot be written, and is as before.
    """
    data = encode_text(content) if isinstance(content, str) else content
    draft = path.with_name(f".{path.name}.{token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            write_all(descriptor, data)
        finally:
            os.close(descriptor)
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def write_output(path: Path, text: str) -> None:
    """Write a text to the file that a user has named: a new one, one that is replaced, a pipe or a device.

    Raises:
        PlanError: it cannot be written.
    """
    try:
        if find_file_kind(path) == "file":
            descriptor = open_output(path)
            try:
                write_all(descriptor, encode_text(text))
            finally:
                os.close(descriptor)
        else:
            replace_file(path, text)
    except OSError as error:
        raise unwritable(path, error) from None


def open_output(path: Path) -> int:
    """Return a descriptor of the file that a user has named, emptied or new; a pipe that nobody reads is an error.

    Raises:
        OSError: it cannot be opened.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = os.open(path, flags, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


def require_writable(*paths: Path | None) -> None:
    """Check that files which a user has named can be written, before what shall be written there is computed.

    Args:
        paths: of the files; None for none.

    Raises:
        PlanError: one cannot.
    """
    for path in paths:
        if path is None:
            continue
        try:
            kind = find_file_kind(path)
            if kind == "folder":
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if find_file_kind(path.parent) == "nothing":
                raise PlanError(
                    f"there is no folder {path.parent} to write {path.name} in; make it, or give another file"
                )
            if not os.access(path if kind == "file" else path.parent, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError) -> PlanError:
    """Return the error for a file that a user has named and that cannot be written."""
    return PlanError(f"{path} cannot be written: {error.strerror}; give another file")


def append_whole(descriptor: int, data: bytes) -> None:
    """Append data to a file, or nothing: what a full disk has taken of it is removed again.

    Args:
        descriptor: of a file that is open for appending, by this process only.
        data: a line or a record.

    Raises:
        OSError: it cannot be written, and the file is as before.
    """
    size = os.fstat(descriptor).st_size
    try:
        write_all(descriptor, data)
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, size)
            os.lseek(descriptor, size, os.SEEK_SET)
        raise


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data; a single call may take only a part of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
